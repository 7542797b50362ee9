"""A process of a node of `tests.cluster.namespaces`: `python -m tests.cluster.on_node NAME PID MODULE ...`.

NAME is the node's network namespace. With PID 0 a machine begins: process, mount and host name namespaces of its own, a
/proc and a /dev/shm of its own, and MODULE as its first process, whose end is the end of all others. Otherwise MODULE
runs on the machine whose first process is PID. Signals go on to MODULE, and its exit code is ours.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from ductile.lifeline import fork_tied
from tests.warm import Command, run

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT)
STACKS_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)


def main(name: str, first_pid: int, words: list[str]) -> None:
    if first_pid:
        for kind, flag in (("net", CLONE_NEWNET), ("uts", CLONE_NEWUTS), ("pid", CLONE_NEWPID), ("mnt", CLONE_NEWNS)):
            _enter(Path(f"/proc/{first_pid}/ns/{kind}"), flag)
    else:
        _enter(Path("/run/netns") / name, CLONE_NEWNET)
        _checked("unshare", _libc.unshare(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS))
    child = fork_tied(signal.SIGKILL)
    if child:
        raise SystemExit(_code_of(child))
    if not first_pid:
        _furnish(name)
    sys.argv = ["-m", *words[1:]]
    run(Command(["-m", *words], {}, "", (), False))


def _furnish(name: str) -> None:
    """Give the machine its name and what shows its own processes and memory."""
    _checked("sethostname", _libc.sethostname(name.encode(), len(name)))
    _checked("mount", _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    for kind, target in ((b"proc", b"/proc"), (b"tmpfs", b"/dev/shm")):
        _checked("mount", _libc.mount(kind, target, kind, 0, None))


def _code_of(child: int) -> int:
    def pass_on(signum: int, _: object) -> None:
        os.kill(child, signum)
        if signum == signal.SIGABRT:  # which a first process can write its stacks at, and does not end of
            time.sleep(STACKS_S)
            os.kill(child, signal.SIGKILL)

    for signum in PASSED_ON:
        signal.signal(signum, pass_on)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _enter(namespace: Path, kind: int) -> None:
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(f"setns to {namespace}", _libc.setns(fd, kind))
    finally:
        os.close(fd)


def _checked(what: str, result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
