"""One grader process as the orchestrator holds it: start, ask, kill."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ductile.config.schema.orchestrator import GradersConfig
from ductile.deaths import OOM_KILLS, cause_of
from ductile.records import RewardFailure
from ductile.tasks.grader_protocol import MAX_LINE_BYTES, GraderReply, GraderRequest, decode_reply, encode
from ductile.tasks.keeper import LEAVE

LEAVE_TIMEOUT_S = 5.0
_USER = ("USER", "LOGNAME", "HOME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "TMPDIR", "TMP", "TEMP")
_PROGRAMS = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR")
_DATA = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "NLTK_DATA")
_THREADS = ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ENV = frozenset((*_USER, *_PROGRAMS, *_DATA, *_THREADS))
"""What rewards see of the environment: where things are, and nothing that opens a door."""
ENV_PREFIXES = ("LC_", "PYTHON", "XDG_")


class WorkerLost(Exception):
    """The text goes on after "the reward of ..."."""

    def __init__(self, text: str, failure: RewardFailure = "lost") -> None:
        super().__init__(text)
        self.failure: RewardFailure = failure


def no_reply() -> WorkerLost:
    return WorkerLost("wrote something else than its reply into the grader's pipe")


def clean_environment(environment: Mapping[str, str], passed: Sequence[str]) -> dict[str, str]:
    """passed: further names."""
    return {
        name: value
        for name, value in environment.items()
        if name in ENV or name in passed or name.startswith(ENV_PREFIXES)
    }


class GraderWorker:
    """Serves one request at a time. After WorkerLost it is of no more use: `kill` it."""

    def __init__(self, process: asyncio.subprocess.Process, on_print: Callable[[bytes], None]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.pid = process.pid
        self._process, self._in, self._out = process, process.stdin, process.stdout
        self._hearing = asyncio.create_task(_hear(process.stderr, on_print))
        self._next = 0

    @staticmethod
    async def start(limits: GradersConfig, on_print: Callable[[bytes], None]) -> "GraderWorker":
        """on_print: told of all that its rewards print. The text may be the policy's, and steer a terminal."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-u",  # what was printed before a crash is known
            "-P",
            "-m",
            "ductile.tasks.keeper",
            str(os.getpid()),
            limits.model_dump_json(exclude={"env"}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env=clean_environment(os.environ, limits.env),
            start_new_session=True,  # Ctrl-C is the orchestrator's
        )
        return GraderWorker(process, on_print)

    def number(self) -> int:
        """The number of the next request."""
        self._next += 1
        return self._next

    async def ask(self, request: GraderRequest, timeout_s: float) -> GraderReply:
        """Raises WorkerLost when there is no reply in time, or never will be."""
        line = encode(request) + b"\n"
        try:
            async with asyncio.timeout(timeout_s):
                self._in.write(line)
                await self._in.drain()
                line = await self._out.readline()
        except TimeoutError:
            # One that waits for a process of its own that was killed: it is still there, and its keeper saw no death.
            killed = OOM_KILLS.tell("a process meanwhile")
            what = f"took longer than {timeout_s:g} s and was stopped{f' ({killed})' if killed else ''}"
            raise WorkerLost(what, "timeout") from None
        except ConnectionError:
            line = b""
        except ValueError:
            raise WorkerLost(f"replied with more than {MAX_LINE_BYTES >> 20} MiB") from None
        if not line:
            raise WorkerLost(f"ended its process ({await self._ending()})")
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            reply = decode_reply(line)
            if reply.number == request.number:
                return reply
        raise no_reply()

    async def kill(self) -> None:
        """Kill the process, with all that a reward has started."""
        for end, wait_s in ((LEAVE, LEAVE_TIMEOUT_S), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, end) if end == signal.SIGKILL else os.kill(self.pid, end)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._process.wait()
                    break
        self._in.close()
        await asyncio.wait([self._hearing], timeout=1.0)  # its last words
        self._hearing.cancel()

    async def _ending(self) -> str:
        try:
            async with asyncio.timeout(1):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its output"
        number = -code if code < 0 else code - 128  # a keeper tells of a signal as a shell does
        if number not in set(signal.Signals):
            return f"exit code {code}"
        is_limit = number == signal.SIGXCPU  # which `grader_process` sets
        cause = "more CPU time than all cores have until timeout_s" if is_limit else cause_of(number)
        return f"{signal.Signals(number).name}{f': {cause}' if cause else ''}"


async def _hear(stream: asyncio.StreamReader, on_print: Callable[[bytes], None]) -> None:
    while printed := await stream.read(1 << 16):
        on_print(printed)
