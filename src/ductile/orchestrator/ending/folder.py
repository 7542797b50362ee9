"""A run's folder: one run in it at a time, and `--clean` deletes what a run writes, nothing else, when the new one has
begun (`ductile.orchestrator.ending.old_run`)."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ductile.config.checks.written import WRITTEN
from ductile.orchestrator.ending.old_run import put_back, set_aside


class FolderInUse(Exception):
    """Another run is at work in the folder."""


@contextmanager
def run_folder(output_dir: str, clean: bool) -> Iterator[Path]:
    """The folder, with `logs/` in it, ours alone until the block is left. Raises FolderInUse, OSError.

    The lock is the kernel's: it ends with this process, so a killed run leaves the folder free.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise FolderInUse(
                f"{folder} is in use by another run (process {lock.read().strip() or 'unknown'}): "
                "wait for it, stop it, or give another --output-dir"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        for name in WRITTEN:
            left = folder / f".{name}.partial"  # of a `write_whole` that was killed
            if left.is_file():
                left.unlink()
        put_back(folder)  # of a start that was killed
        try:
            if clean:
                set_aside(folder)
            (folder / "logs").mkdir(exist_ok=True)
            yield folder
        finally:
            put_back(folder)


def bench_folder() -> Path:
    """A new folder for a benchmark, so that it touches no run."""
    folder = Path(tempfile.mkdtemp(prefix="ductile-bench-"))
    (folder / "logs").mkdir()
    return folder
