"""Which stage of pp has which layers.

    contiguous_stages(5, 2)          (0, 0, 0, 1, 1)
    balanced_stages(spec, 2)         the same, but the output embeddings count as so many layers of the last stage
    balanced_stages(spec, 2, 2)      (0, 0, 1, 1, 0, 0, 1): interleaved, two runs of layers on each slot

A run of layers with one stage is what `torch.distributed.pipelining` calls a stage (Megatron: a virtual pipeline
stage); a slot has `vpp` of them, and the last one, with the output embeddings, is always on the last slot.
"""

from ductile.core.layout.model.flops import layer_matrix_parameters
from ductile.core.layout.model.spec import ModelSpec

Stages = tuple[int, ...]
"""Stage (coordinate along pp) of each layer."""


def contiguous_stages(num_layers: int, num_stages: int) -> Stages:
    """Equally many layers on each stage, in order; the first ones have the spare layers."""
    return tuple(layer * num_stages // num_layers for layer in range(num_layers))


def balanced_stages(spec: ModelSpec, pp: int, vpp: int = 1) -> Stages:
    """Stages that take as equally long as whole layers allow, when every token is scored. Raises ValueError where
    there are fewer layers than runs of layers."""
    sizes = _layers_of_runs(spec.num_layers, pp * vpp, head_layers(spec))
    return tuple(run % pp for run, size in enumerate(sizes) for _ in range(size))


def head_layers(spec: ModelSpec) -> float:
    """How many layers' products the output embeddings are worth, for a token that is scored."""
    return spec.vocab_size * spec.hidden_size / layer_matrix_parameters(spec)


def _layers_of_runs(num_layers: int, num_runs: int, head: float) -> list[int]:
    """Layers of each run. The last one, whose head counts as `head` layers, has as many as leave the longest run
    shortest; of equally good numbers the largest."""
    if num_runs > num_layers:
        raise ValueError(f"{num_layers} layers do not fill {num_runs} stages")
    if num_runs == 1:
        return [num_layers]

    def longest(last: int) -> float:
        return max(-(-(num_layers - last) // (num_runs - 1)), last + head)

    last = min(range(1, num_layers - num_runs + 2), key=lambda last: (longest(last), -last))
    small, larger = divmod(num_layers - last, num_runs - 1)
    return [*[small + 1] * larger, *[small] * (num_runs - 1 - larger), last]
