"""Shortage of servers: whether a run has as many as it needs, how long it waits for others, and what it says meanwhile:
at once, and again every `AGAIN_S`, which addresses it looks at, and why no server is there."""

from collections.abc import Callable, Collection, Iterable

from ductile.concurrency.deadline import said
from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.health import MemberStatus, ServerHealth
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import SupplyVerdict, lacking
from ductile.fleet.registry.discovery import Discovery
from ductile.fleet.servers.judge import Judge
from ductile.fleet.servers.server_pool import ServerPool
from ductile.fleet.servers.shared_state import SharedFleetState

AGAIN_S = 30.0
"""Seconds until the same is said again."""


class WaitNotes:
    """Says what a run waits for, in `tell`, as long as it does."""

    def __init__(self, patience_s: float, clock: Callable[[], float], tell: Callable[[str], None]) -> None:
        self._limit = f"at most {said(patience_s)}"
        self._clock, self._tell = clock, tell
        self._said_at: float | None = None

    def look(self, awaited: str) -> None:
        """Say what is awaited, where it is time for that. awaited: "" when nothing is."""
        now = self._clock()
        if not awaited:
            self._said_at = None
        elif self._said_at is None or now - self._said_at >= AGAIN_S:
            self._said_at = now
            self._tell(f"waiting for {awaited}; {self._limit}")


class Shortage:
    def __init__(
        self,
        config: FleetConfig,
        state: SharedFleetState,
        discovery: Discovery,
        judge: Judge,
        pool: ServerPool,
        patience_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._minimum, self._patience_s = config.min_healthy_servers, patience_s
        self._state, self._discovery, self._judge, self._pool = state, discovery, judge, pool
        self._notes = WaitNotes(patience_s, state.clock, tell)
        self._since: float | None = None

    @property
    def receivers(self) -> list[ServerHealth]:
        """Servers that get the next version: those that serve, and of those that answer the ones whose weights are not
        trusted, or are on their way. Those that wait for the cooldown get it where the run has no version yet, or too
        few servers without them."""
        lacks = self._pool.version is None or self._count(self._with(("stale", "warming"))) < self._minimum
        waiting = ("stale", "warming", "joining") if lacks else ("stale", "warming")
        return self._with(waiting)

    def has_receiver(self, version: int, sent: Collection[InstanceId]) -> bool:
        """Return whether the version has a receiver that lacks it, and is none of those that it was sent to."""
        return any(each.version != version and each.instance not in sent for each in self.receivers)

    @property
    def absent(self) -> dict[str, str]:
        """Addresses that are looked at and have no member, each with a sentence."""
        state = self._state.now
        lost = {each.address: each.reason for each in state.servers.values() if not each.is_living}
        absent = self._discovery.absent({each.address for each in state.living})
        unknown = {address: f"{address} is lost: {why}" for address, why in lost.items()}
        return {
            address: why or unknown.get(address, f"{address} has not joined yet") for address, why in absent.items()
        }

    @property
    def missing(self) -> str:
        """Why no server is there, address by address; "" where nothing is known to be missing."""
        return self._judge.own_fault or "; ".join(self.absent.values())

    def decide(self) -> tuple[SupplyVerdict, str]:
        """Return whether an update may begin, and where not, why."""
        now, num = self._state.clock(), self._num_healthy
        if num >= self._minimum:
            self._since = None
        elif self._since is None:
            self._since = now
        waited_s = 0.0 if self._since is None else now - self._since
        lack = f"{num} of at least {self._minimum} servers are healthy (inference.min_healthy_servers)"
        verdict = lacking(num, self._minimum, waited_s, self._patience_s)
        if self._state.fenced:
            return "fail", self._state.fenced
        if verdict == "wait":
            return verdict, f"{lack}; others may join for {self._patience_s - waited_s:.0f} s"
        if verdict == "fail":
            why = f": {self.missing}" if self.missing else ""
            return verdict, f"{lack}, and none joined in {waited_s:.0f} s{why}"
        return verdict, ""

    def wait_anew(self) -> None:
        """Begin the next wait with the next decision, whatever has been waited for before."""
        self._since = None

    def look(self) -> None:
        """Say what is waited for, where it is time for that."""
        lacks = self._num_healthy < self._minimum and not self._state.fenced
        known = "; ".join(self.absent.values()) or "none has been found"
        self._notes.look(f"servers: {known}" if lacks else "")

    @property
    def _num_healthy(self) -> int:
        return self._count(self.receivers)

    def _with(self, waiting: Collection[MemberStatus]) -> list[ServerHealth]:
        """Return those that serve, and those that wait in such a state and answer."""
        living = self._state.now.living
        return [each for each in living if each.is_serving or (each.status in waiting and not each.probe_failures)]

    def _count(self, servers: Iterable[ServerHealth]) -> int:
        threshold = self._judge.rules.failure_threshold
        return sum(each.probe_failures < threshold for each in servers) + self._pool.num_others
