"""The pool that a fleet's servers are members of, as the fleet needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember
from ductile.messages.updates import Digest


@dataclass(frozen=True, slots=True)
class Warmed:
    """A version that a server has committed as it joined, and that was verified."""

    version: int
    digest: Digest


class FleetMembers(Protocol):
    """The pool in which servers take requests, and the way in which one that joins gets weights."""

    @property
    def version(self) -> int | None:
        """Version that is live; None before the first, which all servers get that are there then."""
        ...

    @property
    def num_others(self) -> int:
        """Generators that are no servers: on slots of the run."""
        ...

    async def warm(self, server: TopologyMember, donors: Sequence[TopologyMember]) -> Warmed | None:
        """Bring the live version to the server, from a donor that has it, or from the trainer, or from disk. None: a
        newer one is on its way, and this is to be asked again. Raises a Failure."""
        ...

    async def add(self, server: TopologyMember) -> None:
        """The server takes requests from now on."""
        ...

    def put_aside(self, server: InstanceId, why: str) -> None:
        """The server takes no more requests, until `readmit`; those that it has go to others."""
        ...

    def readmit(self, server: InstanceId) -> None: ...

    def suspect(self, server: InstanceId, why: str) -> None:
        """The server gets only what no other one can take; with "" for a reason, what it can, again."""
        ...

    def heard_at(self, server: InstanceId) -> float:
        """Return when the server last sent a token, by `time.monotonic`; minus infinity where it never did."""
        ...

    async def drain(self, server: InstanceId) -> None:
        """The server takes no more requests. Returns when it has finished those that it has."""
        ...

    async def remove(self, server: InstanceId, why: str) -> None:
        """The server has left, or is lost, also one that was never added. Requests that it still has go to others, with
        the tokens that they have, and a version that is under way goes on without it."""
        ...
