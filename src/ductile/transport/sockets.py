"""The folder of a run's sockets on this machine. Only its owner can enter it, so no other user can reach them.

A TCP port on loopback is open to every user of the machine, and ZeroMQ reads whole messages before the program can look
whether they carry the run's token. Where a run has several nodes all slots come by TCP, encrypted
(`ductile.transport.curve`). An address says which it is.
"""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
"""Address that only processes of this machine reach."""
MAX_PATH_BYTES = 107
"""Longest path of a socket that the kernel takes (`sun_path`), without the zero at its end."""
_PREFIX, _SOCKET, _LOCK, _UNNAMED = "ductile-sockets-", "slots", "lock", "lock.new"
_OURS = {_SOCKET, _LOCK, _UNNAMED}


class SocketFolder:
    def __init__(self, parents: Sequence[str] = ()) -> None:
        """A new folder in the first of `parents` that is there and whose name leaves room for a socket below it.

        Default: where temporary files go, or /tmp. What a run left there that was killed with its process server goes.
        Raises OSError.
        """
        parent = _first_that_fits(parents or (tempfile.gettempdir(), "/tmp"))
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        # The kernel drops the lock with its holder, whatever ends it. Under its name it is locked from the start.
        unnamed = self.path / _UNNAMED
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    @property
    def address(self) -> str:
        """Address at which slots find the orchestrator."""
        return f"ipc://{self.path / _SOCKET}"

    def remove(self) -> None:
        remove_folder(self.path)
        os.close(self._lock)


def remove_folder(path: Path) -> None:
    """Remove what a run has made in the folder, and then the folder, if nothing else lies in it. Does nothing when
    another process was faster."""
    with suppress(OSError):
        for name in (_SOCKET, _UNNAMED, _LOCK):
            (path / name).unlink(missing_ok=True)
        path.rmdir()


def _first_that_fits(parents: Sequence[str]) -> Path:
    for parent in map(Path, parents):
        longest = parent / f"{_PREFIX}12345678" / _SOCKET
        if parent.is_dir() and len(os.fsencode(longest)) <= MAX_PATH_BYTES:
            return parent
    raise OSError(f"no folder for the run's sockets: none of {', '.join(parents)} is there with a short enough name")


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            found = folder.stat(follow_symlinks=False)
            if found.st_uid != os.getuid() or found.st_mode & 0o777 != 0o700 or {*os.listdir(folder)} - _OURS:
                continue  # another program's folder that is only called like ours
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(folder)
        except BlockingIOError:
            pass  # its run is alive
        finally:
            os.close(lock)
