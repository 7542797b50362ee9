"""Real processes for tests of what ranks do together.

    results = run_ranks(3, function, "an argument")    # function(groups, members, "an argument") on slots 0, 1, 2

They come from a forkserver that has imported torch (`tests.warm`), so that one costs about 20 ms and not four seconds,
and 400 ms less where it need not import hypothesis for the test's module. A rank's
return value travels back by pickle; its exception is raised here, with its traceback.
"""

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ductile.fabric import rendezvous

PRELOADED = [
    "torch",
    "numpy.ma",
    "pytest",
    "ductile.trainer.train_role",
    "ductile.scorer.score_role",
    "tests.tiny",
    "tests.nightly",
]
"""What ranks need in any test: a function that they run is found in its test's module, which imports pytest."""
DEADLINE_S = 120.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class RankFailed(AssertionError):
    pass


def start(function: Callable[..., Any], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """A process that runs `function(*arguments)` and sends `(ok, result or traceback)`."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_main, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `function(*arguments)` in a process of its own."""
    process, connection = start(function, *arguments)
    try:
        return result_of(connection, function.__name__)
    finally:
        stop(process)


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    slots: Sequence[int] = (),
    timeout_s: float = 90.0,
    mourned: Sequence[int] = (),
) -> list[Any]:
    """Call `function(groups, members, *arguments)` on `num_ranks` slots at once; their results, in rank order.

    Slots in `mourned` are expected to die; their result is None.
    """
    store = rendezvous.host_store()
    address = f"{rendezvous.LOOPBACK}:{store.port}"
    members = tuple(slots) or tuple(range(num_ranks))
    started = [start(_in_groups, function, slot, members, address, timeout_s, arguments) for slot in members]
    try:
        return [
            None if slot in mourned else result_of(connection, f"slot {slot}")
            for slot, (_, connection) in zip(members, started, strict=True)
        ]
    finally:
        stop(*(process for process, _ in started))


def stop(*processes: BaseProcess) -> None:
    for process in processes:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def result_of(connection: Connection, who: str) -> Any:
    if not wait([connection], DEADLINE_S):
        raise RankFailed(f"{who} did not reply within {DEADLINE_S} s")
    try:
        ok, result = pickle.loads(connection.recv_bytes())  # noqa: S301 (our own child)
    except EOFError:
        raise RankFailed(f"{who} died") from None
    if not ok:
        raise RankFailed(f"{who} failed:\n{result}")
    return result


def _main(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import torch

    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # collectives are several times faster on few cores
    torch.set_num_threads(1)
    gc.freeze()  # as the product's process server does: collections need not look at what was imported
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    with suppress(BrokenPipeError):
        connection.send_bytes(pickle.dumps(answer))  # the plain one: multiprocessing's would share tensors, and we end


def _in_groups(
    function: Callable[..., Any],
    slot: int,
    members: tuple[int, ...],
    address: str,
    timeout_s: float,
    arguments: Sequence[Any],
) -> Any:
    from ductile.fabric.groups import Groups

    groups = Groups(slot, 0, "cpu", rendezvous.connect(address, timeout_s), timeout_s)
    try:
        return function(groups, members, *arguments)
    finally:
        groups.destroy()
