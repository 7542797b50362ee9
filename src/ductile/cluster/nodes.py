"""The slots of one run: one process each, started by its node, heard through the mailbox, never orphaned."""

import asyncio
import os
import secrets
import signal
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ductile.cluster.cluster import StartFailed
from ductile.cluster.cpu_cap import CapNotPermitted
from ductile.cluster.node import KILL_S, Devices, Node, slot_of
from ductile.cluster.notices import Notices
from ductile.cluster.processes import ForkedProcess, all_ended
from ductile.cluster.survey import survey
from ductile.concurrency.background import start_reported
from ductile.config.schema.cluster import ClusterConfig
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.layout.model.peak import Arithmetic
from ductile.core.scheduling.drains import Notice
from ductile.core.scheduling.node_demand import NodeDemand
from ductile.error_text import capitalised
from ductile.messages.agents import NodeSettings
from ductile.messages.message import RoleName
from ductile.messages.workers import Done, Hello, Stop, Surveyed, Terminating
from ductile.roles import Failure
from ductile.transport.deadlines import Deadlines
from ductile.transport.mailbox import Mailbox, SlotEvent
from ductile.transport.router import Router

STOP_S = 2.0
"""How long slots have to leave by themselves. One that waits in a collective for a dead peer never will."""
CHECK_S = 1.0


class SlotNode(Protocol):
    """What a cluster asks of a node: `Node` on this machine, `RemoteNode` on another one."""

    @property
    def lost(self) -> str:
        """How the node was lost; "" while it is there."""
        ...

    async def start(self) -> Devices:
        """Returns when slots can be started there. Raises StartFailed or CapNotPermitted."""
        ...

    async def start_slot(self, slot: int) -> ForkedProcess:
        """Returns when the slot's process is there. Raises StartFailed."""
        ...

    async def stop(self) -> None:
        """Kill what is left of the node's processes."""
        ...


class NodesCluster(ABC):
    """A `Cluster` over nodes; a subclass says which there are.

    A slot that ends, or is silent for `heartbeat_timeout_s`, is lost in the mailbox within milliseconds, and `death`
    returns if the run depends on it. Slots may be added at any time. Leaving the block stops everything: politely
    first, then with SIGKILL.
    """

    mailbox: Mailbox
    _router: Router
    _home: Node
    """The node of this machine, which has the run's store."""
    _nodes: dict[int, SlotNode]
    """Nodes that have slots, by number."""
    _devices: dict[int, Devices]
    """What each of the nodes has."""
    _death: "asyncio.Future[str]"
    # What is declared here begins with `start`: it needs a running event loop, or sockets and processes, which `stop`
    # gives back.

    def __init__(
        self, slots: Sequence[int], config: ClusterConfig, logs: Path, roles: Mapping[RoleName, str], host: str
    ) -> None:
        """host: address of this machine at which the run's processes find each other."""
        self.slots = tuple(slots)
        self.rendezvous = ""
        self.devices: dict[int, str] = {}
        self.processes: dict[int, ForkedProcess] = {}
        self.on_notice = Notices()
        self._needed: Callable[[int], bool] = lambda slot: True
        self._measured: Arithmetic | None = None
        """Arithmetic that the slots were measured at, as slots that are added later will be; None: not measured."""
        self._config, self._logs, self._roles, self._host = config, logs, roles, host
        self._command_s = Deadlines.of(config).command_s
        self._starting: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One a slot: two that want the same slot get one process, and nobody else waits for it."""
        self._token = secrets.token_bytes(32)
        self._stopping = True
        self._is_broken = False
        """The run has lost a process that all of it needs, or the orchestrator its books."""
        self._leaving: set[int] = set()
        """Slots that are to leave: they end as they were told."""
        self._watching: asyncio.Task[None] | None = None

    @abstractmethod
    def _open(self) -> tuple[Node, dict[int, SlotNode]]:
        """Make the router, the node of this machine, which has the run's store, and the nodes that are known already.
        Raises StartFailed."""

    async def _gather_nodes(self) -> None:  # noqa: B027
        """Wait until all nodes are known that the run begins with. Raises StartFailed."""

    async def _started(self) -> None:  # noqa: B027
        """Called when all slots have said Hello."""

    @abstractmethod
    def _node_of(self, slot: int) -> int:
        """The number of the slot's node. Raises StartFailed where there is none."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        self._death = asyncio.get_running_loop().create_future()
        self._home, self._nodes = self._open()
        self.mailbox = Mailbox(self._router, on_error=self.fail_with)
        self.mailbox.subscribe(self._on_event)
        self._stopping = False
        try:
            await self._gather_nodes()
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._start()
            await self._started()
        except TimeoutError:
            await self.stop()
            raise StartFailed(self._not_started(self.slots)) from None
        except BaseException:
            await self.stop()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def ends_without(self, needed: Callable[[int], bool]) -> None:
        self._needed = needed

    def startable(self, slots: Iterable[int]) -> frozenset[int]:
        gone = self.mailbox.gone
        return frozenset(slot for slot in slots if not self._is_broken and slot not in gone and self._has_node(slot))

    def _has_node(self, slot: int) -> bool:
        try:
            return not self._nodes[self._node_of(slot)].lost
        except StartFailed:
            return False

    async def begin_again(self, slots: Sequence[int]) -> None:
        async with AsyncExitStack() as starting:
            for slot in sorted({*self._starting, *slots}):  # who starts some is not to find another mailbox
                await starting.enter_async_context(self._starting[slot])
            for slot in self.processes:
                self.condemn(slot, f"{self.mailbox.describe(slot)} was ended, as the run goes back")
            await all_ended(self.processes.values(), KILL_S)
            self._death = asyncio.get_running_loop().create_future()
            self._needed = lambda slot: True
            self.mailbox = Mailbox(self._router, on_error=self.fail_with, before=self.mailbox)
            self.mailbox.subscribe(self._on_event)
            # Ranks find each other as in a new run: what earlier ones have left in a store is not for them.
            self.rendezvous = await self._home.host_store(self._host)
            await self._add(slots)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the run has now."""
        return len(self._nodes)

    def want(self, demand: NodeDemand) -> None:  # noqa: B027
        """Ask who manages the machines for nodes, where somebody does. Returns at once."""

    @property
    def has_failed(self) -> bool:
        return self._death.done()

    async def death(self) -> str:
        return await asyncio.shield(self._death)

    async def add(self, slots: Sequence[int]) -> list[int]:
        async with AsyncExitStack() as starting:
            for slot in sorted(slots):  # in this order everywhere, so that nobody waits for each other
                await starting.enter_async_context(self._starting[slot])
            return await self._add(slots)

    async def _add(self, slots: Sequence[int]) -> list[int]:
        new = [slot for slot in slots if slot not in self.processes or slot in self.mailbox.lost]
        if not new:
            return []
        self.devices |= self._devices_of(new)
        were_gone = self.mailbox.gone.intersection(new)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._earlier_ended(new)
                for slot in new:
                    self.mailbox.welcome(slot)
                with self._greetings(new) as greeted:
                    for slot in new:
                        self.processes[slot] = await self._nodes[self._node_of(slot)].start_slot(slot)
                    await self._greeted_or_ended(greeted, new)
            if self._measured:
                await survey(self.mailbox, new, self._command_s, self._measured)
        except (TimeoutError, StartFailed, CapNotPermitted, Failure) as error:
            why = str(error) or self._not_started(new)
            for slot in new:
                if slot in self.processes:
                    other = f"slot {slot} was not needed, as another one did not start"
                    self.condemn(slot, other if len(new) > 1 else why)
            self.mailbox.gone.update(were_gone)  # they have not come back
            raise StartFailed(why) from None
        self.slots = tuple(sorted({*self.slots, *new}))
        return new

    def node_of(self, slot: int) -> int:
        return self._node_of(slot)

    @property
    def topology(self) -> Topology:
        return ONE_NODE

    async def leave(self, slots: Sequence[int]) -> None:
        leaving = [slot for slot in slots if slot not in self.mailbox.lost]
        self._leaving.update(leaving)
        try:
            await self._end_politely(leaving)
            for slot in leaving:
                self.processes[slot].signal(signal.SIGKILL)
            await all_ended([self.processes[slot] for slot in leaving], KILL_S)
            for slot in leaving:
                self._lose(slot, self._left(slot))  # nothing happens where its end was heard of
        finally:
            self._leaving.difference_update(leaving)

    def condemn(self, slot: int, sentence: str) -> None:
        self._lose(slot, sentence)
        self.processes[slot].signal(signal.SIGKILL)

    def fail(self, sentence: str) -> None:
        if not self._death.done():
            self._death.set_result(sentence)

    def fail_with(self, sentence: str, error: Exception) -> None:
        self._is_broken = True
        if self._death.done():
            what = {"message": f"{capitalised(sentence)}.", "exception": error}
            asyncio.get_running_loop().call_exception_handler(what)
        else:
            error.add_note(f"{capitalised(sentence)}.")
            self._death.set_exception(error)
            self._death.exception()  # it may be that nothing awaits it any more

    async def survey(self, measure: Arithmetic | None = None) -> dict[int, Surveyed]:
        self._measured = measure or self._measured
        return await survey(self.mailbox, self.slots, self._command_s, measure)

    async def stop(self) -> None:
        """Stop all slots: `Stop` first, SIGKILL for those that do not follow."""
        if self._stopping:
            return  # or never started
        self._stopping = True
        if self._watching:
            self._watching.cancel()
        alive = [slot for slot, process in self.processes.items() if process.code is None]
        await self._end_politely(alive)
        await asyncio.gather(*(node.stop() for node in self._all_nodes))
        await self._router.close()

    async def _end_politely(self, slots: Sequence[int]) -> None:
        """Have the slots end, as far as they do so in time."""
        outcomes = await self.mailbox.ask_all(dict.fromkeys(slots, Stop()), STOP_S)
        willing = [slot for slot, outcome in outcomes.items() if isinstance(outcome, Done)]
        await all_ended([self.processes[slot] for slot in willing], STOP_S)

    @property
    def _all_nodes(self) -> list[SlotNode]:
        nodes: list[SlotNode] = [self._home, *self._nodes.values()]
        return list(dict.fromkeys(nodes))

    async def _start(self) -> None:
        starting = {node: asyncio.create_task(node.start()) for node in self._all_nodes}
        try:
            await asyncio.gather(*starting.values())
        finally:
            for task in starting.values():
                task.cancel()
        self._devices = {number: starting[node].result() for number, node in self._nodes.items()}
        self.devices = self._devices_of(sorted(self.slots, reverse=True))
        self.rendezvous = await self._home.host_store(self._host)
        with self._greetings(self.slots) as greeted:
            for slot in self.slots:
                self.processes[slot] = await self._nodes[self._node_of(slot)].start_slot(slot)
            await self._or_death(greeted)
        self._watching = start_reported(self._watch(), "it is not seen any more which slots are silent", self.fail_with)

    def _devices_of(self, slots: Sequence[int]) -> dict[int, str]:
        return {slot: self._devices[self._node_of(slot)].of(slot) for slot in slots}

    def _settings(self, node: int = 0, first_slot: int = 0) -> NodeSettings:
        return NodeSettings(
            run=f"{os.getpid()}-{id(self):x}",
            address=self._router.address,
            token=self._token.hex(),
            logs=str(self._logs),
            roles={str(role): path for role, path in self._roles.items()},
            device=self._config.device,
            slots_per_device=self._config.slots_per_device,
            cpu_slot_fraction=self._config.cpu_slot_fraction,
            start_timeout_s=self._config.start_timeout_s,
            node=node,
            first_slot=first_slot,
        )

    @contextmanager
    def _greetings(self, slots: Sequence[int]) -> "Iterator[asyncio.Future[None]]":
        """Done when each of the slots, of which there is at least one, has said Hello."""
        missing = set(slots)
        greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def listen(slot: int, event: SlotEvent) -> None:
            if isinstance(event, Hello):
                missing.discard(slot)
                if not missing and not greeted.done():
                    greeted.set_result(None)

        leave = self.mailbox.subscribe(listen)
        try:
            yield greeted
        finally:
            leave()

    async def _greeted_or_ended(self, greeted: "asyncio.Future[None]", slots: Sequence[int]) -> None:
        endings = [asyncio.create_task(self.processes[slot].ended.wait()) for slot in slots]
        try:
            await asyncio.wait([greeted, *endings], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for ending in endings:
                ending.cancel()
        if not greeted.done():
            ended = next(slot for slot in slots if self.processes[slot].code is not None)
            raise StartFailed(f"{self.mailbox.lost[ended]}; see {self._logs}")

    async def _earlier_ended(self, slots: Sequence[int]) -> None:
        """Waits for the earlier processes of lost slots. Raises StartFailed: one that hangs in a driver stays for long
        after SIGKILL."""
        earlier = [self.processes[slot] for slot in slots if slot in self.processes]
        await all_ended(earlier, self._config.start_timeout_s / 2)
        if staying := [f"{process.name} (pid {process.pid})" for process in earlier if process.code is None]:
            limit_s = self._config.start_timeout_s / 2
            after = f"{limit_s:g} s later (half of cluster.start_timeout_s)"
            raise StartFailed(f"{', '.join(staying)} had been killed, and had not ended {after}")

    def _not_started(self, slots: Sequence[int]) -> str:
        silent = [slot for slot in slots if slot not in self.mailbox.heard_at_s]
        missing = ", ".join(map(str, silent or slots))  # the last one may just have been heard
        limit_s = self._config.start_timeout_s
        return f"slots {missing} did not start within {limit_s:g} s (cluster.start_timeout_s); see {self._logs}"

    async def _or_death(self, future: "asyncio.Future[Any]") -> None:
        await asyncio.wait([future, self._death], return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise StartFailed(f"{self._death.result()}; see {self._logs}")

    def _on_exit(self, process: ForkedProcess) -> None:
        if self._stopping:
            return
        slot = slot_of(process.name)
        if slot is None:
            self._is_broken = True
            self.fail(f"the process {process.name!r} (pid {process.pid}) {process.ending}")
        elif slot in self._leaving:
            self._lose(slot, self._left(slot))
        else:
            self._lose(slot, f"{self.mailbox.describe(slot)} {process.ending} while {self.mailbox.doing(slot)}")

    def _left(self, slot: int) -> str:
        return f"{self.mailbox.describe(slot)} has left, as it was told to"

    def _lose(self, slot: int, sentence: str) -> None:
        if slot in self.mailbox.lost:
            return
        needed = self._needed(slot)  # asked once, and before anything else is done about the loss
        if needed:
            self.fail(sentence)
        self.mailbox.lose(slot, sentence, is_gone=slot in self._leaving and not needed)

    def _is_out_of_reach(self, slot: int) -> bool:
        """Return whether nothing comes from the slot's whole node: then it is the node that is about to be lost."""
        return False

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, Terminating):
            self.on_notice(Notice((slot,), self._config.drain_deadline_s, "SIGTERM to its process"))

    async def _watch(self) -> None:
        """Lose slots that are silent for too long, by the second."""
        limit_s = self._config.heartbeat_timeout_s
        checked_s = time.monotonic()
        awake_since_s = checked_s
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            if now_s - checked_s > 2 * CHECK_S:
                # We ourselves were stopped (Ctrl-Z, a suspended laptop): the heartbeats wait unread.
                awake_since_s = now_s
            checked_s = now_s
            for slot, process in self.processes.items():
                silent_s = min(self.mailbox.silent_for_s(slot), now_s - awake_since_s)
                is_there = process.code is None and slot not in self.mailbox.lost
                if silent_s > limit_s and is_there and not self._is_out_of_reach(slot):
                    self.condemn(
                        slot,
                        f"{self.mailbox.describe(slot)} was silent for {silent_s:.0f} s while "
                        f"{self.mailbox.doing(slot)} (cluster.heartbeat_timeout_s = {limit_s:g}) and has been killed",
                    )
