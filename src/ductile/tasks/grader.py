"""Rewards are other people's code: they hang, crash, print and call `os._exit`. So they run in processes of their own.

`Graders` keeps `num_workers` plain-Python processes (`ductile.tasks.grader_process`), each with its own copy of the
tasks. A call goes to a free one and has a deadline. A worker that misses it, or dies, is killed and replaced; its
request has no reward but an error, and nobody else notices. Every call returns exactly once.

Ends: a worker exits when its standard input closes, and the kernel kills it when the orchestrator dies.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ductile.tasks.task import TaskError

START_TIMEOUT_S = 120.0  # importing a reward's libraries on a busy machine
MAX_LINE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one call. With an `error` (a sentence), there is no reward."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment says next; `messages` is None when it has nothing more to say."""

    messages: list[dict[str, str]] | None = None
    error: str | None = None


class Graders:
    """`async with Graders({"train": config}) as graders: await graders.reward("train", 17, "42")`."""

    def __init__(
        self,
        tasks: Mapping[str, Mapping[str, Any]],
        num_workers: int = 1,
        timeout_s: float = 30.0,
        on_error: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """tasks: by the name that calls use, each a dumped task config (`ductile.config.orchestrator.TaskConfig`).
        on_error: told in a sentence of every reward that failed."""
        self._tasks = {name: dict(config) for name, config in tasks.items()}
        self._num_workers, self._timeout_s, self._on_error = num_workers, timeout_s, on_error
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self.num_errors = 0

    async def __aenter__(self) -> "Graders":
        """Raises TaskError when a task cannot be made in a worker."""
        try:
            started = await asyncio.gather(*(self._start() for _ in range(self._num_workers)), return_exceptions=True)
            for worker in started:
                if isinstance(worker, BaseException):
                    raise worker
                self._free.put_nowait(worker)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(worker.kill() for worker in list(self._workers)))
        self._workers.clear()

    async def reward(self, task: str, example: int, answer: str) -> Verdict:
        answer_or_error = await self._ask({"do": "reward", "task": task, "example": example, "answer": answer})
        if isinstance(answer_or_error, str):
            return Verdict(error=answer_or_error)
        return Verdict(answer_or_error["reward"], answer_or_error["metrics"])

    async def reply(self, task: str, example: int, messages: list[dict[str, str]]) -> Reply:
        answer_or_error = await self._ask({"do": "reply", "task": task, "example": example, "messages": messages})
        return Reply(error=answer_or_error) if isinstance(answer_or_error, str) else Reply(answer_or_error["messages"])

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any] | str:
        """The worker's answer, or a sentence on what went wrong."""
        worker = await self._free.get()
        try:
            worker = worker or await self._start()  # None: the one before died; its replacement starts when needed
            answer = await worker.ask(request, self._timeout_s)
            worker_stays = worker
        except BaseException as error:
            # A cancelled call leaves an unread answer in the pipe: that worker cannot be used again either.
            worker_stays = None
            if worker is not None:
                self._workers.discard(worker)
                await asyncio.shield(worker.kill())
            if not isinstance(error, _WorkerLost):
                raise
            answer = {"error": str(error)}
        finally:
            self._free.put_nowait(worker_stays)
        if "error" not in answer:
            return answer
        what = "reward" if request["do"] == "reward" else "reply"
        sentence = f"the {what} of {request['task']} example {request['example']} {answer['error']}"
        self.num_errors += 1
        self._on_error(sentence)
        return sentence

    async def _start(self) -> "_Worker":
        worker = await _Worker.start()
        self._workers.add(worker)
        try:
            answer = await worker.ask({"do": "tasks", "tasks": self._tasks}, START_TIMEOUT_S)
            if "error" in answer:
                raise TaskError(answer["error"])
        except BaseException as error:  # cancelled, too: nobody else knows of this worker
            self._workers.discard(worker)
            await asyncio.shield(worker.kill())
            if isinstance(error, _WorkerLost):
                raise TaskError(f"a grader process {error} while it made its tasks") from None
            raise
        return worker


class _WorkerLost(Exception):
    """The text goes on after "the reward of ..."."""


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout

    @staticmethod
    async def start() -> "_Worker":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing is imported from the current folder
            "-m",
            "ductile.tasks.grader_process",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is the orchestrator's; and what a reward starts is killed with its group
        )
        return _Worker(process)

    async def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises _WorkerLost when there is no answer in time, or never will be."""
        try:
            async with asyncio.timeout(timeout_s):
                self._in.write(json.dumps(request).encode() + b"\n")
                await self._in.drain()
                line = await self._out.readline()
        except TimeoutError:
            raise _WorkerLost(f"took longer than {timeout_s:g} s and was stopped") from None
        except ConnectionError:
            line = b""
        if not line:
            raise _WorkerLost(f"ended its process ({await self._ending()})")
        try:
            return json.loads(line)
        except ValueError:
            raise _WorkerLost("wrote something else than its answer into the grader's pipe") from None

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._in.close()
        async with asyncio.timeout(10):  # SIGKILL leaves nothing to wait for but the kernel
            await self._process.wait()

    async def _ending(self) -> str:
        try:
            async with asyncio.timeout(1):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its output"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
