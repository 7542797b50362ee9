"""The process server: imports the heavy modules once, forks a process on request, and buries it when it ends.

Runs as `python -P -m ductile.slot.forkserver CONTROL_FD PARENT_PID SOCKETS MODULE...` (-P: nothing is imported from
the current folder). Forked processes are ready in milliseconds and share the imported pages. The server itself never
touches CUDA and never starts a thread: a fork would inherit half of either. The forkserver of `multiprocessing` leaves
its children behind when it ends, and knows no cgroups. On the control socket this one speaks JSON, a line each:

    in    {"start": "slot-0", "entry": "package.module:function", "arguments": {...}, "log": path, "cgroup": path | ""}
    out   {"ready": true}                          once, after the imports; or {"failed": sentence}
          {"started": "slot-0", "pid": 123}        or {"not_started": "slot-0", "why": ...}
          {"said": "slot-0", "text": ...}          what `function(arguments, say)` passed to `say`
          {"exited": "slot-0", "code": -9, "cpu_s": 7.5}      code as in subprocess: negative is a signal's number

No process is left behind, whichever dies:

- The parent ends: the server wakes (SIGCONT, should it be stopped), kills its children, removes their cgroups and the
  folder of the run's sockets, leaves.
- The server ends: the kernel kills its children (`fork_tied`).
"""

import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ductile.error_text import error_text
from ductile.lifeline import fork_tied, leave_signals_to_the_orchestrator, signal_on_parent_death
from ductile.surrogates import ESCAPED
from ductile.transport.sockets import remove_folder

Say = Callable[[str], None]
EntryPoint = Callable[[dict[str, Any], Say], None]


@dataclass(frozen=True, slots=True)
class _Child:
    name: str
    pid: int
    pidfd: int
    said_fd: int
    """The server's end of the pipe behind the child's `say`."""
    cgroup: str


class ForkServer:
    def __init__(self, control: socket.socket, parent: int, sockets: str) -> None:
        self._control, self._sockets = control, sockets
        self._selector = selectors.DefaultSelector()
        self._received = b""
        self._parent_fd = os.pidfd_open(parent)
        self._children: dict[int, _Child] = {}
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._parent_fd, selectors.EVENT_READ, self._leave)

    def serve(self) -> None:
        """Serve until the parent closes the control socket or ends; either ends the wait."""
        self._send({"ready": True})
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _on_control(self) -> None:
        try:
            received = self._control.recv(65536)
        except ConnectionResetError:
            received = b""
        if not received:
            self._leave()
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            self._start(json.loads(line))

    def _start(self, request: dict[str, Any]) -> None:
        try:
            self._fork(request)
        except OSError as error:  # no handle, process or memory to spare: the others go on
            self._send({"not_started": request["start"], "why": error_text(error)})

    def _fork(self, request: dict[str, Any]) -> None:
        said_fd, say_fd = os.pipe2(os.O_CLOEXEC)
        sys.stdout.flush()
        try:
            pid = fork_tied(signal.SIGKILL)
        except OSError:
            os.close(said_fd)
            os.close(say_fd)
            raise
        if pid == 0:
            self._forget()
            os.close(said_fd)
            _live(request, say_fd)
        os.close(say_fd)
        os.set_blocking(said_fd, False)
        child = _Child(request["start"], pid, os.pidfd_open(pid), said_fd, request["cgroup"])
        self._children[pid] = child
        self._selector.register(child.said_fd, selectors.EVENT_READ, lambda: self._on_said(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._bury(child))
        self._send({"started": child.name, "pid": pid})

    def _on_said(self, child: _Child) -> None:
        if child.pid not in self._children:
            return  # buried a moment ago, in the same round of the selector
        if not self._relay(child):
            self._selector.unregister(child.said_fd)

    def _relay(self, child: _Child) -> bool:
        """Pass on what the child said; False when it will say no more."""
        try:
            text = os.read(child.said_fd, 65536)
        except BlockingIOError:
            return True
        for line in text.decode(errors="replace").splitlines():
            self._send({"said": child.name, "text": line})
        return bool(text)

    def _bury(self, child: _Child) -> None:
        self._relay(child)  # its last words
        _, status, used = os.wait4(child.pid, 0)
        del self._children[child.pid]
        with suppress(KeyError):
            self._selector.unregister(child.said_fd)
        self._selector.unregister(child.pidfd)
        os.close(child.said_fd)
        os.close(child.pidfd)
        _remove_cgroup(child.cgroup)
        cpu_s = used.ru_utime + used.ru_stime
        self._send({"exited": child.name, "code": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s})

    def _leave(self) -> None:
        for child in self._children.values():
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in self._children.values():
            os.waitpid(child.pid, 0)
            _remove_cgroup(child.cgroup)
        if self._sockets:
            remove_folder(Path(self._sockets))
        os._exit(0)

    def _forget(self) -> None:
        """Close, in a fork, what is the server's, or its death would not show at the other ends."""
        self._selector.close()
        self._control.close()
        os.close(self._parent_fd)
        for child in self._children.values():
            os.close(child.said_fd)
            os.close(child.pidfd)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._leave()


def _live(request: dict[str, Any], say_fd: int) -> None:
    """The child's whole life; never returns."""
    code = 1
    try:
        if request["cgroup"]:
            with open(os.path.join(request["cgroup"], "cgroup.procs"), "w") as procs:
                procs.write("0")  # "0" is the writer itself
        if request["log"]:
            log_fd = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            os.close(log_fd)
        faulthandler.enable(2)  # the log has the line at which it broke
        module, _, function = request["entry"].partition(":")
        entry: EntryPoint = importlib.import_module(module).__dict__[function]
        entry(request["arguments"], lambda text: _say(say_fd, text))
        code = 0
    except BaseException as error:
        _say(say_fd, error_text(error))
        with suppress(OSError):  # the log may be on a disk that is full
            traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # No interpreter shutdown: destructors of process groups and engines may wait for peers that are gone.
        os._exit(code)


def _say(say_fd: int, text: str) -> None:
    os.write(say_fd, text.replace("\n", " ").encode()[:4000] + b"\n")


def _remove_cgroup(path: str) -> None:
    if path:
        with suppress(OSError):  # the next run sweeps what is still busy (`ductile.cluster.cpu_cap`)
            os.rmdir(path)


def main(arguments: list[str]) -> None:
    control_fd, parent, sockets, *modules = arguments
    # At the parent's end; were the server to be killed instead, no process could remove the cgroups.
    signal_on_parent_death(int(parent), signal.SIGCONT)
    leave_signals_to_the_orchestrator()  # so do all that it forks
    sys.stdout.reconfigure(line_buffering=True, errors=ESCAPED)  # pyright: ignore[reportAttributeAccessIssue]
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        traceback.print_exc()
        control.sendall(json.dumps({"failed": f"importing {module} failed: {error_text(error)}"}).encode() + b"\n")
        os._exit(1)
    gc.collect()
    gc.freeze()  # collections in the children do not touch, and so do not copy, the shared pages
    ForkServer(control, int(parent), sockets).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
