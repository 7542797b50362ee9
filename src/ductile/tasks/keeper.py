"""The small process that a grader lives under: it takes from rewards what they do not need, and leaves nothing of them.

    orchestrator > keeper > keeper inside > grader > whatever a reward starts

- Inside, there is no network, and no process is seen but the grader's own (namespaces, where the kernel permits them).
  When the keeper inside ends, the kernel kills all that are left there.
- Without namespaces both keepers adopt each process that loses its parent, and kill it when the grader ends.
- Each process of the chain ends with the one before it, whichever is killed and however.

Before the grader is born it imports nothing but the standard library, so that the two keepers stay small.
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ductile.lifeline import fork_tied, leave_signals_to_the_orchestrator, prctl, signal_on_parent_death

LEAVE = signal.SIGRTMIN
"""Signal that has a keeper kill everything and exit. Not SIGTERM or SIGUSR1, which batch systems send to every process
of a run that shall end in order: then rewards go on until the orchestrator has no more of them."""

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
GIB = 1 << 30


def main(parent: int, limits: Mapping[str, Any]) -> None:
    """limits: those of `ductile.config.schema.orchestrator.GradersConfig`."""
    notes: list[str] = []
    inside = _unshare(bool(limits["network"]), notes)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _limit(limits)
    signal_on_parent_death(parent, LEAVE)
    _keep(signal.SIGKILL if inside else LEAVE)
    if inside:
        _own_proc(notes)
    _keep(signal.SIGKILL, sweeps=not inside)
    from ductile.tasks.grader_process import serve

    serve(notes, has_network=bool(limits["network"]) or not inside)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare(network: bool, notes: list[str]) -> bool:
    """Namespaces of our own: by the rights that we have, or as the root of a user namespace, where the kernel lets any
    process be that. False where neither is permitted."""
    libc, uid, gid = _libc(), os.getuid(), os.getgid()
    wanted = CLONE_NEWNS | CLONE_NEWPID | (0 if network else CLONE_NEWNET)
    if libc.unshare(wanted):
        if libc.unshare(CLONE_NEWUSER | wanted):
            why = os.strerror(ctypes.get_errno())
            kept = "reach the network and see other processes" if not network else "see other processes"
            notes.append(f"Rewards can {kept}: this machine permits no namespaces ({why}).")
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # a server of one's own may be talked to
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP_RUNNING))
    return True


def _own_proc(notes: list[str]) -> None:
    """A /proc of our own processes, so that the environment and the memory of others are out of sight."""
    libc = _libc()
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None):
        notes.append(f"Rewards see other processes in /proc: {os.strerror(ctypes.get_errno())}.")


def _limit(limits: Mapping[str, Any]) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    if limits["max_memory_gib"] is not None:
        _lower(resource.RLIMIT_AS, int(limits["max_memory_gib"] * GIB))
    if limits["max_file_gib"] is not None:
        _lower(resource.RLIMIT_FSIZE, int(limits["max_file_gib"] * GIB))
    if limits["max_processes"] is not None:
        _lower(resource.RLIMIT_NPROC, _num_threads_of_user() + int(limits["max_processes"]))


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _num_threads_of_user() -> int:
    """The kernel counts them over the whole machine, so the limit stands above those that are there."""
    num_threads = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                num_threads += len(os.listdir(process / "task"))
        except OSError:
            continue  # it ended meanwhile
    return num_threads


def _keep(ends_by: signal.Signals, sweeps: bool = True) -> None:
    """Returns in a child, which `ends_by` takes when this process ends. This one stays behind: it ends with the child's
    exit code, or when told to LEAVE. Not `sweeps`: the kernel does that."""
    leave_signals_to_the_orchestrator()
    signal.signal(LEAVE, lambda *_: _leave(128 + LEAVE, sweeps))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = fork_tied(ends_by)
    if not child:
        signal.signal(LEAVE, signal.SIG_DFL)
        return
    while True:
        pid, status = os.wait()
        if pid == child:  # and not an orphan that was adopted
            code = os.waitstatus_to_exitcode(status)
            _leave(code if code >= 0 else 128 - code, sweeps)


def _leave(code: int, sweeps: bool) -> None:
    """Kill all that descends from this process. Who loses its parent by that becomes a child, and is found next."""
    while children := _children() if sweeps else []:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    os._exit(code)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
