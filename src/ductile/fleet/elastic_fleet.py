"""The servers of a run as one object: found, watched, given weights, taken out. It has the names of AReaL's engine.

    discovery (where to look) → monitor (who answers) → state (who is what) → members (who gets requests)

It is the one authority over its servers: whoever updates weights or routes requests asks it for a decision, and nobody
else looks at clocks, lists or flags. It moves no bytes: a server that joins is given weights by `FleetMembers.warm`.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal

from ductile.config.schema.fleet import FleetConfig
from ductile.config.server_address import is_root, root_of
from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import ServerHealth
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import Action, TopologyDecision, TopologyMember, require_members
from ductile.core.instances.update_outcomes import InstanceOutcome, UpdateOutcome, lacking
from ductile.fleet.authority import Authority
from ductile.fleet.fleet_keeper import FleetKeeper
from ductile.fleet.fleet_members import FleetMembers
from ductile.fleet.monitor import Probe
from ductile.fleet.registry import Registry
from ductile.messages.updates import Digest
from ductile.roles import Late

SEND_AGAIN_S = 1.0
"""Longest time until a version that too few servers have taken is sent again."""

FleetChange = Callable[[ServerHealth | None, ServerHealth, int], None]
"""Called with a server before (None: it was none) and after a change of its state, and the epoch."""


class ElasticFleet:
    """`async with ElasticFleet(config, members, addresses) as fleet:`. Made in the event loop in which it works; what
    does not wait may be called from any thread."""

    def __init__(
        self,
        config: FleetConfig,
        members: FleetMembers,
        addresses: Iterable[str] = (),
        registry: Registry | None = None,
        authority: Authority | None = None,
        probe: Probe | None = None,
        patience_s: float = 600.0,
        tell: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """addresses: servers to begin with. registry: where others are found. authority: rule over the registry's
        fleet; None where nobody else can want it. patience_s: longest wait for `min_healthy_servers`. tell: hears
        sentences for people. clock: seconds that never go back."""
        roots = [root_of(each) for each in addresses]
        self._keeper = FleetKeeper(config, members, roots, registry, authority, probe, patience_s, tell, clock)
        self.on_change = self._keeper.on_change
        """Hears every change of a server's state (`FleetChange`), in order."""
        self._config, self._members, self._patience_s, self._clock = config, members, patience_s, clock
        self._state = self._keeper.state
        self._built_epoch = -1
        self._lacking_since: float | None = None
        self._lacks_version: tuple[int, float] | None = None
        """Version that too few servers have taken, and since when."""

    async def __aenter__(self) -> "ElasticFleet":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Rule the fleet, and look at its servers once. Raises Late when another controller rules it for `patience_s`,
        RegistryDown when nobody can say who does. Nothing happens when it has started."""
        await self._keeper.start()

    async def stop(self) -> None:
        """Look at no server any more; `start` goes on. Returns when nothing of the fleet runs."""
        await self._keeper.stop()

    async def close(self) -> None:
        """Stop, and give the rule back."""
        await self._keeper.close()

    # -- AReaL's names ----------------------------------------------------------------------------------------------

    def register_server(self, address: str) -> int:
        """Look for a server at the address from now on, also one that was taken out before. Returns the epoch. Raises
        ValueError for what is no address."""
        address = root_of(address)
        if not is_root(address):
            raise ValueError(f'{address!r} is no address of a server; write one such as "http://10.0.0.7:8000"')
        self._keeper.discovery.name(address)
        self._keeper.look()
        return self._state.now.epoch

    def deregister_server(self, server: str, mode: Literal["drain", "now"] = "drain", force: bool = False) -> int:
        """Take a server out, by its address or its id. Returns the epoch; the same again changes nothing.

        drain: it finishes what it has, `drain_timeout_seconds` at most. now: what it has goes to others.
        Raises ValueError when fewer than `min_healthy_servers` would be left; force: not even then.
        """
        cause, why = ("drain", "it has been told to leave") if mode == "drain" else ("remove", "it has been taken out")

        def leave(state: FleetState) -> FleetState:
            found = _found_by(state, server)
            if found is None or (mode == "drain" and found.status == "draining"):
                return state
            left = len(state.serving) - found.is_serving + self._members.num_others
            if found.is_serving and left < self._config.min_healthy_servers and not force:
                least = f"{self._config.min_healthy_servers} are needed (inference.min_healthy_servers)"
                raise ValueError(f"{found.instance} cannot be taken out: {left} would be left, and {least}")
            return state.changed(found.moved(cause, why, self._clock()))

        found = _found_by(self._state.now, server)
        after = self._state.change(leave)
        self._keeper.discovery.strike(found.address if found else root_of(server))
        return after.epoch

    def get_active_server_addresses(self) -> tuple[str, ...]:
        """Return the addresses of the servers that take requests; suspects come last."""
        return tuple(server.address for server in self._state.now.serving)

    def consume_group_rebuild_request(self) -> bool:
        """Return whether those that serve are others than the last group was built of (`mark_group_built`). Asking
        changes nothing, so no request is lost."""
        return self._state.now.membership != self._built_epoch

    def get_last_topology_change_time(self) -> float:
        """Return when those that serve last changed, by this fleet's clock."""
        return self._keeper.changed_at

    @property
    def group_version(self) -> int:
        """Epoch of the topology that the last group was built of; -1 before the first."""
        return self._built_epoch

    def maybe_rebuild_weight_update_group(self) -> TopologyDecision:
        """Return what is to be done before the next update, for everybody who takes part in it."""
        config, now = self._config, self._clock()
        receivers = self._receivers()
        num_healthy = sum(each.probe_failures < self._keeper.rules.failure_threshold for each in receivers)
        num_healthy += self._members.num_others
        if num_healthy >= config.min_healthy_servers:
            self._lacking_since = None
        elif self._lacking_since is None:
            self._lacking_since = now
        waited_s = 0.0 if self._lacking_since is None else now - self._lacking_since
        action, reason = self._action(num_healthy, waited_s)
        return TopologyDecision(
            action,
            self._state.now.topology,
            tuple(map(TopologyMember.of, receivers)),
            self._members.version,
            config.update_bucket_timeout_seconds,
            config.update_total_timeout_seconds,
            reason,
        )

    def mark_group_built(self, decision: TopologyDecision) -> None:
        """The group of the decision is there. Until then the decision is made again, so one that was lost is not."""
        self._built_epoch = max(self._built_epoch, decision.topology.epoch)

    async def _monitor_servers_once(self) -> None:
        """`look`, by AReaL's name."""
        await self.look()

    def _get_target_addresses(self, target_server_addresses: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the addresses of an update's receivers: all that serve for None, nobody for []. Raises ValueError for
        one that does not serve."""
        members = self._state.now.topology.members
        if target_server_addresses is None:
            return tuple(member.address for member in members)
        return tuple(member.address for member in require_members(target_server_addresses, members))

    # -- For those who update weights, and route requests -----------------------------------------------------------

    @property
    def state(self) -> FleetState:
        """All servers, now. A value: it does not change any more."""
        return self._state.now

    @property
    def kept_out(self) -> dict[str, str]:
        """Addresses that are known and may not join now, each with a sentence."""
        return self._keeper.discovery.kept_out

    def expect_model(self, *fingerprints: str) -> None:
        """Servers whose model (`messages.updates.ServerState.model`) is none of these cannot join from now on. None
        given: any may."""
        self._keeper.expect_model(fingerprints)

    def next_epoch(self, above: int = 0) -> int:
        """Return an epoch that is newer than any before, and than `above`: for one attempt at an update."""
        return self._state.change(lambda state: state.above(max(above, state.epoch))).epoch

    async def enough_servers(self) -> TopologyDecision:
        """Return the decision before an update, once there are `min_healthy_servers`. Raises Late when there are not
        within `patience_s`, or when another controller rules."""
        while (decision := self.maybe_rebuild_weight_update_group()).action == "wait":
            with suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, self._patience_s)):
                    await self._keeper.changed.wait()
        if decision.action == "fail":
            raise Late(decision.reason)
        return decision

    async def enough_have(self, version: int) -> bool:
        """Return whether `min_healthy_servers` have the version by now, slots that get it included. When they have not,
        waits a moment for a change first: it may be sent again. Raises Late when that has gone on for `patience_s`."""
        num = sum(each.version == version for each in self._state.now.serving) + self._members.num_others
        if self._lacks_version is None or self._lacks_version[0] != version:
            self._lacks_version = version, self._clock()
        waited_s, minimum = self._clock() - self._lacks_version[1], self._config.min_healthy_servers
        verdict = lacking(num, minimum, waited_s, self._patience_s)
        if verdict == "go_on":
            self._lacks_version = None
        elif verdict == "wait":
            with suppress(TimeoutError):
                async with asyncio.timeout(min(SEND_AGAIN_S, self._patience_s)):
                    await self._keeper.changed.wait()
        else:
            why = "; ".join(f"{each.instance} is {each.status}: {each.reason}" for each in self._state.now.living)
            raise Late(
                f"{num} of at least {minimum} servers have taken version {version} in {waited_s:.0f} s "
                f"(inference.min_healthy_servers): {why or 'there is none'}"
            )
        return verdict == "go_on"

    def update_began(self, version: int, receivers: Iterable[InstanceId]) -> tuple[TopologyMember, ...]:
        """The receivers are sent a version. Returns those that are still there. Raises TransitionRefused for a version
        that is older than what one of them has."""
        wanted, now = [*receivers], self._clock()

        def send(state: FleetState) -> FleetState:
            for server in [state.of(each) for each in wanted if each in state.servers]:
                if server.is_living:
                    state = state.changed(server.sent(version, now))
            return state

        servers = self._state.change(send).servers
        return tuple(TopologyMember.of(servers[each]) for each in wanted if each in servers and servers[each].is_living)

    def update_ended(self, version: int, digest: Digest, outcomes: Iterable[InstanceOutcome]) -> None:
        """Note what has become of a version at each receiver. Only those that were sent it can have committed it."""
        now = self._clock()
        for each in outcomes:
            outcome, why, id = each.outcome, each.reason, InstanceId(each.instance)

            def judged(server: ServerHealth, outcome: UpdateOutcome = outcome, why: str = why) -> ServerHealth:
                if outcome == "committed":
                    return server.committed(version, digest, now)
                return server.moved("die", why, now) if outcome == "dead" else server.update_failed(why, now, False)

            self._keeper.judge(id, judged)

    def update_aborted(self, receivers: Iterable[InstanceId]) -> None:
        """An update has ended before any of the receivers changed over: they serve what they had."""
        for each in receivers:
            self._keeper.judge(each, lambda server: server.update_failed("", self._clock(), keeps_old=True))

    def generated(self, server: InstanceId) -> None:
        """A request of ours has come to its end there."""
        self._keeper.judge(server, lambda each: each.generated(self._clock(), self._keeper.rules))

    def request_failed(self, server: InstanceId, why: str) -> None:
        """A request has failed there by the server's fault: its connection was lost, or it said HTTP 5xx. It is probed
        at once: if nobody listens any more, it is taken out without waiting for more."""
        self._keeper.judge(server, lambda each: each.request_failed(why, self._clock(), self._keeper.rules))
        self._keeper.hurry(server)

    async def look(self) -> None:
        """Look once at the registry and at every server. Returns when what follows has begun."""
        await self._keeper.look_once()

    async def settled(self) -> None:
        """Wait for the joins and removals that are under way now."""
        await self._keeper.settled()

    def _receivers(self) -> list[ServerHealth]:
        """Return the servers that get the next version: those that serve, those whose weights are not trusted and who
        answer, and before the first version those that wait for it."""
        waiting = ("stale", "joining") if self._members.version is None else ("stale",)
        living = self._state.now.living
        return [each for each in living if each.is_serving or (each.status in waiting and not each.probe_failures)]

    def _action(self, num_healthy: int, waited_s: float) -> tuple[Action, str]:
        minimum = self._config.min_healthy_servers
        lack = f"{num_healthy} of at least {minimum} servers are healthy (inference.min_healthy_servers)"
        verdict = lacking(num_healthy, minimum, waited_s, self._patience_s)
        if self._keeper.fenced:
            return "fail", self._keeper.fenced
        if verdict == "wait":
            return "wait", f"{lack}; others may join for {self._patience_s - waited_s:.0f} s"
        if verdict == "fail":
            why = f": {self._keeper.own_fault}" if self._keeper.own_fault else ""
            return "fail", f"{lack}, and none joined in {waited_s:.0f} s{why}"
        return ("rebuild" if self.consume_group_rebuild_request() else "keep"), ""


def _found_by(state: FleetState, server: str) -> ServerHealth | None:
    """Return the living server of this id, or at this address."""
    found = state.servers.get(InstanceId(server))
    return found if found is not None and found.is_living else state.at(root_of(server))
