"""A node on another machine, behind its agent (`ductile.cluster.agent`), of which the orchestrator has a lease."""

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable

from ductile.cluster.agent import BEATS, BROKEN_S, beat_s
from ductile.cluster.cluster import StartFailed
from ductile.cluster.node import KILL_S, Devices, slot_name
from ductile.cluster.processes import ForkedProcess
from ductile.concurrency.background import start, start_reported
from ductile.messages import agents

START_SLOT_S = 10.0
SendToAgent = Callable[[agents.ToAgent], Awaitable[bool]]
"""Sends a message to an agent; False when it is not connected."""


class RemoteProcess(ForkedProcess):
    """A slot's process, which an agent started."""

    def __init__(self, slot: int, pid: int, send: Callable[[agents.ToAgent], object]) -> None:
        super().__init__(slot_name(slot), pid, None)
        self._slot, self._send = slot, send

    def signal(self, signum: signal.Signals) -> None:
        if self.code is None:
            self._send(agents.SignalSlot(self._slot, self.pid, signum))


class RemoteNode:
    """A node whose agent has said Hello.

    When the agent ends, or is silent for the lease, or its connection stays broken, every slot of the node is lost.
    """

    def __init__(
        self,
        settings: agents.NodeSettings,
        said: agents.AgentHello,
        send: SendToAgent,
        lease_s: float,
        on_exit: Callable[[ForkedProcess], None],
        on_error: Callable[[str, Exception], None],
        on_lost: Callable[[str], None] = lambda sentence: None,
        on_notice: Callable[[], object] = lambda: None,
    ) -> None:
        """on_lost: told with a sentence, without its full stop, that the node is lost, before its slots are. on_notice:
        told that the machine is about to be taken away; once its slots have ended, it is not lost."""
        self.settings, self.said = settings, said
        self._send_message, self._lease_s = send, lease_s
        self._on_exit, self._on_error, self._on_lost = on_exit, on_error, on_lost
        self._on_notice = on_notice
        self.is_noticed = False
        """Its agent has said that the machine is about to be taken away."""
        self._ready: asyncio.Future[Devices] = asyncio.get_running_loop().create_future()
        self._attempts = itertools.count(1)
        self._starting: dict[int, asyncio.Future[ForkedProcess]] = {}
        """Starts that are waited for, by the number of the attempt."""
        self._processes: dict[int, RemoteProcess] = {}
        self._num_silent = 0
        """Beats of the lease since the agent last said anything. They are counted and not timed: when this process was
        stopped itself, what the agent said meanwhile is read before the next beat."""
        self._num_unreachable = 0
        """Beats since which the agent has not been connected."""
        self._is_leaving = False
        """The agent is told to leave, since the run is over."""
        self._has_left = asyncio.Event()
        self.lost = ""
        """How the node was lost; "" when it was not."""
        self._keeping: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """ "node 1 (gpu-7, 10.0.0.7)"."""
        return f"node {self.settings.node} ({self.said.host}, {self.said.address})"

    @property
    def is_silent(self) -> bool:
        """True when nothing has come from the agent for half of its lease."""
        return not self.lost and self._num_silent * beat_s(self._lease_s) > self._lease_s / 2

    async def start(self) -> Devices:
        await self._send(agents.Admit(self.settings, self._lease_s))
        hears = f"the lease of {self.name} is not kept any more"
        self._keeping = start_reported(self._keep_lease(), hears, self._on_error)
        return await asyncio.shield(self._ready)

    async def start_slot(self, slot: int) -> ForkedProcess:
        if self.lost:
            raise StartFailed(f"slot {slot} cannot be started: it {self.lost}; see {self.settings.logs}")
        attempt = next(self._attempts)
        started = self._starting[attempt] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(START_SLOT_S):
                await self._send(agents.StartSlot(slot, attempt))
                return await started
        except TimeoutError:
            raise StartFailed(f"the agent of {self.name} did not start slot {slot}") from None
        finally:
            del self._starting[attempt]

    async def stop(self) -> None:
        """Have the agent leave. Returns when it says that nothing is left there, at most after twice `KILL_S`: its
        lease ends what is left."""
        self._is_leaving = True
        if not self.lost and await self._send(agents.Leave()):
            try:
                async with asyncio.timeout(2 * KILL_S):
                    await self._has_left.wait()
            except TimeoutError:
                pass
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping], timeout=1.0)

    def hear(self, message: agents.FromAgent) -> None:
        """Take what the agent says."""
        if isinstance(message, agents.NodeLeft):
            self._has_left.set()
        if self.lost or self._is_leaving:
            return
        self._num_silent = 0
        match message:
            case agents.NodeReady(num_devices):
                slots_per_device, first_slot = self.settings.slots_per_device, self.settings.first_slot
                if not self._ready.done():
                    self._ready.set_result(Devices(num_devices, slots_per_device, first_slot))
            case agents.NodeNoticed():
                self.is_noticed = True
                self._on_notice()
            case agents.NodeLost(why):
                self._lose(f"ended: {why}")
            case agents.NodeLeft():
                self._lose("left")
            case agents.SlotSpawned(slot, attempt, pid):
                process = RemoteProcess(slot, pid, lambda message: start(self._send(message)))
                starting = self._starting.get(attempt)
                if starting is not None and not starting.done():
                    self._processes[slot] = process
                    starting.set_result(process)
                else:
                    process.signal(signal.SIGKILL)  # too late: `start_slot` has given it up
            case agents.SlotNotSpawned(_, attempt, sentence):
                starting = self._starting.get(attempt)
                if starting is not None and not starting.done():
                    starting.set_exception(StartFailed(sentence))
            case agents.SlotEnded(slot, pid, code, how):
                process = self._processes.get(slot)
                if process is not None and process.pid == pid and process.code is None:
                    process.end(code, how)
                    self._on_exit(process)
            case agents.Renew() | agents.AgentHello():
                pass

    async def _keep_lease(self) -> None:
        beat = beat_s(self._lease_s)
        while not self.lost:
            await asyncio.sleep(beat)
            self._num_silent += 1
            is_connected = await self._send(agents.Renew())
            self._num_unreachable = 0 if is_connected else self._num_unreachable + 1
            if self._num_unreachable * beat > BROKEN_S:
                self._lose("is gone: its connection has ended")
            elif self._num_silent * beat > self._lease_s * (1 + 1 / BEATS):
                self._lose(f"was silent for {self._lease_s:g} s (cluster.heartbeat_timeout_s)")

    async def _send(self, message: agents.ToAgent) -> bool:
        return await self._send_message(message)

    def _lose(self, how: str) -> None:
        if self.lost or self._is_leaving:
            return
        about = f"{self.said.host}, {self.said.address}: its agent, pid {self.said.pid}, {how}"
        self.lost = f"was lost with node {self.settings.node} ({about})"
        failed = StartFailed(f"the agent of {self.name} {how}; see {self.settings.logs}")
        for waiting in (self._ready, *self._starting.values()):
            if not waiting.done():
                waiting.set_exception(failed)
                waiting.exception()  # it may be that nothing awaits it any more
        start(self._send(agents.Leave()))  # one that was only silent goes on otherwise, and its slots
        if not self.is_noticed or any(process.code is None for process in self._processes.values()):
            self._on_lost(f"{self.name} is lost: its agent, pid {self.said.pid}, {how}")
        for process in self._processes.values():
            if process.code is None:
                process.end(-signal.SIGKILL, self.lost)
                self._on_exit(process)
