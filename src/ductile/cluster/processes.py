"""The orchestrator's end of the process server (`ductile.slot.forkserver`): start, hear, kill and count processes."""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ductile.cluster.cluster import StartFailed
from ductile.concurrency.background import start_reported
from ductile.concurrency.deadline import said
from ductile.deaths import ending


@dataclass(slots=True)
class ForkedProcess:
    """A process that the server forked for us."""

    name: str
    pid: int
    pidfd: int | None
    """Handle of the process; None when it had ended before we could look."""
    said: list[str] = field(default_factory=list[str])
    """The lines it passed to `say`. The last one of a process that failed is its error."""
    code: int | None = None
    """How it ended, once it has: negative is a signal's number."""
    ending: str = "is alive"
    """ "was killed by SIGKILL (the kernel's OOM killer took it: ...)", "ended with exit code 1 (ValueError: ...)"."""
    killed: bool = False
    """True where we ourselves have killed it: then the machine is not asked why it ended."""
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal; none if the process has ended (its number may be another process's by now)."""
        if self.code is None and self.pidfd is not None:
            self.killed |= signum == signal.SIGKILL
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signum)

    def end(self, code: int, ending: str) -> None:
        """Note that it has ended."""
        self.code, self.ending = code, ending
        self.heard.set()
        self.ended.set()


class ProcessServer:
    """Owns the server process. `on_exit(process)` is called in the event loop for each one that ends, wanted or not.

    When the server itself ends, it is reported first; the kernel has killed all its processes, which come after. One
    that ends before it is ready is not reported: `start` raises why.
    """

    def __init__(
        self,
        log: Path,
        environment: Mapping[str, str],
        on_exit: Callable[[ForkedProcess], None],
        on_error: Callable[[str, Exception], None] = lambda sentence, error: None,
        sockets: Path | None = None,
    ) -> None:
        """on_error: told with a sentence when it is not heard any more which processes end. sockets: a folder that the
        server removes at its end, which comes after the end of all processes that use it."""
        self._log, self._on_error, self._sockets = log, on_error, sockets
        self._environment = dict(environment)
        self._on_exit = on_exit
        self._processes: dict[str, ForkedProcess] = {}
        """Processes by the server's name for them, `NAME#NUMBER`: an earlier one of the same name may end later."""
        self._starting: dict[str, asyncio.Future[ForkedProcess]] = {}
        """Processes that were asked for and are waited for, by the server's name."""
        self._unwanted: set[str] = set()
        """Server's names of processes that were started after their deadline: nobody was given them."""
        self._numbers = itertools.count(1)
        self._sending = asyncio.Lock()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._hearing: asyncio.Task[None] | None = None

    async def start(self, modules: Sequence[str], deadline_s: float) -> None:
        """Start the server and wait until it has imported `modules`.

        Call it in a thread that lives as long as the run (the main one): the server follows that thread's end.
        """
        self._spawn(modules)
        self._hearing = start_reported(self._hear(), "the process server cannot be heard any more", self._on_error)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), deadline_s)
        except TimeoutError:
            raise StartFailed(f"the process server was not ready within {said(deadline_s)}; see {self._log}") from None

    async def fork(
        self, name: str, entry: str, arguments: dict[str, Any], log: Path, cgroup: str = "", deadline_s: float = 10.0
    ) -> ForkedProcess:
        """Start one process: `entry` is "package.module:function", called with `arguments`.

        Cancelled, it leaves none. One that starts after the deadline is killed, and its end is not reported.
        """
        if self._control is None:
            raise StartFailed(f"{name} cannot be started: the process server is not running")
        key = f"{name}#{next(self._numbers)}"
        request = {"start": key, "entry": entry, "arguments": arguments, "log": str(log), "cgroup": cgroup}
        started = self._starting[key] = asyncio.get_running_loop().create_future()
        asked = False
        try:
            async with asyncio.timeout(deadline_s):
                async with self._sending:
                    asked = True  # from the first byte on
                    await asyncio.get_running_loop().sock_sendall(self._control, json.dumps(request).encode() + b"\n")
                return await asyncio.shield(started)
        except asyncio.CancelledError:
            if asked:
                await _end_process(started, deadline_s)
            raise
        except (TimeoutError, OSError) as error:
            raise StartFailed(f"the process server did not start {name} ({error or 'no reply'})") from error
        finally:
            del self._starting[key]

    async def stop(self, deadline_s: float) -> None:
        """Kill whatever is left, wait for all of it, then end the server. Nothing runs afterwards."""
        for process in self._processes.values():
            process.signal(signal.SIGKILL)
        await all_ended(self._processes.values(), deadline_s)
        if self._hearing:
            self._hearing.cancel()
            await asyncio.wait([self._hearing], timeout=1.0)
        if self._control:
            self._control.close()
            self._control = None
        if self._server:
            try:
                await asyncio.to_thread(self._server.wait, deadline_s)
            except subprocess.TimeoutExpired:
                self._server.kill()  # its children follow by themselves
                await asyncio.to_thread(self._server.wait, deadline_s)
            self._server = None
        for process in self._processes.values():
            if process.pidfd is not None:
                os.close(process.pidfd)
        self._processes.clear()

    def _spawn(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs, self._log.open("ab") as log:
            self._server = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "ductile.slot.forkserver"),
                    *(str(theirs.fileno()), str(os.getpid()), str(self._sockets or ""), *modules),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **self._environment},
            )

    async def _hear(self) -> None:
        assert self._control is not None
        received = b""
        while chunk := await self._receive():
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                self._understand(json.loads(line))
        await self._server_ended()

    async def _receive(self) -> bytes:
        assert self._control is not None
        with suppress(ConnectionError):
            return await asyncio.get_running_loop().sock_recv(self._control, 65536)
        return b""

    def _understand(self, message: dict[str, Any]) -> None:
        match message:
            case {"ready": True}:
                self._ready.set_result(None)
            case {"failed": str(why)}:
                self._ready.set_exception(StartFailed(f"{why}; see {self._log}"))
            case {"started": str(key), "pid": int(pid)}:
                process = self._processes[key] = ForkedProcess(key.rpartition("#")[0], pid, _open_pidfd(pid))
                starting = self._starting.get(key)
                if starting is not None and not starting.done():
                    starting.set_result(process)
                else:  # too late: `fork` has given it up
                    self._unwanted.add(key)
                    process.signal(signal.SIGKILL)
            case {"not_started": str(key), "why": str(why)}:
                if (starting := self._starting.get(key)) is not None and not starting.done():
                    starting.set_exception(StartFailed(f"{key.rpartition('#')[0]} cannot be started: {why}"))
            case {"said": str(key), "text": str(text)}:
                self._processes[key].said.append(text)
                self._processes[key].heard.set()
            case {"exited": str(key), "code": int(code), "cpu_s": float(cpu_s)}:
                self._end(key, code, cpu_s)

    async def _server_ended(self) -> None:
        assert self._server is not None
        server = ForkedProcess("process server", self._server.pid, None)
        server.end(code := self._server.wait(1.0), ending(code))
        if not self._ready.done():
            self._ready.set_exception(StartFailed(f"the process server {server.ending} at its start; see {self._log}"))
        if self._ready.cancelled() or self._ready.exception():
            return
        self._on_exit(server)
        for key, process in list(self._processes.items()):
            if process.pidfd is not None:
                await _ending_of(process.pidfd)
            process.killed = True  # by the kernel, which follows the server
            self._end(key, -signal.SIGKILL)

    def _end(self, key: str, code: int, cpu_s: float | None = None) -> None:
        process = self._processes.pop(key)
        words = f" ({process.said[-1]})" if code > 0 and process.said else ""
        killed = process.killed and code == -signal.SIGKILL
        process.end(code, "was killed by SIGKILL" if killed else f"{ending(code, cpu_s, logs_faults=True)}{words}")
        if process.pidfd is not None:
            os.close(process.pidfd)
            process.pidfd = None
        if key not in self._unwanted:
            self._on_exit(process)
        self._unwanted.discard(key)


async def all_ended(processes: Iterable[ForkedProcess], deadline_s: float) -> None:
    """Wait until the processes have ended, at most until the deadline."""
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            for process in list(processes):
                await process.ended.wait()


async def _end_process(started: "asyncio.Future[ForkedProcess]", deadline_s: float) -> None:
    """End a process that the server has been asked for, and may not have started yet."""
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            process = await started
            process.signal(signal.SIGKILL)
            await process.ended.wait()


async def _ending_of(pidfd: int, deadline_s: float = 5.0) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        await asyncio.wait([ended], timeout=deadline_s)
    finally:
        loop.remove_reader(pidfd)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
