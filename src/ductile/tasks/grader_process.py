"""A grader's process: reads one JSON request a line, writes one JSON answer a line.

Requests: `{"do": "tasks", "tasks": {name: config}}` first, then `reward` and `reply`. They travel on
descriptors that user code does not know: what a reward prints goes to standard error, and it has nothing to read.
"""

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from ductile.config.orchestrator import TaskConfig
from ductile.roles import Task
from ductile.tasks.build import build_task
from ductile.tasks.task import TaskError, reply, score


def main(parent: int) -> None:
    _die_with(parent)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    tasks: dict[str, Task] = {}
    for request in _requests(requests):
        try:
            answer = _execute(request, tasks)
        except TaskError as error:
            answer = {"error": str(error)}
        except BaseException as error:  # SystemExit too: a reward may call sys.exit
            answer = {"error": f"raised {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _execute(request: dict[str, Any], tasks: dict[str, Task]) -> dict[str, Any]:
    if request["do"] == "tasks":
        adapter: TypeAdapter[Any] = TypeAdapter(TaskConfig)
        tasks.update({name: build_task(adapter.validate_python(config)) for name, config in request["tasks"].items()})
        return {}
    task = tasks[request["task"]]
    if request["do"] == "reward":
        try:
            reward, metrics = score(task, request["example"], request["answer"])
        except TaskError as error:
            return {"error": f"is of no use: {error}"}
        return {"reward": reward, "metrics": metrics}
    try:
        return {"messages": reply(task, request["example"], request["messages"])}
    except TaskError as error:
        return {"error": f"is of no use: {error}"}


def _requests(stream: BinaryIO):
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
        yield json.loads(lines.get())


def _die_with(parent: int) -> None:
    """On Linux the kernel kills this process when its parent dies, even while it is stuck in C code."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
