"""Writing to disks that fill up and fail: errors name path, cause and room, and files are whole or not there."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from ductile.surrogates import ESCAPED

AT_FDCWD, RENAME_EXCHANGE = -100, 2
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskError(OSError):
    """Something cannot be written. The text is a sentence with the path, the cause and, on a full disk, the room."""


def named(error: BaseException, path: Path) -> DiskError:
    """`error`, or the OSError that caused it, as one that names `path`: errors of `write` do not know theirs."""
    if isinstance(error, DiskError):
        return error
    cause = _cause(error)
    text = (cause.strerror if cause else None) or str(error) or type(error).__name__
    room = f" ({show_bytes(free_bytes(path))} free)" if cause and cause.errno in FULL else ""
    result = DiskError(f"{path} cannot be written: {text}{room}")
    result.errno = cause.errno if cause else None
    return result


def require_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises DiskError when the disk of `folder` has less than `needed_bytes` left for `what`."""
    free = free_bytes(folder)
    if free < needed_bytes:
        text = os.strerror(errno.ENOSPC)
        error = DiskError(f"{text}: {what} needs {show_bytes(needed_bytes)}, {folder} has {show_bytes(free)} free")
        error.errno = errno.ENOSPC
        raise error


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that `path` is on, or would be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; 0 when there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_whole(file: Path, text: str, mode: int = 0o666) -> None:
    """Atomic: a reader sees the old content or the new, also after a power cut. Raises DiskError and leaves no rubbish.

    mode: of the file, from its first moment; the umask is taken off.

    Example: `write_whole(run / "config.toml", text)`.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a writer that was killed, with a mode of its own
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "w", encoding="utf-8", errors=ESCAPED) as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise named(error, file) from error


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names mean, in one instant; False where the system or the file system cannot (NFS, say)."""
    renameat2 = ctypes.CDLL(None, use_errno=True)["renameat2"]
    return renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def sync(path: Path) -> None:
    """A file's content, or a folder's entries, to disk. A power cut may forget the name of a file that is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """A folder and all that is in it, files and folders, to disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def show_bytes(size: int) -> str:
    """ "0 B", "17.9 MB", "1.2 TB"."""
    amount, units = float(size), iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while amount >= 1000 and unit != "TB":
        amount, unit = amount / 1000, next(units)
    return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"


def _cause(error: BaseException | None) -> OSError | None:
    """The first OSError with a number on the way back from `error`: libraries wrap it, and clean up with another."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None
