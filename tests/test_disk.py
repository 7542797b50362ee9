"""Files that are whole or not there, and open to nobody else when they are private."""

import os
import stat
from pathlib import Path

import pytest

from ductile.disk import DiskError, write_whole


@pytest.mark.parametrize("left_by_a_killed_writer", [False, True])
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_file_has_its_mode_whatever_was_left(tmp_path: Path, mode: int, left_by_a_killed_writer: bool) -> None:
    if left_by_a_killed_writer:
        (tmp_path / ".secret.partial").write_text("half")
        (tmp_path / ".secret.partial").chmod(0o644 if mode == 0o600 else 0o600)
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "secret", "token", mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "secret").read_text() == "token"
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == mode & ~0o022
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_what_somebody_put_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".secret.partial").symlink_to(tmp_path / "theirs")
    write_whole(tmp_path / "secret", "token")
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_folder_that_is_not_there_is_told_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="x/y cannot be written: No such file or directory"):
        write_whole(tmp_path / "x/y", "text")
