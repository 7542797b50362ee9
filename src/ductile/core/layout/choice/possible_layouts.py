"""All layouts that a model can have on a number of slots."""

from collections.abc import Iterator

from ductile.core.layout.choice.tp_sizes import even_tp_sizes
from ductile.core.layout.geometry.context_parallel import CpStyleAsked, style_violation
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.model.spec import ModelSpec


def possible_layouts(
    spec: ModelSpec, num_slots: int, cp_style: CpStyleAsked = "auto", num_runs: int = 1, most_tp: int | None = None
) -> Iterator[ParallelDims]:
    """Yield the sizes of every layout on so many slots that deals heads and rows out evenly and leaves no stage without
    a layer.

    Args:
        num_runs: runs of layers on each slot of pp.
        most_tp: largest size of tp; None: any.
    """
    tps = [tp for tp in even_tp_sizes(spec) if num_slots % tp == 0 and (most_tp is None or tp <= most_tp)]
    for tp in tps:
        for cp in factors(num_slots // tp):
            if cp_style == "ulysses" and style_violation("ulysses", spec.num_heads, cp, tp):
                continue
            for pp in factors(num_slots // (tp * cp)):
                if pp > 1 and pp * num_runs > spec.num_layers:
                    continue
                num_ranks = num_slots // (tp * cp * pp)
                for copies in factors(num_ranks):
                    yield ParallelDims(pp, copies, num_ranks // copies, cp, tp)


def factors(number: int) -> list[int]:
    """Return the numbers that divide this one, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]
