"""A grader's process, inside its keepers: one request and its reply a line (`ductile.tasks.grader_protocol`).

Requests travel on descriptors that user code does not know: what a reward prints goes to the run's log of graders, as
its standard error does, and it has nothing to read.
"""

import asyncio
import errno
import os
import queue
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from ductile.config.schema.orchestrator import TaskConfig
from ductile.error_text import error_with_place
from ductile.lifeline import SENT_TO_GROUPS
from ductile.roles import Task
from ductile.surrogates import mended
from ductile.tasks.build import build_task
from ductile.tasks.grader_protocol import (
    AskReply,
    AskReward,
    GraderReply,
    GraderRequest,
    GradingFailed,
    MakeTasks,
    Replied,
    Scored,
    TasksMade,
    decode_request,
    encode,
    sayable,
)
from ductile.tasks.jsonl import JsonlDataset
from ductile.tasks.task import TaskError, reply, score, signature_of

UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


def serve(notes: Sequence[str], has_network: bool) -> None:
    """Serve requests until standard input ends. notes: what could not be taken from rewards. has_network: whether
    rewards have one."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _outlast_signals_to_groups()
    grader = Grader(notes, has_network)
    for request in _requests(requests):
        replies.write(encode(grader.reply(request)) + b"\n")
        replies.flush()


class Grader:
    def __init__(self, notes: Sequence[str], has_network: bool) -> None:
        self._notes, self._has_network = notes, has_network
        self._tasks: dict[str, Task] = {}
        self._timeout_s = 0.0
        self._runner: asyncio.Runner | None = None

    def reply(self, request: GraderRequest) -> GraderReply:
        try:
            return self._execute(request)
        except TaskError as error:
            return GradingFailed(request.number, sayable(str(error)), "wrong")
        except BaseException as error:  # SystemExit too: a reward may call sys.exit
            hint = ""
            if _wanted_variable(error):
                hint = "; rewards see those environment variables that orchestrator.graders.env names, and a few others"
            elif not self._has_network and _wanted_network(error):
                hint = "; rewards have no network: orchestrator.graders.network = true gives them one"
            trace = "".join(traceback.format_exception(error))
            return GradingFailed(
                request.number, sayable(f"raised {error_with_place(error)}{hint}"), "raised", sayable(trace, 8000)
            )

    def _execute(self, request: GraderRequest) -> GraderReply:
        match request:
            case MakeTasks():
                return self._make(request)
            case AskReward():
                self._allow_cpu()
                task = self._tasks[request.task]
                reward, metrics = score(task, request.example, request.completion, self._run)
                return Scored(request.number, reward, {sayable(name): value for name, value in metrics.items()})
            case AskReply():
                self._allow_cpu()
                said = reply(self._tasks[request.task], request.example, request.messages)
                if said is not None:
                    said = [{"role": sayable(m["role"]), "content": mended(m["content"])} for m in said]
                return Replied(request.number, said)

    def _make(self, request: MakeTasks) -> TasksMade:
        adapter: TypeAdapter[Any] = TypeAdapter(TaskConfig)
        self._timeout_s = request.timeout_s
        for name, config in request.tasks.items():
            self._tasks[name] = build_task(adapter.validate_python(config))
        return TasksMade(
            request.number, list(self._notes), [n for n, task in self._tasks.items() if _wants_token_ids(task)]
        )

    def _run(self, value: Coroutine[Any, Any, Any]) -> Any:
        """Run `value` in the one event loop of all calls: a client that a reward keeps belongs to its loop."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(value)

    def _allow_cpu(self) -> None:
        """Allow as much CPU time as all cores could give this call before its deadline. Beyond it the kernel ends the
        process, should nothing else have stopped it."""
        used_s = time.process_time()
        allowed_s = int(used_s + (self._timeout_s + 1) * len(os.sched_getaffinity(0))) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        allowed_s = allowed_s if hard == resource.RLIM_INFINITY else min(allowed_s, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (allowed_s, hard))


def _wants_token_ids(task: Task) -> bool:
    return task.wants_token_ids if isinstance(task, JsonlDataset) else signature_of(task).wants_token_ids


def _wanted_network(error: BaseException) -> bool:
    return any(
        isinstance(each, socket.gaierror) or (isinstance(each, OSError) and each.errno in UNREACHABLE)
        for each in _causes(error)
    )


def _wanted_variable(error: BaseException) -> bool:
    """Return whether an environment variable is missing: `os.environ["X"]`, or an error of a library that says so."""
    return any(
        "environment variable" in str(each).lower()
        or (
            isinstance(each, KeyError)
            and any(frame.f_code is _READS for frame, _ in traceback.walk_tb(each.__traceback__))
        )
        for each in _causes(error)
    )


_READS = type(os.environ).__getitem__.__code__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _outlast_signals_to_groups() -> None:
    """A batch system sends SIGTERM to every process of a run, so that its step ends in order: rewards go on until the
    orchestrator has no more of them. What a reward starts is stopped by these signals as ever."""

    def restore() -> None:
        for each in SENT_TO_GROUPS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_GROUPS)

    for each in SENT_TO_GROUPS:
        signal.signal(each, lambda *_: None)  # a handler ends with exec, as an ignored signal would not
    os.register_at_fork(  # blocked meanwhile: a signal to a child that is just born must find it as it will be
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_GROUPS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_GROUPS),
        after_in_child=restore,
    )


def _requests(stream: BinaryIO) -> Iterator[GraderRequest]:
    """Read in a side thread: when the orchestrator goes away the process ends at once, also inside a hung reward.

    Rewards run in the main thread, as some of them set alarms.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield decode_request(lines.get())
