"""Servers of a run in its pool of generators: how they come, get weights and leave. Follows `elastic_fleet.Members`.

    ElasticFleet  decides who is a member             ServerMembers  does it
                                                          ├ pool     who gets requests
                                                          └ updates  who gets weights

A version that goes live in the pool is given to all of its servers in one transaction: the pool tells each port of it
in the same moment (`InstancePort.receive`), and what comes together goes together.
"""

import asyncio
from collections.abc import Callable, Sequence

from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyMember
from ductile.core.instances.update_outcomes import InstanceOutcome
from ductile.fleet.donor import Donor
from ductile.fleet.elastic_fleet import ElasticFleet, Warmed
from ductile.fleet.generators import RemoteGenerators
from ductile.fleet.server_port import ServerPort
from ductile.fleet.weight_update import Member, Senders, UpdateResult, WeightUpdates
from ductile.records import Manifest
from ductile.roles import Failure, Interrupted, Refused, SlotLost

OpenPort = Callable[[TopologyMember], ServerPort]
"""Makes the port of a server. Raises Refused where its control token is not known."""


class ServerMembers:
    def __init__(self, pool: RemoteGenerators, updates: WeightUpdates, trainer: Senders, open_port: OpenPort) -> None:
        self.on_updated = Listeners[[UpdateResult]]()
        """Told of every version that has gone to servers, and of what has become of it at each."""
        self._pool, self._updates, self._trainer, self._open_port = pool, updates, trainer, open_port
        self._ports: dict[InstanceId, ServerPort] = {}
        self._asked: dict[InstanceId, ServerPort] = {}
        """Servers that are to get the version which is about to go out."""
        self._giving: asyncio.Task[dict[str, InstanceOutcome]] | None = None
        self._fleet: ElasticFleet | None = None

    def follow(self, fleet: ElasticFleet) -> None:
        """Tell this fleet what becomes of versions and requests; called once, as the fleet begins."""
        self._fleet = fleet
        self._pool.on_ended.add(self._on_ended)

    @property
    def under_way(self) -> str:
        return self._updates.under_way

    # -- as `elastic_fleet.Members` has it

    async def warm(self, server: TopologyMember, donors: Sequence[TopologyMember]) -> Warmed | None:
        version = self._pool.version
        if version is None or self._giving is not None:
            return None
        port = self._ports.get(server.instance) or self._open_port(server)
        self._ports[server.instance] = port
        leases = [Donor(self._ports[each.instance], version) for each in donors if each.instance in self._ports]
        sources: list[Senders] = [*leases, self._trainer]
        result = await self._updates.warm(_member(port, server), version, sources)
        if result is None or version != self._pool.version:
            return None
        [outcome] = result.outcomes
        if outcome.outcome != "committed":
            raise SlotLost(outcome.reason) if outcome.outcome == "dead" else Refused(outcome.reason)
        port.note_version(version)
        return Warmed(version, result.digest)

    async def add(self, server: TopologyMember) -> None:
        await self._pool.add_server(self._ports[server.instance])

    def put_aside(self, server: InstanceId, why: str) -> None:
        self._pool.put_aside(server, why)

    def take_back(self, server: InstanceId) -> None:
        self._pool.readmit(server)

    async def drain(self, server: InstanceId) -> None:
        await self._pool.finished(server)

    async def remove(self, server: InstanceId, why: str) -> None:
        await self._pool.remove_server(server, why)
        if port := self._ports.pop(server, None):
            await port.close()

    # -- weights

    async def give(self, port: ServerPort, manifest: Manifest) -> None:
        """Returns when the server has the version. Servers that are asked in the same moment get it together.

        Raises SlotLost where it is gone, Interrupted where it is left with the weights that it has."""
        self._asked[port.instance.id] = port
        if self._giving is None:
            self._giving = asyncio.create_task(self._give(manifest.version))
        outcome = (await asyncio.shield(self._giving))[port.instance.id]
        if outcome.outcome == "dead":
            raise SlotLost(outcome.reason)
        if outcome.outcome == "stale":
            raise Interrupted(f"{outcome.instance} does not have version {manifest.version}: {outcome.reason}")
        port.note_version(manifest.version)

    async def _give(self, version: int) -> dict[str, InstanceOutcome]:
        await asyncio.sleep(0)  # the pool tells all ports in this moment
        asked, self._asked = self._asked, {}
        fleet = self._fleet
        assert fleet is not None, "servers come by the fleet that is followed"
        try:
            present = fleet.update_began(version, asked)
            members = [_member(asked[each.instance], each) for each in present]
            result = await self._updates.update(version, members)
        except BaseException:
            fleet.update_aborted(asked)
            raise
        finally:
            self._giving = None
        fleet.update_ended(version, result.digest, result.outcomes)
        self.on_updated(result)
        absent = {name: InstanceOutcome(name, "dead", "it had left the fleet by then") for name in asked}
        return {**absent, **{each.instance: each for each in result.outcomes}}

    def _on_ended(self, instance: InstanceId, failure: Failure | None) -> None:
        if self._fleet is None or instance not in self._ports:
            return
        if failure is None:
            self._fleet.generated(instance)
        elif isinstance(failure, SlotLost | Interrupted):
            self._fleet.request_failed(instance, str(failure))


def _member(port: ServerPort, server: TopologyMember) -> Member:
    return Member(server.instance, port, server.address, port.control_token, server.incarnation)
