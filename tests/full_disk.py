"""Disks that are really full: a small tmpfs of the test's own.

with small_disk(tmp_path / "disk", 4 << 20) as disk:      # skips the test where mounting is not permitted
    ballast = fill(disk)                                  # not a byte is left
    ballast.unlink()                                      # and all is free again
    enlarge(disk, 256 << 20)                              # or: somebody else has made room
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "ductile-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if mounted.returncode:
        pytest.skip(f"no disk of one's own: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def enlarge(disk: Path, num_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(disk)], check=True, timeout=30)


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """A file that takes all room but so much, rounded to a page. Delete it to have the room again."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(bytes(4096)):
            pass
    with ballast.open("r+b") as stream:
        stream.truncate(max(0, ballast.stat().st_size - leave_bytes) // 4096 * 4096)
    return ballast
