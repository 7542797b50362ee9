"""Rewards are other people's code: they hang, crash, print and call `os._exit`. So they run in processes of their own.

`Graders` keeps up to `num_workers` plain-Python processes (`ductile.tasks.keeper`), each with its own copy of the
tasks, and starts them as they are needed. A call goes to a free one and has a deadline. A worker that misses it, or
dies, is killed and replaced; its request has no reward but an error, and other calls do not notice. Every call returns
exactly once. A cancelled call has a moment to end by itself: a new worker would take longer to start.

Ends: a worker exits when its standard input closes, and the kernel kills it when the orchestrator dies; so do the
processes that a reward has started.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ductile.config.schema.orchestrator import GradersConfig
from ductile.host import shortage
from ductile.records import Completion, RewardFailure
from ductile.surrogates import mended
from ductile.tasks.grader_log import appender
from ductile.tasks.grader_protocol import (
    AskReply,
    AskReward,
    GraderRequest,
    GradingFailed,
    MakeTasks,
    Replied,
    Scored,
    TasksMade,
)
from ductile.tasks.grader_worker import GraderWorker, WorkerLost, no_reply
from ductile.tasks.task import TaskError

START_TIMEOUT_S = 120.0  # importing a reward's libraries on a busy machine
ABANDONED_TIMEOUT_S = 2.0
"""Seconds that a cancelled call has to end by itself; most rewards take less than a new process would."""
MAX_FAILED_STARTS = 3
"""Starts that may fail in a row, with no worker left, before a call raises TaskError."""
MAX_WORKERS = 8
"""Largest number of workers where the config does not give one."""

A = TypeVar("A", Scored, Replied)


@dataclass(frozen=True, slots=True)
class Graded:
    """What came of one call. With an `error` (a sentence) and its kind, there is no reward."""

    reward: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """What the reward reports besides, as in `Rollout.metrics`."""
    error: str | None = None
    failure: RewardFailure | None = None


@dataclass(frozen=True, slots=True)
class TaskReply:
    """What the environment says next; `messages` is None when it has nothing more to say."""

    messages: list[dict[str, str]] | None = None
    error: str | None = None
    failure: RewardFailure | None = None


class Graders:
    """`async with Graders({"train": config}) as graders: await graders.reward("train", 17, Completion("42"))`."""

    def __init__(
        self,
        tasks: Mapping[str, Mapping[str, Any]],
        config: GradersConfig = GradersConfig(),  # noqa: B008 (frozen)
        on_error: Callable[[str, str], None] = lambda sentence, traceback: None,
        on_note: Callable[[str], None] = lambda sentence: None,
        log: Path | None = None,
    ) -> None:
        """tasks: by the name that calls use, each a dumped task config
        (`ductile.config.schema.orchestrator.TaskConfig`). on_error: told of every reward that failed, in a sentence and
        with its traceback. on_note: told once what rewards could not be kept from. log: a file for what rewards print,
        which goes nowhere without one."""
        self._tasks = {name: dict(task) for name, task in tasks.items()}
        self._num_workers = config.num_workers or default_num_workers()
        self._config, self._on_error, self._on_note = config, on_error, on_note
        self._log, self._on_print = log, appender(log) if log else lambda printed: None
        self._want_token_ids: frozenset[str] = frozenset()
        self._free: asyncio.LifoQueue[GraderWorker | None] = asyncio.LifoQueue()
        """Workers that are free. None: one that is not started yet, or has died. A worker that runs is taken first."""
        self._workers: set[GraderWorker] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._noted = False
        self._num_failed_starts = 0
        self.num_errors = 0

    async def __aenter__(self) -> "Graders":
        """Raises TaskError when a task cannot be made in a worker."""
        try:
            first = await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        for worker in (*[None] * (self._num_workers - 1), first):
            self._free.put_nowait(worker)
        return self

    async def __aexit__(self, *_: object) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in list(self._workers)))
        self._workers.clear()

    def counts(self) -> dict[str, float]:
        """Metrics of the run so far."""
        return {"reward_errors": float(self.num_errors)}

    async def reward(self, task: str, example: int, completion: Completion) -> Graded:
        token_ids = tuple(completion.token_ids) if task in self._want_token_ids else ()
        completion = replace(completion, text=mended(completion.text), token_ids=token_ids)
        scored = await self._ask(Scored, lambda number: AskReward(number, task, example, completion))
        if isinstance(scored, GradingFailed):
            return Graded(error=scored.error, failure=scored.failure)
        return Graded(scored.reward, scored.metrics)

    async def reply(self, task: str, example: int, messages: list[dict[str, str]]) -> TaskReply:
        messages = [{**message, "content": mended(message["content"])} for message in messages]
        replied = await self._ask(Replied, lambda number: AskReply(number, task, example, messages))
        if isinstance(replied, GradingFailed):
            return TaskReply(error=replied.error, failure=replied.failure)
        return TaskReply(replied.messages)

    async def _ask(self, wanted: type[A], request: Callable[[int], AskReward | AskReply]) -> A | GradingFailed:
        """The reply, or the failure with a whole sentence as its error."""
        worker = await self._free.get()
        call = asyncio.create_task(self._call(worker, wanted, request))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(ABANDONED_TIMEOUT_S, call.cancel)
            raise
        if not isinstance(reply, GradingFailed):
            return reply
        asked = request(0)
        what = "reward" if isinstance(asked, AskReward) else "reply"
        of = f"{asked.task} example" if len(self._tasks) > 1 else "example"
        sentence = f"the {what} of {of} {asked.example} {reply.error}"
        self.num_errors += 1
        self._on_error(sentence, reply.traceback)
        return GradingFailed(reply.number, sentence, reply.failure)

    async def _call(
        self, worker: GraderWorker | None, wanted: type[A], request: Callable[[int], GraderRequest]
    ) -> A | GradingFailed:
        """Ends by itself when its caller is cancelled, too: the worker is free again, or lost."""
        try:
            worker = worker or await self._replacement()
            reply = await worker.ask(request(worker.number()), self._config.timeout_s)
            if isinstance(reply, wanted | GradingFailed):
                return reply
            raise no_reply()
        except BaseException as error:
            if worker is not None:
                self._workers.discard(worker)
                await asyncio.shield(worker.kill())
                worker = None
            if not isinstance(error, WorkerLost):
                raise
            return GradingFailed(0, str(error), error.failure)
        finally:
            self._free.put_nowait(worker)

    async def _replacement(self) -> GraderWorker:
        """Start a worker for one that was lost, or was not needed before. A failure costs this call its reply only.

        Raises TaskError when no worker is left and none can be started, time after time.
        """
        try:
            worker = await self._start()
        except (TaskError, OSError) as error:  # OSError: the machine has no process to spare, or no handle
            self._num_failed_starts += 1
            sentence = f"found no grader process: {error}{shortage(error)}"
            if not self._workers and self._num_failed_starts >= MAX_FAILED_STARTS:
                raise TaskError(f"{sentence}; so did the {MAX_FAILED_STARTS - 1} before it") from error
            raise WorkerLost(sentence) from error
        self._num_failed_starts = 0
        return worker

    async def _start(self) -> GraderWorker:
        worker = await GraderWorker.start(self._config, self._on_print)
        self._workers.add(worker)
        try:
            reply = await worker.ask(MakeTasks(worker.number(), self._tasks, self._config.timeout_s), START_TIMEOUT_S)
            if not isinstance(reply, TasksMade):
                raise TaskError(
                    reply.error if isinstance(reply, GradingFailed) else f"a grader process replied {reply}"
                )
        except BaseException as error:  # cancelled, too: nothing else knows of this worker
            self._workers.discard(worker)
            await asyncio.shield(worker.kill())
            if isinstance(error, WorkerLost):
                see = f"; see {self._log}" if self._log else ""
                raise TaskError(f"a grader process {error} while it made its tasks{see}") from None
            raise
        self._want_token_ids = frozenset(reply.want_token_ids)
        for note in () if self._noted else reply.notes:
            self._on_note(note)
        self._noted = True
        return worker


def default_num_workers() -> int:
    """Half of the cores that this process may use: the other half belongs to the slots."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))
