"""The run that `--clean` is to delete: set aside until the new one has begun, and put back when it never does.

    .run.moving   a part of the old run's files, on their way out of the folder or back into it
    .run.old      all of them: what else lies under the names of a run is of a start that has not begun
    .run.gone     what is being deleted

Each of these names changes in one instant, so a kill at any moment leaves a state that `put_back` knows how to end.
"""

import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from ductile.config.checks.written import WRITTEN, has_begun
from ductile.observe import Listener

MOVING, OLD, GONE = ".run.moving", ".run.old", ".run.gone"
FAILED_START = "failed_start"
"""Folder below `logs/` for what the slots of a start that never began have said."""


def set_aside(folder: Path) -> None:
    """Move all that a run has written out of the way. Raises OSError; then `put_back` brings back what was moved."""
    names = [name for name in WRITTEN if os.path.lexists(folder / name)]
    if not names:
        return
    (folder / MOVING).mkdir()
    for name in names:
        (folder / name).rename(folder / MOVING / name)
    (folder / MOVING).rename(folder / OLD)


def put_back(folder: Path) -> None:
    """Bring the old run back, unless the new one has begun: then the old one is deleted. Raises OSError."""
    _delete(folder / GONE)
    if (folder / OLD).exists() and has_begun(folder):
        (folder / OLD).rename(folder / GONE)
        _delete(folder / GONE)
    elif (folder / OLD).exists():
        for name in WRITTEN:
            if name != "logs":
                _delete(folder / name)
        (folder / OLD).rename(folder / MOVING)
    if not (folder / MOVING).exists():
        return
    if (folder / MOVING / "logs").is_dir() and (folder / "logs").is_dir():
        _delete(folder / MOVING / "logs" / FAILED_START)
        (folder / "logs").rename(folder / MOVING / "logs" / FAILED_START)
    for path in list((folder / MOVING).iterdir()):
        path.rename(folder / path.name)
    (folder / MOVING).rmdir()


def is_aside(folder: Path) -> bool:
    """Return whether a start that was killed has left an old run to put back."""
    return any((folder / name).exists() for name in (MOVING, OLD))


class ForgetOldRun(Listener):
    """Listener that deletes the old run when the new one tells of its first step, beside the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._deleting: threading.Thread | None = None

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if (self._folder / OLD).exists():
            gone = (self._folder / OLD).rename(self._folder / GONE)
            self._deleting = threading.Thread(target=shutil.rmtree, args=(gone, True), daemon=True)
            self._deleting.start()

    def close(self, code: int) -> None:
        if self._deleting:
            self._deleting.join()


def _delete(path: Path) -> None:
    """A link is deleted itself, never what it leads to. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
