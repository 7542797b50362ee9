"""The pool that a fleet's servers are in, as the fleet needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember
from ductile.fleet.updates.update_parties import UpdateResult
from ductile.messages.updates import Digest
from ductile.roles import Failure


@dataclass(frozen=True, slots=True)
class Warmed:
    """A version that a server has committed as it joined, and that was verified."""

    version: int
    digest: Digest


class ServerPool(Protocol):
    """The pool in which servers take requests, and the way in which they get weights. It takes nobody out by itself."""

    on_ended: Listeners[[InstanceId, Failure | None, float]]
    """Told of each request that has ended at a server: what it failed with there, None where it has not; and when the
    server got it, by `time.monotonic`. SlotLost is hard evidence that the server is gone, and told also
    where it had no request."""

    @property
    def version(self) -> int | None:
        """Version that is live; None before the first, which all servers get that are there then."""
        ...

    @property
    def num_others(self) -> int:
        """Generators that are no servers: on slots of the run."""
        ...

    async def warm(self, server: TopologyMember, donors: Sequence[TopologyMember]) -> Warmed | None:
        """Bring the live version to the server, from a donor that has it, or from the trainer. None: a newer one is on
        its way, and this is to be asked again. Raises a Failure."""
        ...

    async def update(self, version: int, servers: Sequence[TopologyMember]) -> UpdateResult:
        """Bring the trainer's weights, which are this version, to the servers; one outcome for each. Raises what the
        trainer raises: then they have what they had."""
        ...

    async def add(self, server: TopologyMember) -> None:
        """Let the server take requests from now on."""
        ...

    def put_aside(self, server: InstanceId, why: str) -> None:
        """Give the server no more requests, until `readmit`; those that it has go to others."""
        ...

    def readmit(self, server: InstanceId) -> None: ...

    def suspect(self, server: InstanceId, why: str, on_trial: bool) -> None:
        """Give the server only what no other one can take; on trial one request at a time; with "" for a reason, what
        it can, again."""
        ...

    def heard_at(self, server: InstanceId) -> float:
        """Return when the server last sent a token, by `time.monotonic`; minus infinity where it never did."""
        ...

    async def drain(self, server: InstanceId, timeout_s: float) -> None:
        """Give the server no more requests. Returns when it has finished those that it has. Raises Late."""
        ...

    async def remove(self, server: InstanceId, why: str) -> None:
        """Take out a server that has left, or is lost, also one that was never added. Requests that it still has go to
        others, with the tokens that they have, and a version that is under way goes on without it."""
        ...
