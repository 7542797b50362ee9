"""Membership of the fleet, and the decisions about it. One authority makes them, from one clock, and everybody gets the
whole decision: no rank reads a list, a flag or a clock of its own to choose a branch."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ductile.core.instances.health import HealthRules, MemberStatus, ServerHealth
from ductile.core.instances.instances import InstanceId, named


@dataclass(frozen=True, slots=True)
class TopologyMember:
    """A server as a topology names it. What changes without a change of membership is not compared."""

    instance: InstanceId
    address: str
    incarnation: str
    status: MemberStatus = field(compare=False)
    version: int | None = field(compare=False)

    @staticmethod
    def of(server: ServerHealth) -> "TopologyMember":
        return TopologyMember(server.instance, server.address, server.incarnation, server.status, server.version)


@dataclass(frozen=True, slots=True, eq=False)
class FleetTopology:
    """Servers that serve, at a membership epoch. The order of the members says nothing, and is not compared."""

    epoch: int
    members: tuple[TopologyMember, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FleetTopology) and (self.epoch, {*self.members}) == (other.epoch, {*other.members})

    def __hash__(self) -> int:
        return hash((self.epoch, frozenset(self.members)))


Action = Literal["keep", "rebuild", "wait", "fail"]


@dataclass(frozen=True, slots=True)
class TopologyDecision:
    """Decision on what everybody does before the next update; one object, made once.

    keep: the group is as it was. rebuild: it is made anew, of these members. wait: too few serve, and there is still
    time for others to come. fail: there is none left, and the run ends."""

    action: Action
    topology: FleetTopology
    """Servers that serve."""
    receivers: tuple[TopologyMember, ...]
    """Servers that get the next version: those that serve, and those that it may bring back."""
    reason: str = ""

    def receivers_without(self, version: int) -> tuple[InstanceId, ...]:
        """Return the receivers that do not have the version, in their order."""
        return tuple(each.instance for each in self.receivers if each.version != version)


@dataclass(frozen=True, slots=True)
class Blame:
    """Blame for probes without an answer."""

    verdict: Literal["none", "servers", "self"]
    instances: tuple[InstanceId, ...] = ()
    """Servers that have failed often enough."""
    reason: str = ""


def blame(servers: Iterable[ServerHealth], rules: HealthRules) -> Blame:
    """Return who is to blame for silence. A server is, when it has failed `failure_threshold` probes in a row while
    something was heard of another one (`ServerHealth.failures_alone`); when there are several and nothing is heard of
    any, our own network is (quorum), and nobody is taken out. What failed before the network was back is held against
    nobody. A closed port is no silence, and is not judged here."""
    living = [server for server in servers if server.is_living]
    over = [server for server in living if server.probe_failures >= rules.failure_threshold]
    if not over:
        return Blame("none")
    guilty = [server for server in over if len(living) == 1 or server.failures_alone >= rules.failure_threshold]
    if guilty:
        ids = tuple(server.instance for server in guilty)
        return Blame("servers", ids, f"{named(ids)} did not answer {rules.failure_threshold} probes in a row")
    if len(over) < len(living):  # those that answer have just begun to: the others' next probes tell
        return Blame("none")
    why = f"none of {len(living)} servers answers: the fault is on our side of the network, and none is taken out"
    return Blame("self", tuple(server.instance for server in over), why)


def wedged_receivers(servers: Iterable[ServerHealth], rules: HealthRules) -> Mapping[InstanceId, str]:
    """Return the receivers that take no bucket while another one of the same update does, with a sentence each. When
    none does, the sender is slow, and nobody is to blame. Only what a server has said itself counts against it, and not
    how long ago it was asked."""
    receiving = [server for server in servers if server.is_living and server.offered is not None and server.bucket[0]]
    idle_s = {server.instance: server.heard_at - server.bucket_at for server in receiving}
    return {
        server.instance: f"it answers probes, and took no bucket for {idle_s[server.instance]:.0f} s while others did"
        for server in receiving
        if idle_s[server.instance] >= rules.bucket_timeout_s
        and any(other.bucket[0] == server.bucket[0] and other.bucket[1] > server.bucket[1] for other in receiving)
    }


@dataclass(frozen=True, slots=True)
class Joins:
    """Servers that may get weights now, and how long the others wait."""

    now: tuple[InstanceId, ...]
    wait_s: float | None
    """Seconds until the next ones may; None when none waits."""


def joins_due(waiting: Mapping[InstanceId, float], now: float, cooldown_s: float, num_serving: int) -> Joins:
    """Return which of the servers that wait to join may do so, all at once. The one that has waited longest is there
    for `cooldown_s` at most: those that come later wait shorter, so one that comes and goes keeps nobody out. With no
    server that serves there is nothing to spare, and nobody waits.

    waiting: when each came. cooldown_s: 0 lets each join at once.
    """
    if not waiting:
        return Joins((), None)
    left_s = min(waiting.values()) + cooldown_s - now
    if left_s <= 0 or num_serving == 0:
        return Joins(tuple(sorted(waiting)), None)
    return Joins((), left_s)


def require_members(wanted: Collection[str], members: Iterable[TopologyMember]) -> tuple[TopologyMember, ...]:
    """Return the members at these addresses. Raises ValueError, which names those that are not among them."""
    at = {member.address: member for member in members}
    if foreign := sorted({*wanted} - at.keys()):
        raise ValueError(
            f"{', '.join(foreign)} {'is' if len(foreign) == 1 else 'are'} not in the group, which has "
            f"{', '.join(sorted(at)) or 'no member'}"
        )
    return tuple(at[address] for address in dict.fromkeys(wanted))
