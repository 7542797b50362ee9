"""Events of slots: their processes begin, are lost, and come back."""

from ductile.core.instances.instances import Instance
from ductile.core.instances.placement import Role
from ductile.observe import RunEvent


class SlotStarted(RunEvent, tag="slot_started", frozen=True):
    """A slot's process runs, on its device."""

    slot: int
    roles: tuple[Role, ...]
    """Roles that it is to have now; none of a slot that will join the trainer."""
    device: str
    pid: int
    node: int = 0
    """Number of the slot's node; 0 where there is one, and in runs of older versions."""


class SlotWasLost(RunEvent, tag="slot_lost", frozen=True):
    """A slot is lost that does not train; the run goes on."""

    slot: int
    roles: tuple[Role, ...] = ()
    """Roles that it had; empty also in runs of older versions, which did not write them."""


class SlotRestarting(RunEvent, tag="slot_restarting", frozen=True):
    """A lost slot is about to be started again: a generator, a scorer, or one that was between two roles."""

    slot: int


class SlotRestarted(RunEvent, tag="slot_restarted", frozen=True):
    """A lost generator or scorer is back."""

    slot: int
    roles: tuple[Role, ...]
    device: str
    pid: int
    seconds: float
    """Seconds from its loss until it worked again."""
    num_attempts: int
    """Starts in a row, the one that succeeded included: also those before it was lost again within a minute."""
    began: tuple[Instance, ...]
    """Instances that began on it."""
    node: int = 0


class SlotGivenBack(RunEvent, tag="slot_given_back", frozen=True):
    """A lost generator or scorer, or a slot between two roles, is not started again. The run goes on without it, or
    ends where it was the last of a role."""

    slot: int
    roles: tuple[Role, ...]


class SlotNoticed(RunEvent, tag="slot_noticed", frozen=True):
    """Slots will be gone by a deadline, and are emptied before it."""

    slots: tuple[int, ...]
    deadline_s: float
    """Seconds from the event to the deadline."""
    source: str
    """How the notice came."""


class SlotGone(RunEvent, tag="slot_gone", frozen=True):
    """A slot has left that was emptied before: nothing was lost with it, and it is not started again."""

    slot: int
    roles: tuple[Role, ...]
    """Roles that it had."""
    emptied_s: float
    """Seconds from the notice until it held nothing."""


class SlotNotEmptied(RunEvent, tag="slot_not_emptied", frozen=True):
    """Slots cannot be emptied, or were not in time: they work on, until they die."""

    slots: tuple[int, ...]


class SlotIsBack(RunEvent, tag="slot_back", frozen=True):
    """A slot that was gone runs again."""

    slot: int
    roles: tuple[Role, ...]
    device: str
    pid: int
    node: int = 0
