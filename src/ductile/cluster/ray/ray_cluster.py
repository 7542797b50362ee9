"""A run on the nodes of a Ray cluster: on each of them an actor is the node's agent (`ductile.cluster.ray.node_actor`).

Ray starts the agents, and says which nodes come, go and are about to go. All else is said as between any machines
(`ductile.cluster.joined`): slots, messages and tensors are nothing that Ray knows of.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ductile.cluster.agent import Departure
from ductile.cluster.cluster import ClusterSpec
from ductile.cluster.joined import JoinedCluster
from ductile.cluster.ray.connection import RayConnection
from ductile.cluster.ray.node_actor import AgentPlace
from ductile.concurrency.background import start, start_reported
from ductile.config.reading.command_line import as_sentence
from ductile.config.schema.cluster import RayConfig
from ductile.core.instances.node_choice import PoolNode, choose_nodes
from ductile.core.instances.placement import many
from ductile.core.scheduling.node_demand import NodeDemand, first_demand
from ductile.error_text import capitalised, error_text
from ductile.events.nodes import NodesRequested, NodeWasLost, NodeWasNoticed
from ductile.messages.agents import NodeLost
from ductile.transport.network import address_towards, is_loopback
from ductile.transport.sockets import LOOPBACK

POLL_S = 1.0
REFUSED = 2


class RayCluster(JoinedCluster):
    """Slots on nodes of a Ray cluster, the orchestrator's own among them."""

    def __init__(self, spec: ClusterSpec, ray: RayConfig) -> None:
        """ray: `[ray]` of the config."""
        config = spec.config.model_copy(update={"head_is_node": False})
        super().__init__(replace(spec, config=config))
        self._asked, self._ray = ray, RayConnection(ray)
        self._gpus_needed = 0.0 if config.device == "cpu" else spec.per_node.on_gpus / config.slots_per_device
        self._demand = first_demand(config.num_nodes)
        self._requested: tuple[int, Mapping[str, float]] | None = None
        """Nodes that Ray's autoscaler was last asked for, and what each is to have."""
        self._agents: dict[str, int] = {}
        """Numbers of Ray's nodes that have an agent, by Ray's id."""
        self._tries = Counter[str]()
        self._unfit: set[str] = set()
        """Nodes of Ray that get no agent any more."""
        self._noticed: set[str] = set()
        self._taken: set[int] = set()
        """Numbers of nodes that Ray takes away, or has taken."""
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            self._head_host = await self._ray.open(self._config.start_timeout_s)
            await super().start()
        except BaseException:
            await self._leave()
            raise

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
        await super().stop()
        await self._leave()

    def want(self, demand: NodeDemand) -> None:
        self._demand = demand

    def _own_address(self) -> str:
        if self._config.interface:
            return super()._own_address()
        is_here = self._asked.address is None or is_loopback(self._head_host)
        return LOOPBACK if is_here else address_towards(self._head_host)

    async def _gather_nodes(self) -> None:
        self._following = start_reported(self._follow(), "Ray's nodes are not followed any more", self.fail_with)
        await super()._gather_nodes()

    async def _follow(self) -> None:
        """See each second which nodes Ray has. While Ray does not answer, the run goes on with what it has."""
        is_silent = False
        while True:
            try:
                pool, draining = await self._ray.nodes(), await self._ray.draining()
            except Exception as error:  # whatever Ray raises: the run does not depend on it
                if not is_silent:
                    print(f"Ray does not say which nodes there are: {error_text(error)}", file=sys.stderr)
                is_silent = True
            else:
                is_silent = False
                self._hear_notices(draining)
                needed = self._needed_of(pool)
                await self._request(needed)
                unfit = {*self._unfit, *draining}
                for number, node in choose_nodes(pool, needed, self._agents, unfit, self.node_slots.max_nodes):
                    self._agents[node.id] = number
                    start(self._be_there(number, node, needed))
            await asyncio.sleep(POLL_S)

    async def _request(self, needed: Mapping[str, float]) -> None:
        """Have Ray's autoscaler bring the nodes that the run wants. Where there is none, nobody listens."""
        demand = self._demand
        wanted = demand.num_nodes, needed
        if not self._asked.request_nodes or self._asked.address is None or not needed or self._requested == wanted:
            return
        self._requested = wanted
        try:
            await self._ray.request_nodes(*wanted)
        except Exception as error:  # whatever Ray raises: the run goes on with the nodes that it has
            print(f"Ray's autoscaler cannot be asked for nodes: {error_text(error)}", file=sys.stderr)
        else:
            nodes = f"{many(demand.num_nodes, 'node')} with {_amounts(needed)}"
            sentence = f"The run asks Ray's autoscaler for {nodes}: {demand.reason}."
            self._tell(NodesRequested(demand.num_nodes, sentence=sentence))

    def _needed_of(self, pool: Sequence[PoolNode]) -> dict[str, float]:
        """Return what a node must have. With `device = "auto"` slots are on CPUs where no node has a GPU."""
        gpus = self._gpus_needed
        if self._config.device == "auto" and not any(node.resources.get("GPU") for node in pool):
            gpus = 0.0
        needed = {"CPU": self._asked.num_cpus, "GPU": gpus, **self._asked.resources}
        return {name: amount for name, amount in needed.items() if amount}

    async def _be_there(self, number: int, node: PoolNode, needed: Mapping[str, float]) -> None:
        """Have a Ray node be a node of the run, until it is none any more."""
        self._tries[node.id] += 1
        self._taken.discard(number)
        place = AgentPlace(self.address, self.key.secret, number, os.getcwd())
        try:
            departure = await (await self._ray.start_agent(node, place, needed))
        except Exception as error:  # whatever Ray raises
            departure = Departure(1, f"Ray cannot start it: {error_text(error)}")
        if self._stopping:
            return
        if departure.preempted:
            self._taken.add(number)
        if departure.code == REFUSED or self._tries[node.id] > self._config.max_restarts:
            self._unfit.add(node.id)
        self._agents.pop(node.id, None)
        remote = self._remote.get(number)
        if remote is not None and not remote.lost:
            remote.hear(NodeLost(departure.why))
        elif remote is None:
            self._tell_lost(number, f"the agent on Ray's node {node.id[:8]} ({node.address}) ended: {departure.why}")

    def _tell_lost(self, number: int, why: str) -> None:
        is_taken = number in self._taken
        also = ", which Ray has taken away" if is_taken else ""
        self._tell(NodeWasLost(number, is_taken, sentence=capitalised(as_sentence(f"{why}{also}"))))

    def _hear_notices(self, draining: Mapping[str, float | None]) -> None:
        for node, within_s in draining.items():
            # A node whose slots are still being started is looked at again.
            if self._has_slots(node) and node not in self._noticed:
                self._noticed.add(node)
                self._take_notice(self._agents[node], within_s)
        self._noticed &= draining.keys()

    def _has_slots(self, node: str) -> bool:
        of_node = self.node_slots.of(self._agents[node]) if node in self._agents else ()
        return self._is_open and any(slot in self.processes for slot in of_node)

    def _take_notice(self, number: int, within_s: float | None) -> None:
        """Called once when Ray is about to take a node away, in so many seconds if it says."""
        self._taken.add(number)
        slots = self._notice(number, f"Ray takes node {number} away", within_s)
        when = "soon" if within_s is None else f"in {within_s:.0f} s"
        self._tell(NodeWasNoticed(number, slots, within_s, sentence=f"Ray takes node {number} away {when}."))

    def _how_to_join(self, number: int) -> str:
        pool = self._asked.address or "this machine"
        return f"{many(number, 'node')} of the Ray cluster at {pool}, with {_amounts(self._needed_of([]))}"

    async def _leave(self) -> None:
        await self._ray.close()


def _amounts(needed: Mapping[str, float]) -> str:
    return f"{' and '.join(f'{amount:g} {name}' for name, amount in needed.items()) or 'anything'} each"
