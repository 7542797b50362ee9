"""How micro-batches run through the stages of pp.

    runs_of_layers(layout, 4)      stages (0, 0, 1, 1)    runs of layers 0-1 and 2-3
                                   stages (0, 1, 0, 1)    runs of one layer each: slots of stage 0 have the 1st and 3rd

A run of layers is what `torch.distributed.pipelining` calls a stage, and Megatron a virtual stage. With one run a slot
the schedule is 1F1B, with several it is interleaved: run number r is on coordinate r % pp of pp, as torch's schedules
have it.

While a message of micro-batches fills the stages and empties them, slots wait: the bubble. How many micro-batches are
worth a message, and for how long slots wait with fewer, is `PipelineShape`'s answer to all who reckon with it: the loop
that feeds the trainer, packing, the planner, the cost model and the simulator.
"""

from dataclasses import dataclass
from itertools import count, groupby
from typing import Literal

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.stages import contiguous_stages

PipelineSchedule = Literal["1f1b", "interleaved", "zero_bubble"]

MICRO_BATCHES_A_STAGE = 4
"""Micro-batches of a message, for each stage of a pipeline with one run of layers a slot. Of 5 pp - 1 turns a slot then
waits for the others in pp - 1, which is less than a fifth. With more runs it takes fewer micro-batches."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Stages of a pipeline, and runs of layers on each of its slots. A turn is what a slot works on one micro-batch.

    The bubble is that of 1F1B, plain or interleaved; with "zero_bubble" slots wait for less.
    """

    pp: int
    runs_of_slot: int = 1

    @staticmethod
    def of(parallel: ParallelLayout) -> "PipelineShape":
        pp = parallel.dims.pp
        return PipelineShape(pp, max(1, len(list(groupby(parallel.stages))) // pp))

    @property
    def bubble_turns(self) -> float:
        """Turns for which a slot waits in each message."""
        return (self.pp - 1) / self.runs_of_slot

    def bubble(self, num_micro_batches: float) -> float:
        """Share of the time for which a slot waits when a message has so many micro-batches of its rank."""
        return self.bubble_turns / (num_micro_batches + self.bubble_turns)

    def stretch(self, num_micro_batches: int) -> float:
        """How many times as long as in a full message a token takes in one of so many micro-batches."""
        return (1 - self.bubble(self.full_message)) / (1 - self.bubble(num_micro_batches))

    @property
    def full_message(self) -> int:
        """Micro-batches of a data-parallel rank that are worth a message. Without a pipeline it is one: no slot waits
        for another stage then, and a change of layout waits for one micro-batch at most."""
        return 1 if self.pp == 1 else self.pp * -(-MICRO_BATCHES_A_STAGE // self.runs_of_slot)

    def messages(self, num_micro_batches: int) -> tuple[int, ...]:
        """Sizes of the messages in which so many micro-batches go out: alike, and each between 3/4 and 3/2 of a full
        message, so that none of a few left over fills and empties the stages for itself."""
        if not num_micro_batches:
            return ()
        number = max(1, round(num_micro_batches / self.full_message))
        size, larger = divmod(num_micro_batches, number)
        return (size + 1,) * larger + (size,) * (number - larger)


NO_PIPELINE = PipelineShape(1)


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
    """The fewest micro-batches, at least so many, that a schedule takes. Plain 1F1B takes any number; the others have
    rounds of equally many micro-batches, as many rounds as pp goes into their number."""
    if schedule != "zero_bubble" and runs_of_slot == 1:
        return num_micro_batches
    return next(number for number in count(num_micro_batches) if number % max(1, number // pp) == 0)
