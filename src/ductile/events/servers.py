"""Events of a run's servers: they come, fail, and go; versions of the weights go to them."""

import msgspec

from ductile.core.instances.carrier_choice import CarrierChoice
from ductile.core.instances.update_outcomes import InstanceOutcome
from ductile.observe import RunEvent


class ServerJoined(RunEvent, tag="server_joined", frozen=True):
    """A server generates for the run: it has the live version, which has been verified."""

    server: str
    """Its id in the fleet."""
    url: str
    version: int
    seconds: float
    """Seconds from when it was found until it could generate."""


class ServerChanged(RunEvent, tag="server_changed", frozen=True):
    """A server's state is another one, and it is still in the fleet: it is doubted, is ready again, has weights that
    are not trusted, or finishes what it has."""

    server: str
    before: str
    after: str
    """States of `ductile.core.instances.health`."""


class ServerLeft(RunEvent, tag="server_left", frozen=True):
    """A server is out of the fleet, and what it had goes to others."""

    server: str
    is_lost: bool
    """It was taken out because it failed, and nobody asked for that."""


class ServerNoted(RunEvent, tag="server_noted", frozen=True):
    """Something about servers or their registry that a person may want to know: one that cannot join, or be asked."""


class WeightUpdateEnded(RunEvent, tag="weights_updated", frozen=True):
    """A version has gone to the servers, with one outcome for each of them."""

    version: int
    outcomes: tuple[InstanceOutcome, ...]
    attempts: int
    seconds: float
    pause_s: float
    """Longest time for which a server answered nobody, while it changed over."""
    num_bytes: int
    """Bytes that the senders have sent, in all attempts."""
    digest: str
    num_bytes_unchanged: int = 0
    """Bytes that did not have to be sent, as all servers had them from the version before."""
    carriers: dict[str, CarrierChoice] = msgspec.field(default_factory=dict[str, CarrierChoice])
    """The way that the bytes took to each server, and why."""
