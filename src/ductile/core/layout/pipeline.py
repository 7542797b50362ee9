"""How micro-batches run through the stages of pp.

    runs_of_layers(layout, 4)      stages (0, 0, 1, 1)    runs of layers 0-1 and 2-3
                                   stages (0, 1, 0, 1)    runs of one layer each: slots of stage 0 have the 1st and 3rd

A run of layers is what `torch.distributed.pipelining` calls a stage, and Megatron a virtual stage. With one run a slot
the schedule is 1F1B, with several it is interleaved: run number r is on coordinate r % pp of pp, as torch's schedules
have it.
"""

from itertools import groupby
from typing import Literal

from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.core.layout.stages import contiguous_stages

PipelineSchedule = Literal["1f1b", "interleaved", "zero_bubble"]

MICRO_BATCHES_A_STAGE = 4
"""Micro-batches of a message, for each stage of a pipeline with one run of layers a slot. Of 5 pp - 1 turns a slot then
waits for the others in pp - 1, which is less than a fifth. With more runs it takes fewer micro-batches."""


def runs_of_layers(parallel: ParallelLayout, num_layers: int) -> tuple[range, ...]:
    """Layers of every run, in the order of a forward pass. Raises ValueError for stages that no schedule takes."""
    pp = parallel.dims.pp
    stages = parallel.stages or contiguous_stages(num_layers, pp)
    found: list[tuple[int, range]] = []
    for stage, layers in groupby(range(len(stages)), key=stages.__getitem__):
        numbers = list(layers)
        found.append((stage, range(numbers[0], numbers[-1] + 1)))
    in_turns = [number % pp for number in range(len(found))]
    if [stage for stage, _ in found] != in_turns or len(found) % pp:
        raise ValueError(
            f"the layers are on stages {list(stages)}, and a pipeline takes runs of layers on stages 0 to {pp - 1} in "
            f"turns, once or several times: such as {list(contiguous_stages(2 * pp, pp))} or {[*range(pp)] * 2} for "
            f"{2 * pp} layers"
        )
    return tuple(layers for _, layers in found)


def num_to_run(num_micro_batches: int, pp: int, runs_of_slot: int, schedule: PipelineSchedule) -> int:
    """The fewest micro-batches, at least so many, that a schedule takes. All but plain 1F1B have rounds of equally many
    micro-batches, as many rounds as pp goes into their number: more than pp are filled up to a multiple of it."""
    if num_micro_batches <= pp or (schedule == "1f1b" and runs_of_slot == 1):
        return num_micro_batches
    return -(-num_micro_batches // pp) * pp


def micro_batches_of_message(parallel: ParallelLayout) -> tuple[int, str]:
    """How many micro-batches of a data-parallel rank are given to its slots at a time, and why."""
    pp = parallel.dims.pp
    if pp == 1:
        return 1, "a slot waits for no other stage, and a change of layout for one micro-batch at most"
    runs_of_slot = max(1, len(list(groupby(parallel.stages))) // pp)
    number = pp * -(-MICRO_BATCHES_A_STAGE // runs_of_slot)
    waits = (pp - 1) / (runs_of_slot * number + pp - 1)
    return number, f"{pp} stages fill and empty for each message: with {number} micro-batches {waits:.0%} of the time"
