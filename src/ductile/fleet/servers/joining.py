"""Joins, drains and removals of a fleet's servers: what follows from a change of the state.

    state → joins (batched, after the cooldown), removals (at once), drains

All of it happens in the event loop, in the order of the changes, and one thing at a time for each server.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ductile.concurrency.change_signal import ChangeSignal
from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.health import LIVING, ServerHealth, TransitionRefused
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember, joins_due
from ductile.error_text import error_text
from ductile.fleet.registry.discovery import Discovery
from ductile.fleet.servers.server_pool import ServerPool, Warmed
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.roles import Failure

AGAIN_S = 0.2
"""Longest time until a joiner that could not be given the live version is looked at again."""


class Joining:
    """Made in the event loop; nothing runs before `follow`, or after `stop`."""

    def __init__(
        self,
        config: FleetConfig,
        state: SharedFleetState,
        discovery: Discovery,
        pool: ServerPool,
        changed: ChangeSignal,
        tell: Callable[[str], None],
    ) -> None:
        """changed: told of each change of the state."""
        self._config, self._state, self._discovery, self._pool = config, state, discovery, pool
        self._changed, self._tell = changed, tell
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        """Join, drain or removal of a server that is under way."""
        self._added: set[InstanceId] = set()
        """Servers that the pool has been told of."""
        self._timer: asyncio.TimerHandle | None = None

    async def stop(self) -> None:
        """Returns when nothing is under way."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Wait for what is under way now."""
        await asyncio.sleep(0)
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await asyncio.sleep(0)

    def follow(self, was: ServerHealth | None, server: ServerHealth) -> None:
        """Do what follows from a server's new status. was: before; None for a new one."""
        id = server.instance
        match server.status:
            case "dead" | "gone":
                if server.status == "dead" and was is not None and was.status in LIVING:
                    self._discovery.lost(server.address)
                self._begin(id, self._remove(id, server.reason), instead=True)
            case "stale":
                if id in self._added:
                    self._pool.put_aside(id, server.reason)
            case "draining":
                self._begin(id, self._drain(id), instead=True)
            case "ready" | "suspect" if id not in self._added:
                self._added.add(id)
                self._begin(id, self._add(TopologyMember.of(server)))
            case "ready" | "suspect" if was is not None and was.status in ("stale", "warming"):
                self._pool.readmit(id)
            case _:
                pass
        if server.status == "suspect" or (was is not None and was.status == "suspect"):
            self.tell_suspicion(server)

    def tell_suspicion(self, server: ServerHealth) -> None:
        """Have the server get fewer requests, or more again."""
        reason = server.reason if server.status == "suspect" else ""
        self._pool.suspect(server.instance, reason, server.on_trial)

    def begin_due(self) -> None:
        """Begin the joins that are due. What is not due is seen again: nothing is noted down and forgotten."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._state.fenced or self._pool.version is None:
            return
        self._distrust_old(self._pool.version)
        state = self._state.now
        waiting = {
            server.instance: server.since
            for server in state.living
            if server.status in ("joining", "stale")
            and server.offered is None
            and server.instance not in self._tasks
            and not server.probe_failures
            and not self._discovery.why_not(server.address, server.incarnation)
        }
        is_urgent = any(self._discovery.is_urgent(state.of(each).address) for each in waiting)
        cooldown_s = 0.0 if is_urgent else self._config.topology_change_cooldown_seconds
        joins = joins_due(waiting, self._state.clock(), cooldown_s, len(state.serving))
        for instance in joins.now:
            self._discovery.joins(state.of(instance).address)
            self._begin(instance, self._join(instance))
        if joins.wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(joins.wait_s, self.begin_due)

    def _distrust_old(self, version: int) -> None:
        """Have servers caught up with that serve a version before the live one, such as one whose join ended as that
        was on its way to others."""
        for each in self._state.now.serving:
            if each.offered is None and (each.version or 0) < version:
                why = f"it has version {each.version}, and {version} is live"
                self._state.apply(
                    each.instance, lambda server, why=why: server.moved("distrust", why, self._state.clock())
                )

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
        if not self._state.apply(id, lambda each: each.moved("warm", "it is given weights", self._state.clock())):
            return
        server = self._state.now.of(id)
        why = "no version stayed the newest for long enough"
        deadline_s = 2 * self._config.update_max_attempts * self._config.update_total_timeout_seconds
        try:
            async with asyncio.timeout(deadline_s):
                while self._state.now.of(id).status == "warming":
                    version = self._pool.version
                    donors = () if version is None else self._state.now.holders(version)
                    warmed = await self._pool.warm(TopologyMember.of(server), tuple(map(TopologyMember.of, donors)))
                    if warmed is not None and warmed.version >= (self._pool.version or 0):
                        self._commit(id, warmed)
                        return
                    if warmed is None:
                        await self._moment(id)
                return
        except TransitionRefused:
            return  # it is gone
        except TimeoutError:
            pass
        except Exception as error:
            why = str(error) if isinstance(error, Failure | OSError) else error_text(error)
        if (now := self._state.now.servers.get(id)) is None or now.offered is not None:
            return  # it is gone, or a receiver of the next version, which has its own outcome
        self._discovery.lost(server.address)
        self._tell(f"{id} could not be given weights: {why}")
        self._state.apply(id, lambda each: each.update_failed(why, self._state.clock(), keeps_old=False))

    async def _moment(self, id: InstanceId) -> None:
        """Wait until the server has got weights otherwise, `AGAIN_S` at most."""
        with suppress(TimeoutError):
            await self._changed.wait_for(lambda: self._state.now.of(id).status != "warming", AGAIN_S)

    def _commit(self, id: InstanceId, warmed: Warmed) -> None:
        now = self._state.clock()

        def commit(server: ServerHealth) -> ServerHealth:
            if server.offered is not None and server.offered > warmed.version:
                return server  # a newer one is on its way to it, and is its next commit
            return server.sent(warmed.version, now).committed(warmed.version, warmed.digest, now)

        self._state.apply(id, commit)

    async def _add(self, server: TopologyMember) -> None:
        try:
            await self._pool.add(server)
        except Exception as error:
            why = f"it could not be given requests: {error_text(error)}"
            self._added.discard(server.instance)
            self._discovery.lost(server.address)
            self._tell(f"{server.instance} is put aside: {why}")
            self._state.apply(server.instance, lambda each: each.moved("distrust", why, self._state.clock()))
            return
        now = self._state.now.servers.get(server.instance)
        if now is not None and now.status == "stale":  # it came to that meanwhile
            self._pool.put_aside(server.instance, now.reason)

    async def _drain(self, id: InstanceId) -> None:
        """Have the server leave by the deadline, whatever becomes of its requests: what it still has goes to others."""
        why, limit_s = "it has left as it was told", self._config.drain_timeout_seconds
        try:
            if id in self._added:
                async with asyncio.timeout(limit_s):
                    await self._pool.drain(id, limit_s)
        except (TimeoutError, Failure):
            why += "; what it still had goes to others"
        self._state.apply(id, lambda each: each.moved("remove", why, self._state.clock()))

    async def _remove(self, id: InstanceId, why: str) -> None:
        self._added.discard(id)
        await self._pool.remove(id, why)
