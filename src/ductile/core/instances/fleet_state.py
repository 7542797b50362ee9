"""All servers of a fleet at one moment, as a value: what a change makes of it is another state. The epoch goes up with
every change of those that serve, and never down; nor does the version."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from ductile.core.instances.health import ProbeReply, ServerHealth, TransitionRefused
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import FleetTopology, TopologyMember


@dataclass(frozen=True, slots=True)
class FleetState:
    epoch: int = 0
    """Goes up with every change of those that serve, and with every attempt at an update."""
    membership: int = 0
    """Epoch of the last change of those that serve."""
    membership_since: float = field(default=0.0, compare=False)
    """Time of that change, by the clock of the servers' changes."""
    version: int | None = None
    """Newest version that a server has committed; None before the first."""
    servers: Mapping[InstanceId, ServerHealth] = field(default_factory=dict[InstanceId, ServerHealth])
    """The living, and of those that are lost the last one at each address."""
    births: Mapping[str, int] = field(default_factory=dict[str, int])
    """Members that there have been at each address."""

    @property
    def living(self) -> tuple[ServerHealth, ...]:
        return tuple(server for server in self.servers.values() if server.is_living)

    @property
    def serving(self) -> tuple[ServerHealth, ...]:
        """Servers that take requests; suspects come last."""
        serving = [server for server in self.servers.values() if server.is_serving]
        return tuple(sorted(serving, key=lambda server: server.status == "suspect"))

    @property
    def topology(self) -> FleetTopology:
        return FleetTopology(self.membership, tuple(map(TopologyMember.of, self.serving)))

    def at(self, address: str) -> ServerHealth | None:
        """Return the living server at the address."""
        return next((server for server in self.living if server.address == address), None)

    def of(self, instance: InstanceId) -> ServerHealth:
        """Raises TransitionRefused when there is none of this id."""
        if instance not in self.servers:
            raise TransitionRefused(f"{instance} is not in the fleet")
        return self.servers[instance]

    def holders(self, version: int) -> tuple[ServerHealth, ...]:
        """Return the ready servers that have the version, and can give it to one that joins."""
        return tuple(server for server in self.serving if server.version == version and server.status == "ready")

    def joined(self, address: str, reply: ProbeReply, now: float) -> "FleetState":
        """A process at the address is a member from now on, without a history. The same process again changes
        nothing, and another one makes the one before it dead."""
        before = self.at(address)
        if before is not None and before.incarnation == reply.incarnation:
            return self
        state = self if before is None else self.changed(before.moved("die", "another process has its address", now))
        birth = self.births.get(address, 0)
        server = ServerHealth(
            instance=_name(address, birth),
            address=address,
            incarnation=reply.incarnation,
            since=now,
            reason="it has been found",
            asked_at=min(reply.asked_at, now),
            told_at=now,
            heard_at=now,
            num_sampled=reply.num_sampled,
            progressed_at=now,
            bucket_at=now,
        )
        others = {id: each for id, each in state.servers.items() if each.address != address}
        return replace(
            state,
            servers={**others, server.instance: server},
            births={**self.births, address: birth + 1},
        )

    def changed(self, server: ServerHealth) -> "FleetState":
        """The state with the server as it is now."""
        before = self.of(server.instance)
        if before == server:
            return self
        versions = [each for each in (self.version, server.version) if each is not None]
        epoch = self.epoch + (before.is_serving != server.is_serving)
        return replace(
            self,
            epoch=epoch,
            membership=self.membership if epoch == self.epoch else epoch,
            # Some changes of one moment are told the time that it began, others the time that they were made.
            membership_since=max(self.membership_since, server.since if epoch > self.epoch else 0.0),
            version=max(versions, default=None),
            servers={**self.servers, server.instance: server},
        )

    def above(self, epoch: int) -> "FleetState":
        """The state with an epoch that is newer than `epoch`: one of another authority, which a server has seen."""
        return replace(self, epoch=max(self.epoch, epoch + 1))


def _name(address: str, birth: int) -> InstanceId:
    host = urlsplit(address).netloc or address
    return InstanceId(f"{host}+{birth}" if birth else host)
