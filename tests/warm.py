"""Python processes that have imported torch and ductile before they begin: one costs 30 ms in place of four seconds.

`Popen` takes the place of `subprocess.Popen` in the tests' process (`tests/conftest.py`). A command that begins with
`python -m` and one of `WARM` is not executed: this process's *template*, which has imported what these modules need,
forks, and the fork becomes that command, with its own arguments, environment, descriptors and current folder. It is a
child of the caller as any other: the template forks twice, and the caller adopts the orphan. A process that began warm
and starts another one forks itself. All else is executed.

What a cold start shows (the interpreter, the imports, the entry point) a test sees inside `with cold():`.
"""

import asyncio
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy

from ductile.cluster.node import ONE_THREAD
from ductile.lifeline import prctl

WARM = frozenset(
    {
        "ductile",
        "ductile.generator.server.serve",
        "ductile.slot.forkserver",
        "tests.cluster.on_node",
        "tests.cluster.orchestrate",
        "tests.end_to_end.hasty",
        "tests.end_to_end.watched",
        "tests.fleet.live.faulty_server",
        "tests.generator.faulty_server",
        "tests.warm_echo",
        "tests.weights.member",
    }
)
"""Modules that are not executed anew. Graders are: their limits and namespaces are of a small process."""

IMPORTED = (
    "ductile.cli",
    "ductile.cluster.agent",
    "ductile.cluster.join",
    "ductile.cluster.joined",
    "ductile.generator.generate_role",
    "ductile.generator.server.server",
    "ductile.orchestrator.commands.bench",
    "ductile.orchestrator.commands.compose",
    "ductile.orchestrator.commands.rollout_only",
    "ductile.orchestrator.commands.run",
    "ductile.orchestrator.commands.serving",
    "ductile.orchestrator.commands.sft",
    "ductile.scorer.score_role",
    "ductile.slot.store",
    "ductile.slot.worker",
    "ductile.trainer.train_role",
    "ductile.weights.sender",
    "tests.slot.echo",
    "tests.tiny",
    "numpy.ma",
    "pytest",
    "tests.nightly",
    "torch.distributed.tensor.debug",
    "torch.nn.attention.bias",
    "torch.optim.adamw",
)

START_S = 200.0
"""Deadline of the template's imports, and of a fork."""
ROOM = 16384
"""Bytes that the template keeps for the command line and the environment of what it becomes."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a fork becomes."""

    words: Sequence[str]
    """As `sys.orig_argv`, without the interpreter: `("-P", "-m", "ductile", ...)`."""
    environment: dict[str, str]
    folder: str
    targets: Sequence[int]
    """Descriptors that it begins with, by the numbers that they have there."""
    new_session: bool


class Popen(subprocess.Popen):
    """`subprocess.Popen` for which some commands need not be executed."""

    def _execute_child(self, *values: Any) -> None:
        """Called by the constructor; torch's and Python's own callers know no other way in."""
        asked = _SIGNATURE.bind(self, *values).arguments
        words = _warm_words(asked)
        if not words or not _enabled:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        given = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
        fds = {target: target if fd == -1 else fd for target, fd in given.items()} | {
            fd: fd for fd in asked["pass_fds"]
        }
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        folder = os.fspath(asked["cwd"] or os.getcwd())
        command = Command(words, environment, folder, tuple(fds), asked["start_new_session"])
        self.pid = _fork_self(command, fds) if _template is None else _template.fork(command, fds)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]


_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_STRANGE = {name: None for name in ("executable", "preexec_fn", "gid", "gids", "uid")} | {
    "shell": False,
    "umask": -1,
    "process_group": -1,
}
"""Arguments of Popen that a fork cannot have, and what they are where they are not given."""


def _warm_words(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The command without the interpreter, if a fork can become it; else nothing."""
    if isinstance(asked["args"], str | bytes | os.PathLike):
        return ()
    if any(asked[name] != usual for name, usual in _STRANGE.items()) or _of_python(asked["env"]) != _of_python(None):
        return ()
    interpreter, *words = map(os.fspath, asked["args"])
    at = 1 if words[:1] == ["-P"] else 0
    is_warm = interpreter == sys.executable and words[at : at + 1] == ["-m"] and words[at + 1] in WARM
    return tuple(words) if is_warm else ()


def _of_python(environment: Mapping[str, str] | None) -> dict[str, str]:
    """What the interpreter reads as it starts. `become` sees to `PYTHONFAULTHANDLER`."""
    given = os.environ if environment is None else environment
    return {name: text for name, text in given.items() if name.startswith("PYTHON") and name != "PYTHONFAULTHANDLER"}


@contextmanager
def cold() -> Iterator[None]:
    """Commands are executed within the block, and so is all that they start."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def spawnv_passfds(path: bytes, words: Sequence[Any], fds: Sequence[int]) -> int:
    """Like `multiprocessing.util.spawnv_passfds`, in whose place it is: but the forkserver that ranks come from
    (`tests.ranks`) is a fork of the template, too."""
    *_, code = map(os.fsdecode, words)
    if "multiprocessing.forkserver" not in code or not _enabled or _template is None:
        return SPAWNED(path, words, fds)
    command = Command(("-m", "tests.rank_server", code), dict(os.environ), os.getcwd(), (0, 1, 2, *fds), False)
    return _template.fork(command, {fd: fd for fd in command.targets})


class Template:
    """The tests' end of a process that forks on request. It starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, command: Command, fds: Mapping[int, int]) -> int:
        """Have a child that becomes the command; its pid. fds: ours, by the number that each has there."""
        with self._lock:
            control = self._control or self._start()
            request = json.dumps({**asdict(command), "parent": os.getpid()}).encode()
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(control, [request], list(fds.values()))
                reply = control.recv(64)
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not reply:
            raise RuntimeError("the template of warm processes is gone")
        return int(reply)

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_S)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._control.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        with theirs:
            self._process = EXECUTED(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno()), "-" * ROOM],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[1],
                env={**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false"},
            )
        assert self._control.recv(64) == b"ready"
        return self._control


EXECUTED, SPAWNED, _execv = subprocess.Popen, multiprocessing.util.spawnv_passfds, os.execv
"""As they are without this module."""
_enabled = True
_template: Template | None = Template()
"""None in a process that is itself warm."""


def serve(control: socket.socket) -> tuple[Command, dict[int, int]]:
    """Fork until the tests are gone. Returns in each fork, with what it is to become and its descriptors."""
    control.send(b"ready")
    while True:
        request, received, _, _ = socket.recv_fds(control, 1 << 20, 64)
        if not request:
            os._exit(0)
        values = json.loads(request)
        parent = values.pop("parent")
        command = Command(**values)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                os.sched_yield()
            if os.getppid() != parent:
                os._exit(1)
            control.send(str(os.getpid()).encode())
            return command, dict(zip(command.targets, received, strict=True))
        os.waitpid(between, 0)
        for fd in received:
            os.close(fd)


def _fork_self(command: Command, fds: Mapping[int, int]) -> int:
    """A child of this warm process that becomes the command, beside what it was in the middle of; its pid."""
    pid = os.fork()
    if pid:
        return pid
    _begin(command, fds)


def _begin(command: Command, fds: Mapping[int, int]) -> NoReturn:
    """Become the command in the middle of something else, and end with it."""
    code = 1
    try:
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(None)
        become(command, fds)
        run(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _leave(code)


def _exec(path: str, words: Sequence[str]) -> None:
    """What `os.execv` is in a warm process."""
    command = _warm_words({**_STRANGE, "args": words, "env": None})
    if not command or path != sys.executable:
        _execv(path, words)
    numbers = (int(name) for name in os.listdir("/proc/self/fd"))
    kept = {fd: fd for fd in numbers if fd < 3 or _is_inheritable(fd)}
    _begin(Command(command, dict(os.environ), os.getcwd(), tuple(kept), False), kept)


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the one of the listing itself
        return False


def _leave(code: int) -> NoReturn:
    """End as the interpreter does, but for what the process was before."""
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def become(command: Command, fds: Mapping[int, int]) -> None:
    """Take on the command's descriptors, folder, environment and arguments, and nothing else of what was there."""
    if command.new_session:
        os.setsid()
    high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, 900) for target, fd in fds.items()}
    os.closerange(3, 900)
    for target, fd in high.items():
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    os.closerange(900, 4096)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    tempfile.tempdir = None  # what the template's imports asked for is not where TMPDIR points now
    _write_down(command)
    for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    numpy.random.seed()  # Python's own generator sees to that after a fork
    for name, fd, mode, errors in (
        ("stdin", 0, "r", "strict"),
        ("stdout", 1, "w", "strict"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        stream = open(fd, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        if mode == "w":
            stream.reconfigure(line_buffering=fd == 2 or stream.isatty())
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if command.environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    at = command.words.index("-m")
    sys.argv = ["-m", *command.words[at + 2 :]]
    if "-P" not in command.words:
        sys.path[:0] = [command.folder]


def _write_down(command: Command) -> None:
    """Show what it is in /proc, where tests look for processes: over the template's own command line and environment,
    in the memory that the kernel has given them. What does not fit is left out; variables of ours come first."""
    variables = sorted(command.environment.items(), key=lambda item: not item[0].startswith("DUCTILE"))
    words = [sys.executable, *command.words]
    for start, end, texts in zip(*_places(), (words, [f"{name}={value}" for name, value in variables]), strict=True):
        room, written = end - start, b""
        for text in texts:
            if len(written) + len(text.encode()) + 1 < room:
                written += text.encode() + b"\0"
        ctypes.memmove(start, written.ljust(room, b"\0"), room)


def _places() -> tuple[tuple[int, int], tuple[int, int]]:
    """Addresses where the command line and the environment begin, and where they end."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, environment = fields[45:47], fields[47:49]
    return (int(arguments[0]), int(environment[0])), (int(arguments[1]), int(environment[1]))


def run(command: Command) -> None:
    """Run the command's module as `python -m` does."""
    module = command.words[command.words.index("-m") + 1]
    sys.modules.pop(module if module != "ductile" else "ductile.__main__", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(control_fd: str) -> None:
    global _template
    subprocess.Popen, os.execv, _template = Popen, _exec, None
    control = socket.socket(fileno=int(control_fd))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    command, fds = serve(control)
    control.detach()
    become(command, fds)
    run(command)


if __name__ == "__main__":
    main(sys.argv[1])
