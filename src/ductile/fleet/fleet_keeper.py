"""The keeper of a fleet: what probes, registry and requests say becomes the state, and what follows from a
change of the state is done.

    outcome → state → joins (batched, after the cooldown), removals (at once), drains

Everything that follows happens in the event loop in which the keeper was made, in the order of the changes; the state
may be read and changed by any thread.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.listeners import Listeners
from ductile.config.schema.fleet import FileRegistry, FleetConfig, HttpRegistry
from ductile.core.instances.fleet_state import FleetState
from ductile.core.instances.health import LIVING, HealthRules, ProbeReply, ServerHealth, TransitionRefused
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember, blame, joins_due, wedged_receivers
from ductile.error_text import error_text
from ductile.fleet.authority import Authority, first_epoch
from ductile.fleet.discovery import Discovery
from ductile.fleet.fleet_members import FleetMembers, Warmed
from ductile.fleet.monitor import HttpProbe, Monitor, Probe, ProbeOutcome
from ductile.fleet.registry import Registry, RegistryDown, StaticServers
from ductile.fleet.shared_state import SharedFleetState
from ductile.messages.updates import ServerState
from ductile.roles import Failure, Late

POLL_S = 5.0
"""Longest time between two looks at the registry."""


class FleetKeeper:
    """Nothing runs before `start` or after `stop`."""

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
        """The arguments are those of `ductile.fleet.elastic_fleet.ElasticFleet`."""
        self.on_change = Listeners[[ServerHealth | None, ServerHealth, int]]()
        self.state = SharedFleetState()
        self.discovery = Discovery(config, registry or StaticServers(()), addresses, tell, clock)
        self.rules = HealthRules(
            failure_threshold=config.health_check_failure_threshold,
            progress_timeout_s=config.progress_timeout_seconds,
            bucket_timeout_s=config.update_bucket_timeout_seconds,
        )
        self.models: tuple[str, ...] = ()
        """Fingerprints of the model that servers must have, one of them; () while it is not known."""
        self.changed = ChangeSignal()
        """Told in the event loop, after each change of the state."""
        self.changed_at = clock()
        """Time at which those that serve last changed."""
        self.fenced = ""
        """Reason for which the fleet is another one's, a sentence; "" while it is ours."""
        self.own_fault = ""
        """Reason for which no server can be asked, where the fault is on our side, a sentence."""
        self._config, self._members, self._authority = config, members, authority
        self._patience_s, self._tell, self._clock = patience_s, tell, clock
        self._loop = asyncio.get_running_loop()
        self._own_probe = HttpProbe(config.detection_bound_s) if probe is None else None
        self._monitor = Monitor(probe or self._own_probe or _no_probe, self._watched, self._found, config, tell, clock)
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        """Join, drain or removal of a server that is under way."""
        self._added: set[InstanceId] = set()
        """Servers that `members` have been told of."""
        self._ruler: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.state.on_change.add(lambda before, after: self.soon(self._follow, before, after))

    # -- Life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Rule the fleet, and look at its servers once. Raises Late when another controller rules it for `patience_s`,
        RegistryDown when nobody can say who does."""
        if self._ruler is None:
            await self._begin_rule()
            await self.look_once()
            self._ruler = asyncio.create_task(self._rule())
        if self._config.enable_health_monitor:
            self._monitor.start()

    async def stop(self) -> None:
        """Returns when nothing of the fleet runs; `start` goes on."""
        await self._monitor.stop()
        tasks = [*self._tasks.values(), *([self._ruler] if self._ruler else [])]
        self._ruler = None
        if self._timer is not None:
            self._timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self.discovery.close()
        if self._own_probe is not None:
            await self._own_probe.close()
        if self._authority is not None:
            await self._authority.close()

    def soon(self, work: Callable[..., object], *args: object) -> None:
        """Call `work` in the fleet's event loop, from any thread. Nothing happens when the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *args)

    async def look_once(self) -> None:
        """Look once at the registry and at every server, and begin what follows."""
        await self._poll()
        await self._monitor.sweep()
        await asyncio.sleep(0)
        self._reconcile()

    def look(self) -> None:
        """Notice that there are other addresses to look at. From any thread."""
        self.soon(self._monitor.look)
        if not self._config.enable_health_monitor:
            self.soon(lambda: asyncio.ensure_future(self.look_once()))

    def hurry(self, server: InstanceId) -> None:
        """Probe the server at once. From any thread."""
        if (found := self.state.now.servers.get(server)) is not None:
            self.soon(self._monitor.hurry, found.address)

    def expect_model(self, fingerprints: tuple[str, ...]) -> None:
        """Servers with another model cannot join from now on."""
        self.models = fingerprints

    def judge(self, server: InstanceId, change: Callable[[ServerHealth], ServerHealth]) -> bool:
        """Change what is known of one server. False: the change is refused, such as of one that is gone."""
        try:
            self.state.change(lambda state: state.changed(change(state.of(server))))
        except TransitionRefused:
            return False
        return True

    async def settled(self) -> None:
        """Wait for the joins and removals that are under way now."""
        await asyncio.sleep(0)
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await asyncio.sleep(0)

    # -- What is found ----------------------------------------------------------------------------------------------

    def _watched(self) -> frozenset[str]:
        if self.fenced:
            return frozenset()
        return self.discovery.wanted.union(server.address for server in self.state.now.living)

    def _found(self, address: str, outcome: ProbeOutcome) -> None:
        now, server = self._clock(), self.state.now.at(address)
        if outcome.kind == "answered" and outcome.state is not None:
            self._answered(address, _reply_of(outcome.state, outcome.asked_at), now)
        elif outcome.kind == "unasked":
            self._blame_ourselves(outcome.reason)
        elif outcome.kind == "denied":
            self.discovery.reject(address, "", outcome.reason)
            self._tell(f"{outcome.reason}; it is not asked again")
        if server is not None:
            match outcome.kind:
                case "closed" if server.status == "draining":
                    self.judge(server.instance, lambda each: each.moved("remove", "it has left", now))
                case "closed" | "denied":
                    self.judge(server.instance, lambda each: each.moved("die", outcome.reason, now))
                case "silent" | "odd":
                    others = [each.heard_at for each in self.state.now.living if each.instance != server.instance]
                    others_at, replied = max(others, default=float("-inf")), outcome.kind == "odd"
                    token_at = self._members.heard_at(server.instance)
                    self.judge(
                        server.instance,
                        lambda each: each.unanswered(
                            outcome.reason, now, outcome.asked_at, others_at, replied, token_at
                        ),
                    )
                case _:
                    pass
        self._condemn(now)
        self._reconcile()

    def _answered(self, address: str, reply: ProbeReply, now: float) -> None:
        self.own_fault = ""
        server = self.state.now.at(address)
        if server is not None:
            if server.incarnation != reply.incarnation and reply.asked_at < server.asked_at:
                return  # said late, by the process before
            if server.is_serving and server.incarnation == reply.incarnation and reply.epoch > self.state.now.epoch:
                self._fence(f"{server.instance} has seen epoch {reply.epoch}, which another controller has made")
            self.judge(server.instance, lambda each: each.answered(reply, now, self.rules))
        elif self.models and reply.model not in ("", *self.models):
            why = (
                f"{address} has another model ({reply.model}) than the run ({self.models[0]}): start it with the run's"
            )
            self.discovery.reject(address, reply.incarnation, why)
            self._tell(why)
        elif not self.discovery.why_not(address, reply.incarnation) and not self.fenced:
            self.state.change(lambda state: state.above(reply.epoch).joined(address, reply, now))

    def _condemn(self, now: float) -> None:
        """Take out the servers that are to blame for what was found."""
        living = self.state.now.living
        verdict = blame(living, self.rules)
        if verdict.verdict == "self":
            self._blame_ourselves(verdict.reason)
        else:
            for instance in verdict.instances:
                self.judge(instance, lambda each: each.moved("die", verdict.reason, now))
        for instance, why in wedged_receivers(living, now, self.rules).items():
            self.judge(instance, lambda each, why=why: each.moved("die", why, now))

    def _blame_ourselves(self, why: str) -> None:
        if not self.own_fault:
            self._tell(why)
        self.own_fault = why

    # -- What follows -----------------------------------------------------------------------------------------------

    def _follow(self, before: FleetState, after: FleetState) -> None:
        if before.membership != after.membership:
            self.changed_at = self._clock()
        for server in after.servers.values():
            was = before.servers.get(server.instance)
            if was is None or was.status != server.status:
                self._act(was, server)
                self.on_change(was, server, after.epoch)
        for was in before.servers.values():  # another process has its address, and its place
            if was.is_living and was.instance not in after.servers:
                gone = was.moved("die", "another process has its address", self._clock())
                self._act(was, gone)
                self.on_change(was, gone, after.epoch)
        self._monitor.look()
        self.changed.notify_all()

    def _act(self, was: ServerHealth | None, server: ServerHealth) -> None:
        id = server.instance
        match server.status:
            case "dead" | "gone":
                if server.status == "dead" and was is not None and was.status in LIVING:
                    self.discovery.lost(server.address)
                self._begin(id, self._remove(id, server.reason), instead=True)
            case "stale":
                if id in self._added:
                    self._members.put_aside(id, server.reason)
            case "draining":
                self._begin(id, self._drain(id), instead=True)
            case "ready" | "suspect" if id not in self._added:
                self._added.add(id)
                self._begin(id, self._add(TopologyMember.of(server)))
            case "ready" | "suspect" if was is not None and was.status in ("stale", "warming"):
                self._members.readmit(id)
            case _:
                pass
        if server.status == "suspect" or (was is not None and was.status == "suspect"):
            self._members.suspect(id, server.reason if server.status == "suspect" else "")

    def _reconcile(self) -> None:
        """Begin the joins that are due. What is not due is seen again: nothing is noted down and forgotten."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.fenced or self._members.version is None:
            return
        state, now = self.state.now, self._clock()
        waiting = {
            server.instance: server.since
            for server in state.living
            if server.status in ("joining", "stale")
            and server.offered is None
            and server.instance not in self._tasks
            and not server.probe_failures
            and not self.discovery.why_not(server.address, server.incarnation)
        }
        joins = joins_due(waiting, now, self._config.topology_change_cooldown_seconds, len(state.serving))
        for instance in joins.now:
            self._begin(instance, self._join(instance))
        if joins.wait_s is not None:
            self._timer = self._loop.call_later(joins.wait_s, self._reconcile)

    def _begin(self, server: InstanceId, work: Coroutine[Any, Any, None], instead: bool = False) -> None:
        """Begin a server's work, after that which is under way. instead: and end that."""
        before = self._tasks.get(server)

        async def do() -> None:
            if before is not None:
                if instead:
                    before.cancel()
                await asyncio.gather(before, return_exceptions=True)
            try:
                await work
            except Exception as error:
                self._tell(f"{server}: {error_text(error)}")

        task = asyncio.create_task(do())
        self._tasks[server] = task
        task.add_done_callback(lambda _: self._end(server, task, work))

    def _end(self, server: InstanceId, task: "asyncio.Task[None]", work: Coroutine[Any, Any, None]) -> None:
        work.close()  # it has not begun where the task was cancelled before
        if self._tasks.get(server) is task:
            del self._tasks[server]

    async def _join(self, id: InstanceId) -> None:
        """Give the server the live version, and again while a newer one has come meanwhile."""
        if not self.judge(id, lambda each: each.moved("warm", "it is given weights", self._clock())):
            return
        server = self.state.now.of(id)
        why = "no version stayed the newest for long enough"
        deadline_s = 2 * self._config.update_max_attempts * self._config.update_total_timeout_seconds
        try:
            async with asyncio.timeout(deadline_s):
                while self.state.now.of(id).status == "warming":
                    version = self._members.version
                    donors = () if version is None else self.state.now.holders(version)
                    warmed = await self._members.warm(TopologyMember.of(server), tuple(map(TopologyMember.of, donors)))
                    if warmed is not None and warmed.version >= (self._members.version or 0):
                        self._commit(id, warmed)
                        return
                    if warmed is None:
                        await self._next_change()
                return
        except TransitionRefused:
            return  # it is gone
        except TimeoutError:
            pass
        except (Failure, OSError) as error:
            why = str(error)
        self.discovery.lost(server.address)
        self._tell(f"{id} could not be given weights: {why}")
        self.judge(id, lambda each: each.update_failed(why, self._clock(), keeps_old=False))

    async def _next_change(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await self.changed.wait()

    def _commit(self, id: InstanceId, warmed: Warmed) -> None:
        now = self._clock()
        self.judge(id, lambda each: each.sent(warmed.version, now).committed(warmed.version, warmed.digest, now))

    async def _add(self, server: TopologyMember) -> None:
        await self._members.add(server)
        now = self.state.now.servers.get(server.instance)
        if now is not None and now.status == "stale":  # it came to that meanwhile
            self._members.put_aside(server.instance, now.reason)

    async def _drain(self, id: InstanceId) -> None:
        with suppress(TimeoutError):
            if id in self._added:
                async with asyncio.timeout(self._config.drain_timeout_seconds):
                    await self._members.drain(id)
        self.judge(id, lambda each: each.moved("remove", "it has left as it was told", self._clock()))

    async def _remove(self, id: InstanceId, why: str) -> None:
        self._added.discard(id)
        await self._members.remove(id, why)

    # -- Registry and rule ------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        for address in await self.discovery.poll():
            server = self.state.now.at(address)
            if (
                server is not None
                and server.status != "draining"
                and self.discovery.why_not(address, server.incarnation)
            ):
                self.judge(
                    server.instance, lambda each: each.moved("drain", "it says that it is leaving", self._clock())
                )

    async def _begin_rule(self) -> None:
        if self._authority is None:
            return
        until = self._clock() + self._patience_s
        while (token := await self._authority.claim()) is None:
            if self._clock() >= until:
                raise Late(f"another controller has ruled this fleet for {self._patience_s:g} s")
            await asyncio.sleep(min(1.0, self._patience_s))
        self.state.change(lambda state: state.above(first_epoch(token) - 1))

    async def _rule(self) -> None:
        """Renew the rule and look at the registry, until another one rules."""
        match self._config.registry:
            case FileRegistry(ttl_seconds=ttl_s) | HttpRegistry(ttl_seconds=ttl_s):
                interval_s = min(ttl_s / 3, POLL_S)
            case _:
                interval_s = POLL_S
        while not self.fenced:
            await asyncio.sleep(interval_s)
            try:
                if self._authority is not None and await self._authority.claim() is None:
                    self._fence("another controller rules the fleet of this registry")
                await self._poll()
                self._monitor.look()
            except RegistryDown:
                pass  # nobody else can claim it, either
            except Exception as error:
                self._tell(f"the registry could not be read: {error_text(error)}")

    def _fence(self, why: str) -> None:
        if not self.fenced:
            self._tell(f"{why}: this one makes no more decisions")
        self.fenced = why
        self.changed.notify_all()


async def _no_probe(address: str) -> ProbeOutcome:
    return ProbeOutcome("unasked", f"nobody asks {address}")


def _reply_of(state: ServerState, asked_at: float) -> ProbeReply:
    update = state.update
    is_receiving = update is not None and update.phase in ("prepared", "receiving")
    return ProbeReply(
        incarnation=state.incarnation,
        version=state.version,
        asked_at=asked_at,
        digest=state.digest,
        model=state.model,
        epoch=state.epoch,
        workers=state.workers,
        num_running=state.num_running,
        is_paused=state.paused,
        num_sampled=state.num_sampled,
        update_id=update.update_id if update is not None and is_receiving else "",
        num_buckets=update.num_buckets if update is not None else 0,
    )
