"""The agent of a node: starts and kills the slots' processes there, and reports how they end.

`ductile join` runs it (`ductile.cluster.join`). It connects to the orchestrator (`ductile.cluster.joined`), says who it
is, and gets the node's settings. From then on it has a lease of the orchestrator, and ends, with all processes of its
node, when

- nothing comes from the orchestrator for the lease, though the connection may stand;
- the connection is broken for `BROKEN_S`: the orchestrator is gone;
- it is told to leave, by the orchestrator or by a signal;
- the node's process server ends.

When the agent itself is killed, process server and slots end as they do with an orchestrator
(`ductile.slot.forkserver`).
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ductile.cluster.cluster import StartFailed
from ductile.cluster.cpu_cap import CapNotPermitted
from ductile.cluster.node import Node, slot_of
from ductile.cluster.processes import ForkedProcess
from ductile.concurrency.background import start_reported
from ductile.error_text import error_text
from ductile.messages import agents
from ductile.transport.codec import BadFrame, decode_as, encode_message
from ductile.transport.curve import RunKey
from ductile.transport.frames import FrameDealer

BEATS = 4
"""How often each side says something within a lease, at least."""
LONGEST_BEAT_S = 1.0
BROKEN_S = 2.0
"""A connection may be broken for so long, and made anew."""
INTERRUPTED = 130
FIRST_LEASE_S = 30.0
"""The lease of an agent that waits to be admitted."""


@dataclass(frozen=True, slots=True)
class Departure:
    """How an agent has ended."""

    code: int
    """Exit code: 0 the run is over; 1 the node was lost; 2 it was not let in; 130 it was asked to leave."""
    why: str
    """A sentence without its full stop."""
    is_for_now: bool = False
    """It was not let in, and may be soon."""
    preempted: bool = False
    """True where the manager of the machines has taken this one away."""


def beat_s(lease_s: float) -> float:
    """Return the seconds between two signs of life."""
    return min(LONGEST_BEAT_S, lease_s / BEATS)


def hello(address: str, node_rank: int | None) -> agents.AgentHello:
    """Return what an agent on this machine says of itself. address: at which other nodes reach the machine."""
    return agents.AgentHello(os.getpid(), socket.gethostname(), address, num_gpus(), node_rank, version())


def version() -> str:
    """Return the version of ductile that is installed here; "" where it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("ductile")
    return ""


def num_gpus(driver: Path = Path("/proc/driver/nvidia/gpus"), devices: Path = Path("/dev")) -> int:
    """Return how many CUDA devices this machine seems to have, without asking CUDA."""
    there = len(list(driver.iterdir())) if driver.is_dir() else len(list(devices.glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not there:
        return there
    return min(there, len([each for each in visible.split(",") if each.strip() not in ("", "-1")]))


class Agent:
    """Made inside a running event loop; `run` ends it."""

    def __init__(
        self, address: str, key: RunKey, said: agents.AgentHello, tell: Callable[[str], None] = lambda sentence: None
    ) -> None:
        """address: host:port of the orchestrator. tell: hears sentences for people."""
        self._hello, self._tell = said, tell
        self._address = address
        self._dealer = FrameDealer(f"tcp://{address}", key.token, 0, key)
        self._lease_s = FIRST_LEASE_S
        self._node: Node | None = None
        self._outbox: asyncio.Queue[agents.FromAgent] = asyncio.Queue()
        self._processes: dict[int, ForkedProcess] = {}
        self._over: asyncio.Future[Departure] = asyncio.get_running_loop().create_future()
        self._is_noticed = False
        """The machine is about to be taken away."""
        self.was_heard = asyncio.Event()
        """Set when the orchestrator has said something."""

    async def run(self) -> Departure:
        """Serve until the run is over, or does without this node. None of the node's processes is left then."""
        self._outbox.put_nowait(self._hello)
        working = [
            start_reported(work, sentence, self._on_error)
            for work, sentence in (
                (self._hear(), "the orchestrator cannot be heard any more"),
                (self._send(), "the orchestrator cannot be told anything any more"),
                (self._watch_connection(), "the connection to the orchestrator is not seen any more"),
            )
        ]
        try:
            departure = await self._over
        finally:
            for task in working:
                task.cancel()
            if self._node is not None:
                # First: slots that train with others should not be waited for while they are killed.
                if self._over.done() and self._over.result().code:
                    await self._dealer.send(encode_message(agents.NodeLost(self._over.result().why)))
                await self._node.stop()
            await self._dealer.send(encode_message(agents.NodeLeft()))
            self._dealer.close()
        return departure

    def end(self, why: str, code: int = 1, is_for_now: bool = False) -> None:
        """Have `run` return soon. The first reason stays."""
        if not self._over.done():
            self._over.set_result(Departure(code, why, is_for_now))

    def give_notice(self) -> bool:
        """Tell the run that the machine is about to be taken away: it empties the slots, and the agent ends when they
        have ended. Returns whether there is anything to empty."""
        if self._is_noticed or self._over.done() or not self._has_slots:
            return False
        self._is_noticed = True
        self._outbox.put_nowait(agents.NodeNoticed())
        self._tell("This machine is about to be taken away: its slots are emptied. Signal again to leave at once.")
        return True

    @property
    def _has_slots(self) -> bool:
        return any(process.code is None for process in self._processes.values())

    async def _hear(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._lease_s):
                    payload = await self._dealer.receive()
            except TimeoutError:
                self.end(f"nothing came from the orchestrator at {self._address} for {self._lease_s:g} s")
                return
            try:
                message: agents.ToAgent = decode_as(agents.ToAgent, payload)
            except BadFrame as error:
                print(f"dropped a message: {error}", file=sys.stderr)
                continue
            self.was_heard.set()
            self._understand(message)

    def _understand(self, message: agents.ToAgent) -> None:
        match message:
            case agents.Admit(node, lease_s) if self._node is None:
                self._lease_s = lease_s
                start_reported(self._prepare(node), "the node cannot be made ready", self._on_error)
            case agents.Refuse(why, is_for_now):
                self.end(why, 2, is_for_now)
            case agents.Leave():
                self.end("the run is over", 0)
            case agents.StartSlot(slot, attempt):
                start_reported(self._start_slot(slot, attempt), f"slot {slot} cannot be started", self._on_error)
            case agents.SignalSlot(slot, pid, signum):
                process = self._processes.get(slot)
                if process is not None and process.pid == pid:
                    process.signal(signal.Signals(signum))
            case agents.Renew() | agents.Admit():
                pass

    async def _send(self) -> None:
        while True:
            try:
                async with asyncio.timeout(beat_s(self._lease_s)):
                    message = await self._outbox.get()
            except TimeoutError:
                message = agents.Renew()
            await self._dealer.send(encode_message(message))

    async def _watch_connection(self) -> None:
        await self._dealer.broken(BROKEN_S)
        self.end(f"the orchestrator at {self._address} is gone")

    async def _prepare(self, settings: agents.NodeSettings) -> None:
        self._tell(f"This machine is node {settings.node} of the run at {self._address}.")
        try:
            os.makedirs(settings.logs, exist_ok=True)  # on this machine, where no file system is shared
            self._node = Node(settings, self._on_exit, self._on_error)
            devices = await self._node.start()
        except (StartFailed, CapNotPermitted, OSError) as error:
            self.end(str(error))
        else:
            self._outbox.put_nowait(agents.NodeReady(devices.num_devices))

    async def _start_slot(self, slot: int, attempt: int) -> None:
        assert self._node is not None, "the orchestrator starts slots on nodes that are ready"
        try:
            process = await self._node.start_slot(slot)
        except (StartFailed, CapNotPermitted) as error:
            self._outbox.put_nowait(agents.SlotNotSpawned(slot, attempt, str(error)))
            return
        self._processes[slot] = process
        self._outbox.put_nowait(agents.SlotSpawned(slot, attempt, process.pid))
        if process.code is not None:  # it ended before it could be announced
            self._on_exit(process)

    def _on_exit(self, process: ForkedProcess) -> None:
        slot = slot_of(process.name)
        if slot is None:
            self.end(f"the process {process.name!r} (pid {process.pid}) {process.ending}")
        elif not self._over.done() and self._processes.get(slot) is process and process.code is not None:
            self._outbox.put_nowait(agents.SlotEnded(slot, process.pid, process.code, process.ending))
            if self._is_noticed and not self._has_slots:
                self.end("the machine was to be taken away, and its slots are empty", INTERRUPTED)

    def _on_error(self, sentence: str, error: Exception) -> None:
        self.end(f"{sentence}: {error_text(error)}")
