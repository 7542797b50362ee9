"""One copy a node of what its processes fetch from another one: the first that wants a segment fetches it, and the
others map what it has got.

    copies = NodeCopies(folder)
    content = copies.get(id, num_bytes, fetch)      fetch() is called where no process of this node has it yet

The processes find each other's copies by files in a folder that only their owner can enter, one for each segment: who
has the file's lock fetches, and then writes down where its copy is. The kernel drops the lock with its holder. A copy
is kept for `KEPT_S` after it was made; what nobody keeps any more is fetched again.
"""

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer

from torch import Tensor

from ductile.fabric.process import host
from ductile.fabric.segment import Segment, SegmentUnavailable, map_copy, mapped_for_writing

LEAST_BYTES = 16 << 20
"""A smaller segment, such as one rollout's cache, each process fetches for itself."""
KEPT_S = 30.0
OTHER_FETCHES_S = 600.0
"""A process waits so long for another one that fetches the same."""
POLL_S = 0.02
OLD_S = 3600.0
"""Files of this age are removed."""
LONGEST_TEXT = 256


class NodeCopies:
    def __init__(self, folder: Path | None = None) -> None:
        """folder: default, one of this user's where temporary files go. Raises OSError where another user has it."""
        node = hashlib.sha256(host().encode()).hexdigest()[:16]  # nodes that are containers may share the folder
        self._folder = folder or Path(tempfile.gettempdir()) / f"ductile-copies-{os.getuid()}-{node}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.stat(follow_symlinks=False)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise OSError(f"{self._folder} is not this user's alone")
        for file in self._folder.iterdir():
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > OLD_S:
                    file.unlink()

    def get(self, id: str, num_bytes: int, fetch: Callable[[Tensor], None]) -> Tensor:
        """Return the bytes of the segment with this id, mapped. fetch: fills a tensor with them. Raises
        `SegmentUnavailable` and OSError."""
        descriptor = os.open(self._folder / id, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(descriptor)
            if location := os.pread(descriptor, LONGEST_TEXT, 0).decode():
                with suppress(SegmentUnavailable):
                    return map_copy(location, num_bytes)
            copy = Segment("ductile-copy", num_bytes)
            try:
                with mapped_for_writing(copy.path, copy.name, num_bytes) as content:
                    fetch(content)
                mapped = map_copy(copy.path, num_bytes)
            except BaseException:
                copy.close()
                raise
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, copy.path.encode(), 0)
            keeping = Timer(KEPT_S, copy.close)
            keeping.daemon = True
            keeping.start()
            return mapped
        finally:
            os.close(descriptor)  # and the lock with it


def _lock(descriptor: int) -> None:
    until = time.monotonic() + OTHER_FETCHES_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                why = f"another process of this node has not fetched it within {OTHER_FETCHES_S:g} s"
                raise SegmentUnavailable(why) from None
            time.sleep(POLL_S)
        else:
            return
