"""The layout of a model on a mesh. The names of the axes say what they do:

    pp             stages of layers: a slot holds only what belongs to its stage
    dp_replicate   copies
    dp_shard, cp   FSDP2 over both together: chunks of dim 0 of what tp has left. With dp_replicate this is HSDP
    tp             columns, rows or vocabulary; fused tensors by component

Axes of size 1 can be left out, and the order of the axes is free: it says only which slots are neighbours.
`ductile.core.layout.parallel_layout` has the mesh of a trainer.
"""

from collections.abc import Sequence

from ductile.core.layout.holdings import Holdings, Shape
from ductile.core.layout.layout import Layout, Tensor
from ductile.core.layout.mesh import Mesh
from ductile.core.layout.parallel_layout import FULLY_SHARDED
from ductile.core.layout.parameters import parameters
from ductile.core.layout.sharding import Shard, local_shape, place
from ductile.core.layout.spec import ModelSpec
from ductile.core.layout.stages import contiguous_stages


def tensor_parallel(spec: ModelSpec, vocab_rows: int) -> dict[str, Shard]:
    """How tp cuts a parameter, by the last part of its name. `vocab_rows` has the rows of padding, too.

    Parameters that are not here (norms, biases after a row-parallel product) are whole on every tp slot.
    """
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    vocabulary = Shard("tp", 0, padded=vocab_rows)
    heads = Shard("tp", 0, ((query, spec.num_heads), (key, spec.num_kv_heads), (key, spec.num_kv_heads)))
    gate_and_up = Shard("tp", 0, ((spec.intermediate_size, spec.intermediate_size),) * 2)
    return {
        "embed.weight": vocabulary,
        "lm_head.weight": vocabulary,
        "attention.qkv_proj.weight": heads,
        "attention.qkv_proj.bias": heads,
        "attention.o_proj.weight": Shard("tp", 1, ((query, spec.num_heads),)),
        "mlp.gate_up_proj.weight": gate_and_up,
        "mlp.gate_up_proj.bias": gate_and_up,
        "mlp.down_proj.weight": Shard("tp", 1),
    }


def model_layout(
    spec: ModelSpec,
    mesh: Mesh,
    dtype: str = "bfloat16",
    stages: Sequence[int] | None = None,
    vocab_multiple: int = 1,
) -> Layout:
    """All parameters of `spec` on `mesh`.

    `stages[layer]` is the pp stage of each layer (uneven and interleaved ones too); by default stages are contiguous
    and the first ones have the spare layers. Each tp slot gets equally many vocabulary rows, a multiple of
    `vocab_multiple`; the rows past the vocabulary are padding.
    """
    if stages is None:
        stages = contiguous_stages(spec.num_layers, mesh.size(("pp",)))
    if len(stages) != spec.num_layers or not all(0 <= stage < mesh.size(("pp",)) for stage in stages):
        raise ValueError(f"stages {tuple(stages)} do not place {spec.num_layers} layers on {mesh.size(('pp',))} stages")
    splits = tensor_parallel(spec, _vocab_rows(spec, mesh, vocab_multiple))
    known: dict[tuple[Shape, tuple[Shard, ...], tuple[int, ...]], Holdings] = {}
    tensors: list[Tensor] = []
    for parameter in parameters(spec):
        split = splits.get(_kind(parameter.name))
        steps = (*([split] if split else []), Shard(FULLY_SHARDED, 0))
        what = (parameter.shape, steps, _stages_of(parameter.name, spec, stages, mesh))
        if what not in known:
            known[what] = place(parameter.shape, mesh, steps, (("pp", what[2]),))
        tensors.append(Tensor(parameter.name, dtype, known[what]))
    return Layout(tensors, mesh.slots)


def tensor_parallel_shapes(spec: ModelSpec, mesh: Mesh, slot: int) -> dict[str, Shape]:
    """Shape that tp leaves of each parameter on a slot, before FSDP2 deals out its rows; padding included."""
    splits = tensor_parallel(spec, _vocab_rows(spec, mesh))
    found: dict[str, Shape] = {}
    for parameter in parameters(spec):
        split = splits.get(_kind(parameter.name))
        found[parameter.name] = local_shape(parameter.shape, mesh, [split] if split else [], slot)
    return found


def _vocab_rows(spec: ModelSpec, mesh: Mesh, multiple: int = 1) -> int:
    unit = multiple * mesh.size(("tp",))
    return -(-spec.vocab_size // unit) * unit


def _kind(name: str) -> str:
    """`layers.3.mlp.down_proj.weight` -> `mlp.down_proj.weight`"""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _stages_of(name: str, spec: ModelSpec, stages: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    last = mesh.size(("pp",)) - 1
    if name.startswith("layers."):
        return (stages[int(name.split(".")[1])],)
    if name == "embed.weight":
        return (0, last) if spec.tie_embeddings and last else (0,)
    return (last,)
