"""A run over several machines: each has an agent (`ductile.cluster.agent`), and the orchestrator a lease of each."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from ductile.cluster.agent import BEATS
from ductile.cluster.cluster import StartFailed
from ductile.cluster.local import ROLES
from ductile.cluster.node import KILL_S, Devices, Node, slot_name
from ductile.cluster.nodes import NodesCluster, SlotNode
from ductile.cluster.processes import ForkedProcess
from ductile.concurrency.background import start, start_reported
from ductile.config.schema.cluster import ClusterConfig
from ductile.deaths import ending
from ductile.error_text import error_text
from ductile.messages.agents import (
    AgentHello,
    AgentSettings,
    FromAgent,
    NodeLost,
    NodeReady,
    NodeSettings,
    Renew,
    SignalSlot,
    SlotEnded,
    SlotNotSpawned,
    SlotSpawned,
    StartSlot,
    ToAgent,
)
from ductile.messages.message import RoleName
from ductile.transport.codec import BadFrame, decode_as, encode_message
from ductile.transport.frames import FrameRouter
from ductile.transport.router import Router
from ductile.transport.sockets import LOOPBACK

START_SLOT_S = 10.0


class RemoteProcess(ForkedProcess):
    """A slot's process, which an agent started."""

    def __init__(self, slot: int, pid: int, send: Callable[[ToAgent], object]) -> None:
        super().__init__(slot_name(slot), pid, None)
        self._slot, self._send = slot, send

    def signal(self, signum: signal.Signals) -> None:
        if self.code is None:
            self._send(SignalSlot(self._slot, self.pid, signum))


class RemoteNode:
    """A node behind its agent, which is started and ended with it.

    When the agent ends, or is silent for `lease_s`, every slot of the node is lost.
    """

    def __init__(
        self,
        settings: NodeSettings,
        command: Sequence[str],
        host: str,
        lease_s: float,
        on_exit: Callable[[ForkedProcess], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        """command: that has another one run on the node, such as ("ssh", "node7"); () on this machine. host: address of
        this machine that the node reaches."""
        self._settings, self._command, self._lease_s = settings, command, lease_s
        self._on_exit, self._on_error = on_exit, on_error
        self._log = Path(settings.logs) / f"agent_{settings.node}.log"
        self._frames = FrameRouter(bytes.fromhex(settings.token), f"tcp://{host}:*")
        self._ready: asyncio.Future[Devices] = asyncio.get_running_loop().create_future()
        self._attempts = itertools.count(1)
        self._starting: dict[int, asyncio.Future[ForkedProcess]] = {}
        """Starts that are waited for, by the number of the attempt."""
        self._processes: dict[int, RemoteProcess] = {}
        self._connection: bytes | None = None
        self._num_silent = 0
        """Beats of the lease since the agent last said anything. They are counted and not timed: when this process was
        stopped itself, what the agent said meanwhile is read before the next beat."""
        self._lost = ""
        """How the node was lost; "" when it was not."""
        self._agent: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._working: list[asyncio.Task[None]] = []

    async def start(self) -> Devices:
        self._launch()
        hears = f"the agent of node {self._settings.node} cannot be heard any more"
        self._working = [start_reported(work, hears, self._on_error) for work in (self._receive(), self._keep_lease())]
        return await asyncio.shield(self._ready)

    async def start_slot(self, slot: int) -> ForkedProcess:
        if self._lost:
            raise StartFailed(f"slot {slot} cannot be started: it {self._lost}; see {self._log}")
        attempt = next(self._attempts)
        started = self._starting[attempt] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(START_SLOT_S):
                await self._send(StartSlot(slot, attempt))
                return await started
        except TimeoutError:
            raise StartFailed(f"the agent of node {self._settings.node} did not start slot {slot}") from None
        finally:
            del self._starting[attempt]

    async def stop(self) -> None:
        if self._agent is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            assert self._agent.stdin is not None
            with suppress(BrokenPipeError):
                self._agent.stdin.close()
            try:
                await asyncio.to_thread(self._agent.wait, 2 * KILL_S)
            except subprocess.TimeoutExpired:
                self._agent.kill()  # its processes follow by themselves
                await asyncio.to_thread(self._agent.wait, KILL_S)
            self._agent = None
        for task in self._working:
            task.cancel()
        if self._working:
            await asyncio.wait(self._working, timeout=1.0)
        self._frames.close()

    def _launch(self) -> None:
        settings = AgentSettings(self._frames.address, self._lease_s, self._settings)
        command = [*self._command, sys.executable, "-P", "-m", "ductile.cluster.agent"]
        environment = {**os.environ, "DUCTILE_RUN": self._settings.run}
        try:
            with self._log.open("ab") as log:
                self._agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        except OSError as error:
            raise StartFailed(
                f"the agent of node {self._settings.node} cannot be started: {error_text(error)}"
            ) from error
        assert self._agent.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is seen below
            self._agent.stdin.write(msgspec.json.encode(settings) + b"\n")
            self._agent.stdin.flush()
        self._pidfd = os.pidfd_open(self._agent.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_agent_end)

    def _on_agent_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        assert self._agent is not None
        self._lose(ending(self._agent.wait(KILL_S)))

    async def _receive(self) -> None:
        while True:
            connection, _, payload = await self._frames.receive()
            try:
                message: FromAgent = decode_as(FromAgent, payload)
            except BadFrame:
                self._frames.dropped["unreadable"] += 1
                continue
            if isinstance(message, AgentHello) and self._connection is None:
                self._connection = connection
                await self._send(Renew())
            if connection != self._connection:
                self._frames.dropped["no Hello"] += 1
            elif not self._lost:
                self._num_silent = 0
                self._understand(message)

    def _understand(self, message: FromAgent) -> None:
        match message:
            case NodeReady(num_devices):
                self._ready.set_result(Devices(num_devices, self._settings.slots_per_device, self._settings.first_slot))
            case NodeLost(why):
                self._lose(f"ended: {why}")
            case SlotSpawned(slot, attempt, pid):
                process = RemoteProcess(slot, pid, lambda message: start(self._send(message)))
                starting = self._starting.get(attempt)
                if starting is not None and not starting.done():
                    self._processes[slot] = process
                    starting.set_result(process)
                else:
                    process.signal(signal.SIGKILL)  # too late: `start_slot` has given it up
            case SlotNotSpawned(_, attempt, sentence):
                starting = self._starting.get(attempt)
                if starting is not None and not starting.done():
                    starting.set_exception(StartFailed(sentence))
            case SlotEnded(slot, pid, code, how):
                process = self._processes.get(slot)
                if process is not None and process.pid == pid and process.code is None:
                    process.end(code, how)
                    self._on_exit(process)
            case Renew() | AgentHello():
                pass

    async def _keep_lease(self) -> None:
        while not self._lost:
            await asyncio.sleep(self._lease_s / BEATS)
            if self._connection is None:
                continue  # starting has a deadline of its own
            self._num_silent += 1
            if self._num_silent > BEATS:
                self._lose(f"was silent for {self._lease_s:g} s (cluster.heartbeat_timeout_s)")
            await self._send(Renew())

    async def _send(self, message: ToAgent) -> None:
        if self._connection is not None:
            with suppress(zmq.ZMQError):  # the lease ends, or the agent has
                await self._frames.send(self._connection, encode_message(message))

    def _lose(self, how: str) -> None:
        if self._lost:
            return
        assert self._agent is not None
        self._lost = f"was lost with node {self._settings.node} (its agent, pid {self._agent.pid}, {how})"
        failed = StartFailed(f"the agent of node {self._settings.node} {how}; see {self._log}")
        for waiting in (self._ready, *self._starting.values()):
            if not waiting.done():
                waiting.set_exception(failed)
                waiting.exception()  # it may be that nothing awaits it any more
        self._agent.kill()  # a silent one goes on otherwise, and its slots
        for process in self._processes.values():
            if process.code is None:
                process.end(-signal.SIGKILL, self._lost)
                self._on_exit(process)


class AgentCluster(NodesCluster):
    """Slots on several machines, equally many on each, numbered machine by machine. The orchestrator's own machine has
    the run's store, and slots only if it is named.

        AgentCluster(range(16), config.cluster, logs, [("ssh", "node1"), ("ssh", "node2")], 8, host="10.0.0.1")

    The machines share the folder of the logs. What crosses the network carries the run's token and is not encrypted.
    gloo stays on loopback unless GLOO_SOCKET_IFNAME names another interface on each machine.
    """

    def __init__(
        self,
        slots: Sequence[int],
        config: ClusterConfig,
        logs: Path,
        commands: Sequence[Sequence[str]],
        slots_per_node: int,
        roles: Mapping[RoleName, str] = ROLES,
        host: str = LOOPBACK,
    ) -> None:
        """commands: for each machine what has a command run there; () for this one."""
        super().__init__(slots, config, logs, roles, host)
        self._commands, self._slots_per_node = commands, slots_per_node

    def _open(self) -> tuple[Node, list[SlotNode]]:
        self._router = Router(self._token, f"tcp://{self._host}:*", self.fail_with)
        home = msgspec.structs.replace(self._settings(), device="cpu", cpu_slot_fraction=None, roles={})
        nodes: list[SlotNode] = [
            RemoteNode(
                self._settings(number, (number - 1) * self._slots_per_node),
                command,
                self._host,
                self._config.heartbeat_timeout_s,
                self._on_exit,
                self.fail_with,
            )
            for number, command in enumerate(self._commands, start=1)
        ]
        return Node(home, self._on_exit, self.fail_with), nodes

    def _node_of(self, slot: int) -> int:
        num_slots = len(self._commands) * self._slots_per_node
        if slot >= num_slots:
            raise StartFailed(f"slot {slot} has no node: there is room for slots 0 to {num_slots - 1}")
        return slot // self._slots_per_node
