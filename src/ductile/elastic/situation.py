"""Why slots may have nothing to do, by the books of the step and what the roles have been given."""

from dataclasses import dataclass

from ductile.elastic.step_accounting import SamplesInFlight, StepAccounting
from ductile.fleet.run_roles import RunRoles


@dataclass(frozen=True, slots=True)
class Situation:
    """Return what slots without work may wait for."""

    may_start: bool = False
    """There are rollouts that no generator has begun."""
    samples_ready: bool = False
    """There is something to train on."""
    held: bool = False
    """A policy has the trainer wait."""


def situation_of(accounting: StepAccounting, fleet: RunRoles) -> Situation:
    """The situation at this moment."""
    return Situation(
        accounting.to_start(fleet.generators.num_waiting) > 0,
        accounting.samples_ready(pending(fleet)) > 0,
        fleet.trainer.is_held,
    )


def pending(fleet: RunRoles) -> SamplesInFlight:
    """Samples that the trainer has been given and has not done yet."""
    return SamplesInFlight(fleet.trainer.pending_samples, fleet.trainer.pending_tokens)
