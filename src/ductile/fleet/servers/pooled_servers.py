"""Servers of a run in its pool of generators: they come, get weights and leave. Follows `server_pool.ServerPool`.

ElasticFleet  decides who is in it → PooledServers  does it, and tells what became of each request
                                         ├ pool     who gets requests
                                         └ updates  who gets weights
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from ductile.concurrency.background import finish, start
from ductile.concurrency.listeners import Listeners
from ductile.concurrency.structured import gather_all
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember
from ductile.core.instances.update_outcomes import InstanceOutcome
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.servers.server_pool import Warmed
from ductile.fleet.servers.server_port import ServerPort
from ductile.fleet.updates.donor import Donor
from ductile.fleet.updates.update_parties import Senders, ServerHandle, UpdateResult
from ductile.fleet.updates.weight_update import WeightUpdates
from ductile.roles import Failure, Late, Refused, SlotLost


class PooledServers:
    """Made before the fleet, which listens to it."""

    def __init__(
        self,
        pool: RemoteGenerators,
        updates: WeightUpdates,
        trainer: Senders,
        open_port: Callable[[TopologyMember], ServerHandle[ServerPort]],
    ) -> None:
        """open_port: handle of a server, whose control is a port that is not open yet. Raises Refused where its
        control token is not known."""
        self.on_ended = Listeners[[InstanceId, Failure | None, float]]()
        self.on_updated = Listeners[[UpdateResult]]()
        """Told of every version that has gone to servers, and of what has become of it at each."""
        self._pool, self._updates, self._trainer, self._open_port = pool, updates, trainer, open_port
        self._servers: dict[InstanceId, ServerHandle[ServerPort]] = {}
        self._opening: dict[InstanceId, asyncio.Task[ServerHandle[ServerPort]]] = {}
        """Servers that are being opened: a join and an update that need the same one share its handle."""
        pool.on_ended.add(self._on_ended)
        # It may be lost with what is no request of `generate`: a canary, or one that migrates.
        pool.on_lost.add(lambda instance, why: self._on_ended(instance, SlotLost(why), 0.0))

    @property
    def under_way(self) -> str:
        """The version or the join that is under way; "" when there is none."""
        return self._updates.under_way

    def num_unfinished(self, server: InstanceId) -> int:
        """Return the number of the run's requests that the server has."""
        return sum(request.instance == server for request in self._pool.unfinished())

    async def close(self) -> None:
        """Let go of all servers, which go on without the run."""
        for opening in self._opening.values():
            opening.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        await gather_all(*(handle.control.release() for handle in self._servers.values()))

    # -- as `ServerPool` has it

    @property
    def version(self) -> int | None:
        return self._pool.version

    @property
    def num_others(self) -> int:
        return sum(bool(each.slots) for each in self._pool.instances)

    async def warm(self, server: TopologyMember, donors: Sequence[TopologyMember]) -> Warmed | None:
        version = self._pool.version
        if version is None:
            return None  # the run has none yet
        handle = await self._opened(server)
        known = [self._servers[donor.instance] for donor in donors if donor.instance in self._servers]
        sources: list[Senders] = [*(Donor(donor.control, version) for donor in known), self._trainer]
        try:
            result = await self._updates.warm(handle, version, sources)
        except Refused as error:
            if self._pool.version != version:
                return None
            raise Late(str(error)) from error  # the next version may find it well
        if result is None or version != self._pool.version:
            return None
        [outcome] = result.outcomes
        match outcome.outcome:
            case "dead":
                raise SlotLost(outcome.reason)
            case "stale":
                raise Late(outcome.reason)
            case "committed":
                return Warmed(version, result.digest)

    async def update(self, version: int, servers: Sequence[TopologyMember]) -> UpdateResult:
        opened: list[ServerHandle[ServerPort] | InstanceOutcome]
        with self._updates.before_joiners():
            opened = await gather_all(*(self._open_or_not(server) for server in servers))
            handles = [handle for handle in opened if isinstance(handle, ServerHandle)]
            unopened = tuple(outcome for outcome in opened if isinstance(outcome, InstanceOutcome))
            result = await self._updates.update(version, handles)
        result = replace(result, outcomes=(*result.outcomes, *unopened))
        self.on_updated(result)
        return result

    async def add(self, server: TopologyMember) -> None:
        await self._pool.add_server(self._servers[server.instance].control)

    def put_aside(self, server: InstanceId, why: str) -> None:
        self._pool.put_aside(server, why)

    def readmit(self, server: InstanceId) -> None:
        self._pool.readmit(server)

    def suspect(self, server: InstanceId, why: str, on_trial: bool) -> None:
        self._pool.suspect(server, why, on_trial)

    def heard_at(self, server: InstanceId) -> float:
        handle = self._servers.get(server)
        return handle.control.heard_at if handle else float("-inf")

    async def drain(self, server: InstanceId, timeout_s: float) -> None:
        await self._pool.dismiss(self._servers[server].control.instance, timeout_s)

    async def remove(self, server: InstanceId, why: str) -> None:
        self._updates.leave_out(server, why)
        if opening := self._opening.get(server):
            opening.cancel()
        handle = self._servers.pop(server, None)  # what the pool says of it from now on is no news
        await self._pool.remove_server(server, why)
        if handle is not None:
            await handle.control.release()

    async def _open_or_not(self, server: TopologyMember) -> "ServerHandle[ServerPort] | InstanceOutcome":
        try:
            return await self._opened(server)
        except Failure as error:
            return InstanceOutcome(server.instance, "dead" if isinstance(error, SlotLost) else "stale", str(error))

    async def _opened(self, server: TopologyMember) -> ServerHandle[ServerPort]:
        if handle := self._servers.get(server.instance):
            return handle
        opening = self._opening.get(server.instance)
        if opening is None:
            opening = self._opening[server.instance] = start(self._open(server))
            opening.add_done_callback(lambda _: self._opening.pop(server.instance, None))
        try:
            return await finish(opening)
        except asyncio.CancelledError:
            if opening.cancelled() and not _is_cancelled():
                raise SlotLost(f"{server.address} has been taken out") from None
            raise

    async def _open(self, server: TopologyMember) -> ServerHandle[ServerPort]:
        handle = self._open_port(server)
        try:
            state = await handle.control.open()
            if state is None:
                raise Refused(f"{server.address} is a server that takes no weights: `ductile inference` starts one")
            if state.incarnation != server.incarnation:
                raise SlotLost(f"{server.address} was started anew")
        except BaseException:  # a cancelled one, too, leaves no connection behind
            await finish(handle.control.release())
            raise
        if (first := self._servers.setdefault(server.instance, handle)) is not handle:
            await handle.control.release()  # a join and a version have opened it at the same time
        return first

    def _on_ended(self, instance: InstanceId, failure: Failure | None, began_at: float) -> None:
        if instance in self._servers:
            self.on_ended(instance, failure, began_at)


def _is_cancelled() -> bool:
    """Return whether the running task itself has been cancelled, and not what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
