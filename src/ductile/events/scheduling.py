"""Events of the policy that moves slots between roles. Times are seconds since the run's slots had their roles."""

from msgspec import field

from ductile.core.instances.instances import Instance, InstanceId
from ductile.observe import RunEvent


class OrdersGiven(RunEvent, tag="decided", frozen=True):
    """The policy gives orders; the sentence is its reason."""

    at_s: float
    cost_s: float | None = None
    """Seconds that the policy expects the change to cost; None when it expects nothing in numbers."""
    gain_s: float | None = None
    """Seconds that the policy expects the change to save; None when it expects nothing in numbers."""


class TrainingHeld(RunEvent, tag="held", frozen=True):
    """The policy has training wait, lets it go on, or waits for something else; it gives no orders."""

    at_s: float
    waits: bool = field(default=False, name="holds")
    """Whether training waits from now on."""


class OrdersDone(RunEvent, tag="switched", frozen=True):
    """A decision is carried out."""

    at_s: float
    """Moment of the decision."""
    seconds: float
    """Seconds from the decision to its end."""
    slots: tuple[int, ...]
    """Slots that were to change roles."""
    num_migrations: int = 0
    """Requests that were to go to another generator."""
    failures: tuple[str, ...] = ()
    """What of the decision is not done, in sentences."""
    began: tuple[Instance, ...] | None = None
    """Instances that began; None in runs of format 1, which had none."""
    ended: tuple[InstanceId, ...] = ()
    """Instances that ended."""


class StateParked(RunEvent, tag="parked", frozen=True):
    """The trainer's state has left the devices of its slots, which are lent to generators, or is back on them."""

    slots: tuple[int, ...]
    back: bool
    """It is back."""
    num_bytes: int
    """Bytes that were moved, all slots together."""
    device_bytes: int
    """Bytes of the trainer on the devices while it was parked: right after it had left, or right before it came back.
    More than 0 is a mistake in ductile."""
    seconds: float
    """Seconds that it took the slowest slot."""


class PolicyFailed(RunEvent, tag="policy_failed", frozen=True):
    """The policy fails, or orders what cannot be carried out: it is asked no more, and slots return to their
    placement."""

    traceback: str
