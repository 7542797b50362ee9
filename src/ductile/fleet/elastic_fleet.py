"""The servers of a run as one object: found, watched, given weights, taken out. It has the names of AReaL's engine.

    discovery (where to look) → monitor (who answers) → judge (who is what) → joining (who comes and goes)
                                     requests, updates ↗                                ↘ pool

It is the one authority over its servers: whoever updates weights or routes requests asks it for a decision, and nobody
else looks at clocks, lists or flags. It moves no bytes: that is for its `ServerPool`.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.listeners import Listeners
from ductile.config.schema.fleet import FileRegistry, FleetConfig, HttpRegistry
from ductile.config.server_address import is_root, root_of, with_scheme
from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import HealthRules, ServerHealth
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyDecision, TopologyMember, require_members
from ductile.core.instances.update_outcomes import lacking
from ductile.error_text import error_text
from ductile.fleet.registry.authority import Authority, first_epoch
from ductile.fleet.registry.discovery import Discovery
from ductile.fleet.registry.registries import Registry, RegistryDown, StaticServers
from ductile.fleet.servers.joining import Joining
from ductile.fleet.servers.judge import Judge
from ductile.fleet.servers.monitor import HttpProbe, Monitor, Probe, ProbeOutcome
from ductile.fleet.servers.requirements import Requirements
from ductile.fleet.servers.server_pool import ServerPool
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.fleet.servers.shortage import Shortage, WaitNotes
from ductile.roles import Failure, Interrupted, Late, Refused

POLL_S = 5.0
"""Longest time between two looks at the registry."""
SEND_AGAIN_S = 1.0
"""Pause before a version that too few servers have taken is sent to the same ones again."""

FleetChange = Callable[[ServerHealth | None, ServerHealth, int], None]
"""Called with a server before (None: it was none) and after a change of its state, and the epoch."""


class ElasticFleet:
    """`async with ElasticFleet(config, pool, addresses) as fleet:`. Made in the event loop in which it works; what
    does not wait may be called from any thread."""

    def __init__(
        self,
        config: FleetConfig,
        pool: ServerPool,
        addresses: Iterable[str] = (),
        registry: Registry | None = None,
        authority: Authority | None = None,
        probe: Probe | None = None,
        patience_s: float = 600.0,
        tell: Callable[[str], None] = lambda sentence: None,
        state: SharedFleetState | None = None,
    ) -> None:
        """addresses: servers to begin with. registry: where others are found. authority: rule over the registry's
        fleet; None where nobody else can want it. patience_s: longest wait for `min_healthy_servers`. tell: hears
        sentences for people. state: an empty one, where others have it as well; its clock is the fleet's."""
        self.on_change = Listeners[[ServerHealth | None, ServerHealth, int]]()
        """Hears every change of a server's state (`FleetChange`), in order."""
        self._config, self._pool, self._authority = config, pool, authority
        self._patience_s, self._tell = patience_s, tell
        self._shared = state = state or SharedFleetState()
        self._clock = state.clock
        rules = HealthRules(
            failure_threshold=config.health_check_failure_threshold,
            progress_timeout_s=config.progress_timeout_seconds,
            bucket_timeout_s=config.update_bucket_timeout_seconds,
        )
        self._changed = ChangeSignal()
        """Told in the event loop, after each change of the state."""
        roots = [root_of(each) for each in addresses]
        self._discovery = Discovery(config, registry or StaticServers(()), roots, tell, state.clock)
        self._judge = Judge(state, rules, self._discovery, pool, authority is not None, tell)
        self._shortage = Shortage(config, state, self._discovery, self._judge, pool, patience_s, tell)
        self._joining = Joining(config, state, self._discovery, pool, self._changed, tell)
        self._own_probe = HttpProbe(config.detection_bound_s) if probe is None else None
        self._monitor = Monitor(
            probe or self._own_probe or _no_probe, self._watched, self._found, config, tell, state.clock
        )
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.Task[None] | None = None
        self._built_epoch = -1
        self.is_waiting = False
        """True while an update waits for servers."""
        self._sent: tuple[InstanceId, ...] = ()
        """Servers that the last version was sent to."""
        self._lacks_version: tuple[int, float] | None = None
        """Version that too few servers have taken, and since when."""
        state.on_change.add(lambda before, after: self._soon(self._follow, before, after))
        state.on_fenced.add(lambda why: self._soon(self._fenced, why))
        pool.on_ended.add(self._judge_request)

    async def __aenter__(self) -> "ElasticFleet":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Rule the fleet, and look at its servers once. Raises Late when another run rules it for `patience_s`,
        RegistryDown when nobody can say who does. Nothing happens when it has started."""
        if self._looking is None:
            await self._begin_rule()
            await self.look()
            self._looking = asyncio.create_task(self._keep_looking())
        if self._config.enable_health_monitor:
            self._monitor.start()

    async def stop(self) -> None:
        """Look at no server any more; `start` goes on. Returns when nothing of the fleet runs."""
        await self._monitor.stop()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
            self._looking = None
        await self._joining.stop()

    async def close(self) -> None:
        """Stop, and give the rule back."""
        await self.stop()
        await self._discovery.close()
        if self._own_probe is not None:
            await self._own_probe.close()
        if self._authority is not None:
            await self._authority.close()

    # -- AReaL's names ----------------------------------------------------------------------------------------------

    def register_server(self, address: str, at_once: bool = False) -> int:
        """Look for a server at the address from now on, also one that was taken out before. Returns the epoch. at_once:
        it joins without `topology_change_cooldown_seconds`. Raises ValueError for what is no address."""
        address = root_of(address)
        if not is_root(address):
            raise ValueError(f'{address!r} is no address of a server; write one such as "http://10.0.0.7:8000"')
        self._discovery.name(address, at_once)
        self._soon(self._monitor.look)
        if not self._config.enable_health_monitor:
            self._soon(self._monitor.hurry, address)
        return self.state.epoch

    def deregister_server(self, server: str, mode: Literal["drain", "now"] = "drain", force: bool = False) -> int:
        """Take a server out, by its address or its id. Returns the epoch; the same again changes nothing.

        drain: it finishes what it has, `drain_timeout_seconds` at most. now: what it has goes to others.
        Raises ValueError when fewer than `min_healthy_servers` would be left; force: not even then.
        """
        cause, why = ("drain", "it has been told to leave") if mode == "drain" else ("remove", "it has been taken out")

        def leave(state: FleetState) -> FleetState:
            found = self.find(server, state)
            if found is None or (mode == "drain" and found.status == "draining"):
                return state
            left = len(state.serving) - found.is_serving + self._pool.num_others
            if found.is_serving and left < self._config.min_healthy_servers and not force:
                least = f"{self._config.min_healthy_servers} are needed (inference.min_healthy_servers)"
                raise ValueError(f"{found.instance} cannot be taken out: {left} would be left, and {least}")
            return state.changed(found.moved(cause, why, self._clock()))

        found = self.find(server)
        after = self._shared.change(leave)
        self._discovery.strike(found.address if found else with_scheme(server))
        return after.epoch

    def get_active_server_addresses(self) -> tuple[str, ...]:
        """Return the addresses of the servers that take requests; suspects come last."""
        return tuple(server.address for server in self.state.serving)

    def consume_group_rebuild_request(self) -> bool:
        """Return whether those that serve are others than the last group was built of (`mark_group_built`). Asking
        changes nothing, so no request is lost."""
        return self.state.membership != self._built_epoch

    def get_last_topology_change_time(self) -> float:
        """Return when those that serve last changed, by this fleet's clock."""
        return self.state.membership_since

    @property
    def group_version(self) -> int:
        """Epoch of the topology that the last group was built of; -1 before the first."""
        return self._built_epoch

    def maybe_rebuild_weight_update_group(self) -> TopologyDecision:
        """Return what is to be done before the next update, for everybody who takes part in it."""
        verdict, reason = self._shortage.decide()
        go_on = "rebuild" if self.consume_group_rebuild_request() else "keep"
        receivers = tuple(map(TopologyMember.of, self._shortage.receivers))
        return TopologyDecision(go_on if verdict == "go_on" else verdict, self.state.topology, receivers, reason)

    def mark_group_built(self, decision: TopologyDecision) -> None:
        """Note that the group of the decision is there. Until then the decision is made again, so one that was lost is
        not."""
        self._built_epoch = max(self._built_epoch, decision.topology.epoch)

    async def _monitor_servers_once(self) -> None:
        """`look`, by AReaL's name."""
        await self.look()

    def _get_target_addresses(self, target_server_addresses: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the addresses of an update's receivers: all that serve for None, nobody for []. Raises ValueError for
        one that does not serve."""
        members = self.state.topology.members
        if target_server_addresses is None:
            return tuple(member.address for member in members)
        return tuple(member.address for member in require_members(target_server_addresses, members))

    # -- For those who update weights, and route requests -----------------------------------------------------------

    @property
    def state(self) -> FleetState:
        """All servers, now. A value: it does not change any more."""
        return self._shared.now

    def find(self, server: str, state: FleetState | None = None) -> ServerHealth | None:
        """Return the living server of this id, or at this address, which may lack its scheme. state: default, now's."""
        state = state or self.state
        found = state.servers.get(InstanceId(server))
        return found if found is not None and found.is_living else state.at(with_scheme(server))

    @property
    def kept_out(self) -> dict[str, str]:
        """Addresses that are known and may not join now, each with a sentence."""
        return self._discovery.kept_out

    @property
    def absent(self) -> dict[str, str]:
        """Addresses that are looked at and have no living server, each with a sentence."""
        return self._shortage.absent

    @property
    def missing(self) -> str:
        """Why servers are not there, address by address; "" where none is known to be missing."""
        return self._shortage.missing

    def require(self, requirements: Requirements, own_digests: frozenset[str] = frozenset()) -> None:
        """Let only servers join, from now on, that meet these. own_digests: of versions that this run has given to
        servers before: those that have one are no other run's."""
        self._judge.require(requirements, own_digests)

    async def update(self, version: int) -> None:
        """Bring the trainer's weights, which are this version, to all servers that are there or come back by it. Those
        that do not take it are left behind when it goes live. Waits until `min_healthy_servers` are there, and again
        until as many have taken it; raises Late when that is not so in time, and what the trainer raises."""
        await self._update(version)
        while not await self.enough_have(version):
            await self._update(version)

    async def _update(self, version: int) -> None:
        """Bring the version to all that do not have it."""
        decision = await self.enough_servers()
        self._sent = decision.receivers_without(version)
        present = self._judge.update_began(version, self._sent)
        try:
            result = await self._pool.update(version, present)
        except BaseException as error:
            self._judge.update_aborted([each.instance for each in present], error_text(error))
            raise
        self._judge.update_ended(version, result.digest, result.outcomes)
        self.mark_group_built(decision)

    async def enough_servers(self) -> TopologyDecision:
        """Return the decision before an update, once there are `min_healthy_servers`. Raises Late when there are not
        within `patience_s`, or when another run rules."""
        while (decision := self.maybe_rebuild_weight_update_group()).action == "wait":
            self.is_waiting = True
            await self._wait_for_change(1.0)
        self.is_waiting = False
        if decision.action == "fail":
            self._shortage.wait_anew()  # for a later update
            raise Late(decision.reason)
        return decision

    async def enough_have(self, version: int) -> bool:
        """Return whether `min_healthy_servers` have the version by now, slots that get it included. When they have not,
        waits until it is worth sending again. Raises Late when that has gone on for `patience_s`."""
        num = sum(each.version == version for each in self.state.serving) + self._pool.num_others
        if self._lacks_version is None or self._lacks_version[0] != version:
            self._lacks_version = version, self._clock()
        waited_s, minimum = self._clock() - self._lacks_version[1], self._config.min_healthy_servers
        verdict = lacking(num, minimum, waited_s, self._patience_s)
        if verdict == "go_on":
            self._lacks_version = None
        elif verdict == "wait":
            self.is_waiting = True
            with suppress(TimeoutError):
                await self._changed.wait_for(lambda: self._shortage.has_receiver(version, self._sent), SEND_AGAIN_S)
        else:
            why = "; ".join(f"{each.instance} is {each.status}: {each.reason}" for each in self.state.living)
            raise Late(
                f"{num} of at least {minimum} servers have taken version {version} in {waited_s:.0f} s "
                f"(inference.min_healthy_servers): {why or self.missing or 'there is none'}"
            )
        return verdict == "go_on"

    async def _wait_for_change(self, most_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(most_s, self._patience_s)):
                await self._changed.wait()

    def request_failed(self, server: InstanceId, why: str, began_at: float = float("inf")) -> None:
        """Note that a request has failed there by the server's fault: its connection was lost, or it said HTTP 5xx. The
        server is probed at once: if nobody listens any more, it is taken out without waiting for more. began_at: when
        it got it."""
        self._judge_request(server, Interrupted(why), began_at)

    def _judge_request(self, server: InstanceId, failure: Failure | None, began_at: float) -> None:
        self._judge.request_ended(server, failure, began_at)
        if self._looking is None:
            return
        if isinstance(failure, Interrupted | Late) and (found := self.state.servers.get(server)) is not None:
            self._soon(self._monitor.hurry, found.address)

    async def look(self) -> None:
        """Look once at the registry and at every server. Returns when what follows has begun."""
        await self._poll()
        await self._monitor.sweep()
        await asyncio.sleep(0)
        self._joining.begin_due()

    async def join(self, address: str, timeout_s: float) -> ServerHealth:
        """Have the server at the address join at once; returns it when it generates. Raises Refused when none is there,
        or may join, and Late. It is looked for all the same."""
        self.register_server(address, at_once=True)
        await self.look()
        until = time.monotonic() + timeout_s
        while (found := self.find(address)) is None or not found.is_serving:
            if found is None:
                why = self.absent.get(address, "nobody answers there yet")
                raise Refused(f"{address} is not in the fleet: {why}; it is looked for until it is evicted")
            if time.monotonic() > until:
                raise Late(f"{found.instance} is still {found.status} after {timeout_s:.0f} s: {found.reason}")
            await self._wait_for_change(0.2)
        return found

    async def settled(self) -> None:
        """Wait for the joins and removals that are under way now."""
        await self._joining.settled()

    # -- What is seen, and what follows -----------------------------------------------------------------------------

    def _soon(self, work: Callable[..., object], *args: object) -> None:
        """Call `work` in the fleet's event loop, from any thread. Nothing happens when the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *args)

    def _watched(self) -> frozenset[str]:
        if self._shared.fenced:
            return frozenset()
        return self._discovery.wanted.union(server.address for server in self.state.living)

    def _found(self, address: str, outcome: ProbeOutcome) -> None:
        self._discovery.saw(address, outcome.reason)
        self._judge.probed(address, outcome)
        self._joining.begin_due()

    def _follow(self, before: FleetState, after: FleetState) -> None:
        for server in after.servers.values():
            was = before.servers.get(server.instance)
            if was is None or was.status != server.status:
                self._act(was, server, after.epoch)
            elif was.on_trial != server.on_trial:
                self._joining.tell_suspicion(server)
        for was in before.servers.values():  # another process has its address, and its place
            if was.is_living and was.instance not in after.servers:
                self._act(was, was.moved("die", "another process has its address", self._clock()), after.epoch)
        self._monitor.look()
        if self._looking is not None:
            self._shortage.look()
        self._changed.notify_all()

    def _act(self, was: ServerHealth | None, server: ServerHealth, epoch: int) -> None:
        self._joining.follow(was, server)
        self.on_change(was, server, epoch)

    def _fenced(self, why: str) -> None:
        self._tell(why)
        self._changed.notify_all()

    # -- Registry and rule ------------------------------------------------------------------------------------------

    async def _begin_rule(self) -> None:
        if self._authority is None:
            return
        until, notes = self._clock() + self._patience_s, WaitNotes(self._patience_s, self._clock, self._tell)
        while (token := await self._authority.claim()) is None:
            if self._clock() >= until:
                raise Late(f"another run has had the servers of this registry for {said(self._patience_s)}")
            notes.look("another run, which has the servers of this registry, to end (inference.registry)")
            await asyncio.sleep(min(1.0, self._patience_s))
        self._shared.change(lambda state: state.above(first_epoch(token) - 1))

    async def _renew_rule(self) -> None:
        if self._authority is not None:
            began_at = self._clock()
            if await self._authority.claim() is None:
                self._shared.fence("the servers of this registry (inference.registry)")
            else:
                self._judge.rule_renewed(began_at)

    async def _keep_looking(self) -> None:
        """Renew the rule and look at the registry, until another one rules."""
        match self._config.registry:
            case FileRegistry(ttl_seconds=ttl_s) | HttpRegistry(ttl_seconds=ttl_s):
                interval_s = min(ttl_s / 3, POLL_S)
            case _:
                interval_s = POLL_S
        while not self._shared.fenced:
            self._shortage.look()
            await asyncio.sleep(interval_s)
            try:
                await self._renew_rule()
                await self._poll()
                self._monitor.look()
                self._joining.begin_due()
                if not self._config.enable_health_monitor:  # those that are well are not probed then
                    well = {server.address for server in self.state.living if server.status == "ready"}
                    await self._monitor.sweep(without=well)
            except RegistryDown:
                pass  # nobody else can claim it, either
            except Exception as error:
                self._tell(f"the registry could not be read: {error_text(error)}")

    async def _poll(self) -> None:
        for address in await self._discovery.poll():
            server = self.state.at(address)
            if (
                server is not None
                and server.status != "draining"
                and self._discovery.why_not(address, server.incarnation)
            ):
                self._shared.apply(
                    server.instance, lambda each: each.moved("drain", "it says that it is leaving", self._clock())
                )


async def _no_probe(address: str) -> ProbeOutcome:
    return ProbeOutcome("unasked", f"nobody asks {address}")
