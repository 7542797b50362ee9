"""Tells the cost model what a live run takes, whether a policy moves its slots or not: profiles have it in any case.

What the parts of a policy's changes cost, their actuator says (`ductile.elastic.actuator`).
"""

from functools import partial

from ductile.concurrency.listeners import Listeners
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.scheduling.costs.cost_model import CostModel
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.trainer.micro_steps import MicroStepDone
from ductile.messages.workers import EngineStats
from ductile.transport.mailbox import Mailbox, SlotEvent


class Measuring:
    def __init__(self, mailbox: Mailbox, fleet: RunRoles, costs: CostModel) -> None:
        self.on_change = Listeners[[]]()
        """Told when something is known anew: after each micro-step, and once there is a first speed of generation."""
        self._trainer, self._costs = fleet.trainer, costs
        self._trained_in: int | None = None
        """The trainer's epoch at the latest micro-step."""
        fleet.on_migrated.add(costs.migrated)
        fleet.on_released.add(partial(costs.took, "release"))
        fleet.trainer.on_micro_step.add(self._on_micro_step)
        mailbox.subscribe(self._on_event)

    def _on_micro_step(self, done: MicroStepDone) -> None:
        # By epoch: a resize there and back ends on the same slots, and micro-steps come before a resize is finalized.
        first, self._trained_in = self._trainer.epoch != self._trained_in, self._trainer.epoch
        took = self._costs.first_micro_step if first else self._costs.micro_step
        layout = self._trainer.layout
        # As many tokens as a full message would have in the same time: rows are compared with each other.
        tokens = done.tokens_fullest * PipelineShape.of(layout).stretch(done.per_rank)
        took(tokens, done.num_ranks, done.busy_s, layout.dims.rank_shape)
        self.on_change()

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, EngineStats):
            knew = self._costs.knows_generation
            self._costs.decoded(event.decoded)
            self._costs.prefilled(*event.prefilled)
            if self._costs.knows_generation and not knew:
                self.on_change()
