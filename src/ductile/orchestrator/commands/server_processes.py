"""One of several servers behind a router: a process that is started again when it ends."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from ductile.config.checks.serving_plan import PlannedServer
from ductile.config.schema.run import InferenceRunConfig
from ductile.deaths import ending
from ductile.fleet.router.routed_servers import RoutedServers
from ductile.orchestrator.commands.serving import START_S, in_memory, server_command

LEAVE_S = 40.0
"""Seconds that a server has to end once it is told to: more than it gives its requests."""
WELL_AFTER_S = 60.0
"""A server that has served for so long, and ends, begins a new row of restarts."""
FIRST_PAUSE_S = 1.0
"""Seconds before the second restart in a row; each later pause is twice as long."""
LONGEST_PAUSE_S = 60.0


class ServerNotStarted(Exception):
    """A server could not be started at all; it has said why on stderr."""


class ServerProcess:
    """Made in the loop that routes. `keep` runs until `leave`, or until the server is given up."""

    def __init__(
        self, config: InferenceRunConfig, planned: PlannedServer, servers: RoutedServers, tell: Callable[[str], None]
    ) -> None:
        """servers: are told where the server is, and when it has ended."""
        self.url = ""
        self.has_served = asyncio.Event()
        """Set once the server has said where it listens."""
        self._planned, self._servers, self._tell = planned, servers, tell
        self._settings = server_settings(config, planned)
        self._environment = server_environment(planned, config.cluster.device, os.environ)
        self._max_restarts = config.cluster.max_restarts
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self._leaving.set()

    async def keep(self) -> None:
        """Start the server, and start it again when it ends. Raises ServerNotStarted."""
        num_restarts = 0
        while not self._leaving.is_set():
            began_at = time.monotonic()
            how = await self._serve()
            if self._leaving.is_set():
                return
            if not self.has_served.is_set():
                raise ServerNotStarted(how)
            if time.monotonic() - began_at >= WELL_AFTER_S:
                num_restarts = 0
            if num_restarts >= self._max_restarts:
                self._tell(f"{self.url or 'a server'} {how}, and is not started again (cluster.max_restarts)")
                return
            pause_s = min(FIRST_PAUSE_S * 2 ** (num_restarts - 1), LONGEST_PAUSE_S) if num_restarts else 0.0
            num_restarts += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), pause_s)

    async def _serve(self) -> str:
        """Run one process to its end, and return how it ended."""
        fd = in_memory(json.dumps(self._settings))
        try:
            process = await asyncio.create_subprocess_exec(
                *server_command(fd),
                str(os.getpid()),
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(fd,),
                env=self._environment,
                process_group=0,  # Ctrl-C is for the router, which lets its requests end first
            )
        finally:
            os.close(fd)
        ended = asyncio.create_task(process.wait())
        leaving = asyncio.create_task(self._leaving.wait())
        reading = asyncio.create_task(self._read(process))
        url = ""
        try:
            await asyncio.wait([reading, ended, leaving], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (url := reading.result()):
                self._servers.add(url)
                self.url = url
                self.has_served.set()
                draining = asyncio.create_task(self._drain(process))
                await asyncio.wait([ended, leaving], return_when=asyncio.FIRST_COMPLETED)
                draining.cancel()
        finally:
            if url and ended.done():
                self._servers.remove(url, f"the server at {url} {ending(ended.result())}")
            await self._end(process, ended)
            for task in (leaving, reading):
                task.cancel()
            await asyncio.gather(leaving, reading, return_exceptions=True)
        return ending(ended.result())

    async def _read(self, process: asyncio.subprocess.Process) -> str:
        """Return where the server says that it listens; "" where it ends before."""
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode(errors="replace")
        return line.split()[-1] if line.startswith("serving ") else ""

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            print(line.decode(errors="replace"), end="", flush=True)

    async def _end(self, process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
        if not ended.done():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await asyncio.wait([ended], timeout=LEAVE_S)
        if not ended.done():
            with suppress(ProcessLookupError):
                process.kill()
            await ended


def server_settings(config: InferenceRunConfig, planned: PlannedServer) -> dict[str, object]:
    """Return the config of one of the servers."""
    settings = config.model_dump(mode="json")
    settings["server"]["port"] = planned.port
    settings["parallel"]["dp"] = None
    return {**settings, "deployment": {"type": "single_node"}, "bench": None, **planned.overrides}


def server_environment(planned: PlannedServer, device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one of the servers, which sees the GPU of its number alone."""
    own = {**environment, **planned.environment}
    if device == "cpu" or "CUDA_VISIBLE_DEVICES" in planned.environment:
        return own
    visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if not visible:
        return own | {"CUDA_VISIBLE_DEVICES": str(planned.number)}
    return own | {"CUDA_VISIBLE_DEVICES": visible[planned.number % len(visible)]}
