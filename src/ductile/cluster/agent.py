"""The agent of a node: starts and kills the slots' processes there, and reports how they end.

    ssh node7 python -P -m ductile.cluster.agent      (or srun; on the orchestrator's own machine without either)

It reads `AgentSettings`, one line of JSON, from its standard input, and connects to the orchestrator
(`ductile.cluster.agents`). It has a lease of the orchestrator and ends, with all processes of its node, when

- nothing comes from the orchestrator for `lease_s`, though the connection may stand;
- its input ends: the orchestrator is gone, or wants it to leave;
- the node's process server ends.

When the agent itself is killed, process server and slots end as they do with an orchestrator
(`ductile.slot.forkserver`).
"""

import asyncio
import os
import signal
import sys

import msgspec

from ductile.cluster.cluster import StartFailed
from ductile.cluster.cpu_cap import CapNotPermitted
from ductile.cluster.node import Node, slot_of
from ductile.cluster.processes import ForkedProcess
from ductile.concurrency.background import start_reported
from ductile.error_text import error_text
from ductile.lifeline import leave_signals_to_the_orchestrator, signal_on_parent_death
from ductile.messages.agents import (
    AgentHello,
    AgentSettings,
    FromAgent,
    NodeLost,
    NodeReady,
    Renew,
    SignalSlot,
    SlotEnded,
    SlotNotSpawned,
    SlotSpawned,
    StartSlot,
    ToAgent,
)
from ductile.transport.codec import BadFrame, decode_as, encode_message
from ductile.transport.frames import FrameDealer

SETTINGS_S = 10.0
"""Seconds within which the settings must have come."""
BEATS = 4
"""How often each side says something within a lease."""


class Agent:
    def __init__(self, settings: AgentSettings) -> None:
        self._lease_s = settings.lease_s
        self._node = Node(settings.node, self._on_exit, self._on_error)
        self._dealer = FrameDealer(settings.address, bytes.fromhex(settings.node.token), settings.node.node)
        self._outbox: asyncio.Queue[FromAgent] = asyncio.Queue()
        self._processes: dict[int, ForkedProcess] = {}
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the agent ends."""

    async def run(self) -> str:
        """Serve until the lease runs out or `end` is called. Returns why it ended, with none of the node's processes
        left; "" when the orchestrator is gone."""
        self._outbox.put_nowait(AgentHello(os.getpid()))
        working = [
            start_reported(work, sentence, self._on_error)
            for work, sentence in (
                (self._hear(), "the orchestrator cannot be heard any more"),
                (self._send(), "the orchestrator cannot be told anything any more"),
                (self._prepare(), "the node cannot be made ready"),
            )
        ]
        why = await self._over
        for task in working:
            task.cancel()
        if why:
            print(f"the agent ends: {why}", file=sys.stderr, flush=True)
            await self._dealer.send(encode_message(NodeLost(why)))
        await self._node.stop()
        self._dealer.close()
        return why

    def end(self, why: str) -> None:
        if not self._over.done():
            self._over.set_result(why)

    async def _hear(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._lease_s):
                    payload = await self._dealer.receive()
            except TimeoutError:
                self.end(f"nothing came from the orchestrator for {self._lease_s:g} s")
                return
            try:
                message: ToAgent = decode_as(ToAgent, payload)
            except BadFrame as error:
                print(f"dropped a message: {error}", file=sys.stderr)
                continue
            match message:
                case StartSlot(slot, attempt):
                    start_reported(self._start_slot(slot, attempt), f"slot {slot} cannot be started", self._on_error)
                case SignalSlot(slot, pid, signum):
                    process = self._processes.get(slot)
                    if process is not None and process.pid == pid:
                        process.signal(signal.Signals(signum))
                case Renew():
                    pass

    async def _send(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._lease_s / BEATS):
                    message = await self._outbox.get()
            except TimeoutError:
                message = Renew()
            await self._dealer.send(encode_message(message))

    async def _prepare(self) -> None:
        try:
            devices = await self._node.start()
        except (StartFailed, CapNotPermitted) as error:
            self.end(str(error))
        else:
            self._outbox.put_nowait(NodeReady(devices.num_devices))

    async def _start_slot(self, slot: int, attempt: int) -> None:
        try:
            process = await self._node.start_slot(slot)
        except (StartFailed, CapNotPermitted) as error:
            self._outbox.put_nowait(SlotNotSpawned(slot, attempt, str(error)))
            return
        self._processes[slot] = process
        self._outbox.put_nowait(SlotSpawned(slot, attempt, process.pid))
        if process.code is not None:  # it ended before it could be announced
            self._on_exit(process)

    def _on_exit(self, process: ForkedProcess) -> None:
        slot = slot_of(process.name)
        if slot is None:
            self.end(f"the process {process.name!r} (pid {process.pid}) {process.ending}")
        elif not self._over.done() and self._processes.get(slot) is process and process.code is not None:
            self._outbox.put_nowait(SlotEnded(slot, process.pid, process.code, process.ending))

    def _on_error(self, sentence: str, error: Exception) -> None:
        self.end(f"{sentence}: {error_text(error)}")


async def main() -> int:
    # When the process that started the agent ends; were the agent stopped then, it could not see the end of its input.
    signal_on_parent_death(os.getppid(), signal.SIGCONT)
    leave_signals_to_the_orchestrator()
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.timeout(SETTINGS_S):
        line = await reader.readline()
    agent = Agent(msgspec.json.decode(line, type=AgentSettings))
    leaving = asyncio.create_task(reader.read())
    leaving.add_done_callback(lambda _: agent.end(""))
    why = await agent.run()
    transport.close()
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
