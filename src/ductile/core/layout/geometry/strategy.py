"""Says where each parameter of a model lies in a trainer's layout. What the axes do to it:

    pp             stages of layers: a slot holds only what belongs to its stage
    dp_replicate   copies
    dp_shard, cp   FSDP2 over both together: chunks of dim 0 of what tp has left. With dp_replicate this is HSDP
    tp             columns, rows or vocabulary; fused tensors by component

Every parameter has a row in two tables, and a name that has none is refused: `tensor_parallel` says how tp cuts it,
`_ENDS` to which end of the pipeline it belongs, where it is no layer's. Experts (ep) are in neither yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

from ductile.core.layout.geometry.holdings import Holdings, Shape
from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.parallel_layout import FULLY_SHARDED, ParallelLayout
from ductile.core.layout.geometry.sharding import Shard, local_shape, place
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec

MOST_BLOCK_COLUMNS, LEAST_BLOCK_COLUMNS = 256, 8
TP_OF_BLOCKS = 8
"""tp, and its divisors, for which no block of 8-bit moments is cut."""
_ENDS = {"embed.weight": "first", "norm.weight": "last", "lm_head.weight": "last"}
"""Stage of what belongs to no layer. Tied embeddings are also the last stage's."""


def tensor_parallel(spec: ModelSpec, vocab_rows: int) -> dict[str, Shard | None]:
    """How tp cuts a parameter, by the last part of its name; None: it is whole on every tp slot. `vocab_rows` has the
    rows of padding, too."""
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    vocabulary = Shard("tp", 0, padded=vocab_rows)
    heads = Shard("tp", 0, ((query, spec.num_heads), (key, spec.num_kv_heads), (key, spec.num_kv_heads)))
    gate_and_up = Shard("tp", 0, ((spec.intermediate_size, spec.intermediate_size),) * 2)
    of_heads, inputs_of_down = Shard("tp", 1, ((query, spec.num_heads),)), Shard("tp", 1)
    rules: dict[str, Shard | None] = {
        "embed.weight": vocabulary,
        "attention_norm.weight": None,
        "attention.qkv_proj.weight": heads,
        "attention.qkv_proj.bias": heads,
        "attention.q_norm.weight": None,
        "attention.k_norm.weight": None,
        "attention.o_proj.weight": of_heads,
        "attention.o_proj.bias": None,  # added to the sum of the products, once
        "mlp_norm.weight": None,
        "mlp.gate_up_proj.weight": gate_and_up,
        "mlp.gate_up_proj.bias": gate_and_up,
        "mlp.down_proj.weight": inputs_of_down,
        "mlp.down_proj.bias": None,
        "norm.weight": None,
        "lm_head.weight": vocabulary,
    }
    if spec.lora is None:
        return rules
    return rules | {
        "attention.qkv_proj.lora_A": None,
        "attention.qkv_proj.lora_B": _of_targets(heads, spec.lora.among("attention.qkv_proj")),
        "attention.o_proj.lora_A": of_heads,
        "attention.o_proj.lora_B": None,
        "mlp.gate_up_proj.lora_A": None,
        "mlp.gate_up_proj.lora_B": _of_targets(gate_and_up, spec.lora.among("mlp.gate_up_proj")),
        "mlp.down_proj.lora_A": inputs_of_down,
        "mlp.down_proj.lora_B": None,
    }


def model_layout(spec: ModelSpec, parallel: ParallelLayout, dtype: str = "bfloat16", vocab_multiple: int = 1) -> Layout:
    """All parameters of `spec` in the layout. Each tp slot gets equally many vocabulary rows, a multiple of
    `vocab_multiple`; the rows past the vocabulary are padding.

    Raises ValueError for a layout with ep above 1, for stages of other layers than the model has, and for a parameter
    whose place nothing says.
    """
    splits = tensor_parallel(spec, _vocab_rows(spec, parallel.dims.tp, vocab_multiple))
    shapes = {parameter.name: (parameter.shape, _split(parameter.name, splits)) for parameter in parameters(spec)}
    return _laid_out(shapes, spec, parallel, dtype)


def block_columns(spec: ModelSpec) -> dict[str, int]:
    """Columns of the blocks that share a scale, by parameter, where moments have 8 bits: a power of two up to
    `MOST_BLOCK_COLUMNS`. A block lies in one row, and tp cuts columns between blocks alone, so that what a block has is
    the same in every layout. Vectors have none, and matrices whose columns leave no block of 8."""
    splits = tensor_parallel(spec, spec.vocab_size)
    found: dict[str, int] = {}
    for parameter in parameters(spec):
        if len(parameter.shape) != 2:
            continue
        unit, split = parameter.shape[1], _split(parameter.name, splits)
        if split is not None and split.dim == 1:
            units = split.parts[0][1] if split.parts else TP_OF_BLOCKS
            unit = unit // units if unit % units == 0 else 1
        columns = gcd(unit, MOST_BLOCK_COLUMNS)
        if columns >= LEAST_BLOCK_COLUMNS:
            found[parameter.name] = columns
    return found


def block_layout(spec: ModelSpec, parallel: ParallelLayout) -> Layout:
    """The scales of all blocks (`block_columns`) in the layout, by parameter: as many rows as it has, and a column for
    each block. Raises ValueError for a tp that cuts a block."""
    splits, tp = tensor_parallel(spec, _vocab_rows(spec, parallel.dims.tp)), parallel.dims.tp
    shapes: dict[str, tuple[Shape, Shard | None]] = {}
    whole = {parameter.name: parameter.shape for parameter in parameters(spec)}
    for name, columns in block_columns(spec).items():
        rows, width = whole[name]
        split = _split(name, splits)
        if split is not None and split.dim == 1:
            if not split.parts and -(-width // tp) % columns:
                raise ValueError(
                    f"tp = {tp} cuts {name} inside a block of 8-bit moments, which has {columns} of {width} columns: "
                    f'write a tp that divides {TP_OF_BLOCKS}, or trainer.optim.moments = "full"'
                )
            split = replace(split, parts=tuple((length // columns, units) for length, units in split.parts))
        shapes[name] = (rows, width // columns), split
    return _laid_out(shapes, spec, parallel, "float32")


def _laid_out(
    shapes: Mapping[str, tuple[Shape, Shard | None]], spec: ModelSpec, parallel: ParallelLayout, dtype: str
) -> Layout:
    """Tensors by the parameter with which they go: of these shapes, and cut so by tp."""
    mesh, stages = parallel.mesh, parallel.stages_of(spec.num_layers)
    if parallel.dims.ep > 1:
        raise ValueError(f"ep is {parallel.dims.ep}, and where experts lie is not built yet: write ep = 1")
    known: dict[tuple[Shape, tuple[Shard, ...], tuple[int, ...]], Holdings] = {}
    tensors: list[Tensor] = []
    for name, (shape, split) in shapes.items():
        steps = (*([split] if split else []), Shard(FULLY_SHARDED, 0))
        what = (shape, steps, _stages_of(name, spec, stages, parallel.dims.pp))
        if what not in known:
            known[what] = place(shape, mesh, steps, (("pp", what[2]),))
        tensors.append(Tensor(name, dtype, known[what]))
    return Layout(tensors, parallel.slots)


def tensor_parallel_shapes(spec: ModelSpec, parallel: ParallelLayout, slot: int) -> dict[str, Shape]:
    """Shape that tp leaves of each parameter on a slot, before FSDP2 deals out its rows; padding included."""
    splits = tensor_parallel(spec, _vocab_rows(spec, parallel.dims.tp))
    found: dict[str, Shape] = {}
    for parameter in parameters(spec):
        split = _split(parameter.name, splits)
        found[parameter.name] = local_shape(parameter.shape, parallel.mesh, [split] if split else [], slot)
    return found


def _of_targets(split: Shard, is_target: Sequence[bool]) -> Shard:
    """The split of a fused module's rows without those of projections that have no adapter. Such a component is still
    there, with no rows: a slot has the adapters of the heads that it has."""
    parts = ((length * kept, units) for (length, units), kept in zip(split.parts, is_target, strict=True))
    return replace(split, parts=tuple(parts))


def _vocab_rows(spec: ModelSpec, tp: int, multiple: int = 1) -> int:
    unit = multiple * tp
    return -(-spec.vocab_size // unit) * unit


def _split(name: str, splits: Mapping[str, Shard | None]) -> Shard | None:
    kind = name.split(".", 2)[2] if name.startswith("layers.") else name  # layers.3.mlp.down_proj.weight
    if kind not in splits:
        raise ValueError(f"nothing says how tp cuts {name}: write {kind!r} in `strategy.tensor_parallel`")
    return splits[kind]


def _stages_of(name: str, spec: ModelSpec, stages: Sequence[int], pp: int) -> tuple[int, ...]:
    if name.startswith("layers."):
        return (stages[int(name.split(".")[1])],)
    if name not in _ENDS:
        raise ValueError(f"nothing says which stage has {name}: write it in `strategy._ENDS`")
    if _ENDS[name] == "last":
        return (pp - 1,)
    return (0, pp - 1) if spec.tie_embeddings and pp > 1 else (0,)
