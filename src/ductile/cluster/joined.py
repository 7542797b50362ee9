"""A run over several machines, each of which joins it: `ductile join` runs the agent there (`ductile.cluster.agent`).

The orchestrator says in its folder where it is (`ductile.cluster.invitation`), waits until as many nodes are there as
the run begins with, and numbers them. Its own machine is node 0, unless `cluster.head_is_node` is false. Others may
join the run while it is at work, up to `cluster.max_nodes`, also in the place of a node that was lost.

What crosses the network is encrypted, apart from torch's own sockets (docs/cluster.md).
"""

import asyncio
import sys

import msgspec
import zmq

from ductile.cluster.agent import num_gpus
from ductile.cluster.cluster import ClusterSpec, StartFailed
from ductile.cluster.invitation import KEY_VARIABLE, Invitation, NotInvited, given_key, key_file, withdraw
from ductile.cluster.node import Node
from ductile.cluster.nodes import NodesCluster, SlotNode
from ductile.cluster.reception import Reception, Visitor
from ductile.cluster.remote_node import RemoteNode
from ductile.concurrency.background import start
from ductile.config.checks.asked_placement import topology_by_nodes
from ductile.config.reading.command_line import as_sentence, pasteable
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.instances.node_slots import NodeSlots, node_number, number_all
from ductile.core.instances.placement import slots_of
from ductile.core.layout.geometry.topology import Topology
from ductile.core.scheduling.drains import Notice
from ductile.error_text import capitalised
from ductile.events.nodes import NodeJoined, NodesAwaited, NodeWasLost
from ductile.events.slots import SlotStarted
from ductile.messages.agents import NodeSettings
from ductile.transport.curve import RunKey
from ductile.transport.network import NoSuchInterface, address_of, address_towards, is_loopback
from ductile.transport.router import Router


class JoinedCluster(NodesCluster):
    """Slots on machines that join, equally many on each, numbered machine by machine."""

    def __init__(self, spec: ClusterSpec) -> None:
        """Raises StartFailed where the environment has a key that is none."""
        config, per_node = spec.config, spec.per_node
        super().__init__(spec.slots, config, spec.folder / "logs", spec.roles, "")
        self._folder, self._per_node, self._tell = spec.folder, per_node, spec.tell
        try:
            given = given_key()
        except NotInvited as error:
            raise StartFailed(str(error)) from None
        self.key, self._key_is_given = given or RunKey.new(), given is not None
        on_cpus = config.device == "cpu"
        each = per_node.on_cpus if on_cpus else per_node.on_gpus
        self.node_slots = NodeSlots(each, config.max_nodes or config.num_nodes)
        """The numbering of the slots. With `device = "auto"` it is known when the nodes have come."""
        self._head = (0,) if config.head_is_node else ()
        self._remote: dict[int, RemoteNode] = {}
        """Nodes behind agents, by number; lost ones, too, until another one has their place."""
        self._arrived = asyncio.Event()
        self._is_open = False
        """The run is at work: who arrives now joins it at once."""

    @property
    def address(self) -> str:
        """host:port at which nodes join."""
        return self._reception.address

    def _open(self) -> tuple[Node, dict[int, SlotNode]]:
        try:
            self._host = self._own_address()
            port = self._config.port or "*"
            self._reception = Reception(self.key, f"tcp://{self._host}:{port}", self._on_visitor, self.fail_with)
            self._router = Router(self._token, f"tcp://{self._host}:*", self.fail_with, self.key)
        except (NoSuchInterface, zmq.ZMQError, OSError) as error:
            what = f"cluster.interface = {self._config.interface!r}, cluster.port = {self._config.port}"
            raise StartFailed(f"the orchestrator cannot listen ({what}): {error}") from error
        settings = self._settings(0, 0)
        if not self._head:
            settings = msgspec.structs.replace(settings, device="cpu", cpu_slot_fraction=None, roles={})
        home = Node(settings, self._on_exit, self.fail_with)
        nodes: dict[int, SlotNode] = dict.fromkeys(self._head, home)
        return home, nodes

    def _own_address(self) -> str:
        """Return the address of this machine at which the nodes find the orchestrator. Raises NoSuchInterface or
        OSError."""
        return _head_address(self._config)

    async def _gather_nodes(self) -> None:
        """Wait until all nodes that the run begins with have arrived, and number them."""
        config = self._config
        invitation = Invitation(
            self.address, config.num_nodes, self.node_slots.max_nodes, self.key.public, self._key_is_given
        )
        invitation.write(self._folder, self.key)
        awaited = config.num_nodes - len(self._head)
        if awaited:
            self._tell(NodesAwaited(awaited, self.address, sentence=f"Waiting for {self._how_to_join(awaited)}."))
        try:
            async with asyncio.timeout(config.start_timeout_s):
                while (numbers := self._numbers()) is None:
                    arrived = asyncio.ensure_future(self._arrived.wait())
                    try:
                        await self._or_death(arrived)
                    finally:
                        arrived.cancel()
                    self._arrived.clear()
        except TimeoutError:
            raise StartFailed(self._missing()) from None
        visitors = list(self._reception.waiting)
        gpus = [num_gpus() for _ in self._head] + [visitor.said.num_gpus for visitor in visitors]
        if config.device == "auto" and not any(gpus):
            self.node_slots = NodeSlots(self._per_node.on_cpus, self.node_slots.max_nodes)
        for number, visitor in zip(numbers, visitors, strict=True):
            if number is not None and number < config.num_nodes:
                self._nodes[number] = self._admit(number, visitor)

    async def _started(self) -> None:
        """Let in who has come too early, and all who come from now on."""
        self._is_open = True
        for number in self._remote:
            self._notice_again(number)
        for visitor in list(self._reception.waiting):
            self._on_visitor(visitor)

    def _numbers(self) -> list[int | None] | None:
        asked = [visitor.said.node_rank for visitor in self._reception.waiting]
        return number_all(asked, len(self._head), self._config.num_nodes)

    def _on_visitor(self, visitor: Visitor) -> None:
        lost = {number for number, node in self._remote.items() if node.lost}
        taken = {*self._remote} - lost
        if not self._is_open:
            others = [each.said.node_rank for each in self._reception.waiting if each is not visitor]
            taken |= {rank for rank in others if rank is not None}
        number = node_number(visitor.said.node_rank, taken, self.node_slots.max_nodes, self._head)
        if isinstance(number, str):
            # The node that has the number may have ended, and its loss not be noticed yet.
            start(self._reception.refuse(visitor, number, is_for_now=visitor.said.node_rank in taken))
        elif self._is_open:
            start(self._join(number, visitor))
        else:
            self._arrived.set()

    def _admit(self, number: int, visitor: Visitor) -> RemoteNode:
        node = RemoteNode(
            msgspec.structs.replace(self._settings(number, self.node_slots.of(number)[0]), host=visitor.said.address),
            visitor.said,
            lambda message: self._reception.send(visitor.connection, message),
            self._config.heartbeat_timeout_s,
            self._on_exit,
            self.fail_with,
            lambda why: self._tell_lost(number, why),
            lambda: self._notice(number, _sigterm_to(number)),
        )
        self._remote[number] = node
        self._reception.admit(visitor, node)
        if not self._is_open:
            self._tell_joined(node)
        return node

    def _notice(self, number: int, source: str, within_s: float | None = None) -> tuple[int, ...]:
        """Tell that a node will be gone, and return those of its slots that are there. source: as `Notice` has it.
        within_s: seconds until then, where that is known."""
        mailbox, known = self.mailbox, {*self.processes}
        slots = tuple(slot for slot in self.node_slots.of(number) if slot in known and slot not in mailbox.lost)
        if slots:
            self.on_notice(Notice(slots, self._config.drain_deadline_s if within_s is None else within_s, source))
        return slots

    def _notice_again(self, number: int) -> None:
        """Tell of the slots of a node, too, that were started after its notice."""
        if self._remote[number].is_noticed:
            self._notice(number, _sigterm_to(number))

    def node_of(self, slot: int) -> int:
        return self.node_slots.node_of(slot)

    @property
    def num_nodes(self) -> int:
        return len(self._head) + sum(not node.lost for node in self._remote.values())

    @property
    def topology(self) -> Topology:
        return topology_by_nodes(self.node_slots.per_node, self.node_slots.max_nodes, self._config)

    async def _join(self, number: int, visitor: Visitor) -> None:
        """Have a node join the run that is at work, with all its slots."""
        node, limit_s = self._admit(number, visitor), self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                self._devices[number] = await node.start()
        except (StartFailed, TimeoutError) as error:
            why = str(error) or f"it was not ready within {limit_s:g} s (cluster.start_timeout_s)"
            self._remote.pop(number)
            await node.stop()
            self._tell(NodeWasLost(number, sentence=f"{capitalised(node.name)} could not join: {as_sentence(why)}"))
            return
        self._nodes[number] = node
        self._tell_joined(node)
        try:
            # Slots that were drained come back by `ductile drain --back`: until then nobody uses them.
            started = await self.add([slot for slot in self.node_slots.of(number) if slot not in self.mailbox.gone])
        except StartFailed as error:
            print(f"no slots run on {node.name}: {error}", file=sys.stderr)
            return
        for slot in started:
            device, pid = self.devices[slot], self.processes[slot].pid
            sentence = f"Slot {slot} runs on {device} of {node.name}, pid {pid}."
            self._tell(SlotStarted(slot, (), device, pid, number, sentence=sentence))
        self._notice_again(number)

    def _tell_lost(self, number: int, why: str) -> None:
        """why: a sentence without its full stop."""
        self._tell(NodeWasLost(number, sentence=capitalised(as_sentence(why))))

    def _tell_joined(self, node: RemoteNode) -> None:
        number, slots = node.settings.node, self.node_slots.of(node.settings.node)
        joined = NodeJoined(number, node.said.host, node.said.address, slots)
        self._tell(
            msgspec.structs.replace(joined, sentence=f"{capitalised(node.name)} has joined, for {slots_of(slots)}.")
        )

    def _settings(self, node: int = 0, first_slot: int = 0) -> NodeSettings:
        settings = super()._settings(node, first_slot)
        return msgspec.structs.replace(settings, key=self.key.secret, host=self._host)

    def _node_of(self, slot: int) -> int:
        node = self.node_slots.node_of(slot)
        if node not in self._nodes:
            there = ", ".join(map(str, sorted(self._nodes)))
            raise StartFailed(f"slot {slot} would be on node {node}, which has not joined: there are nodes {there}")
        return node

    def _is_out_of_reach(self, slot: int) -> bool:
        node = self._remote.get(self.node_slots.node_of(slot))
        return node is not None and node.is_silent

    async def stop(self) -> None:
        if not self._stopping:
            withdraw(self._folder, self.address)
            await super().stop()
            await self._reception.close()

    def _how_to_join(self, number: int) -> str:
        nodes = f"{number} {'more ' if self._head else ''}node{'s' if number > 1 else ''}"
        folder, address = pasteable("join", self._folder.absolute()), pasteable("join", self.address)
        if self._key_is_given:
            return f"{nodes}; on each, run {folder}, or {address}, with this run's {KEY_VARIABLE} in the environment"
        elsewhere = f"{KEY_VARIABLE}=... {address}"
        return f"{nodes}; on each, run {folder}, or {elsewhere} with what {key_file(self._folder)} has"

    def _missing(self) -> str:
        come = [f"{each}" for each in self._reception.waiting]
        there = [*(["the orchestrator's own machine"] if self._head else []), *come]
        number, limit_s = self._config.num_nodes - len(there), self._config.start_timeout_s
        have = ", ".join(there) or "nobody"
        return (
            f"{len(there)} of {self._config.num_nodes} nodes (cluster.num_nodes) have joined within {limit_s:g} s "
            f"(cluster.start_timeout_s): {have}. Missing: {self._how_to_join(number)}"
        )


def _sigterm_to(number: int) -> str:
    return f"SIGTERM to the agent of node {number}"


def _head_address(config: ClusterConfig) -> str:
    """Return the address of this machine at which the nodes find the orchestrator. Raises NoSuchInterface or
    OSError."""
    if config.interface:
        return address_of(config.interface)
    try:
        address = address_towards()
    except OSError as error:
        raise NoSuchInterface(f"no route leads to other machines ({error}): write cluster.interface") from error
    if is_loopback(address):
        raise NoSuchInterface("no route leads to other machines: write cluster.interface")
    return address
