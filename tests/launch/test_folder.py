import os
import subprocess
import sys
from pathlib import Path

import pytest

from ductile.launch.folder import WRITTEN, FolderInUse, run_folder


def test_makes_the_folder_and_its_logs(tmp_path: Path):
    with run_folder(str(tmp_path / "runs" / "new"), clean=False) as folder:
        assert (folder / "logs").is_dir()


def test_clean_deletes_what_runs_write_and_nothing_else(tmp_path: Path):
    for name in WRITTEN:
        if "." in name:
            (tmp_path / name).write_text("old")
        else:
            (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("precious")
    (tmp_path / "model" / "deep").rmdir()
    (tmp_path / "model").rmdir()
    (tmp_path / "model").symlink_to(elsewhere)
    with run_folder(str(tmp_path), clean=True):
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "logs", "notes.txt"}
        assert (elsewhere / "weights").exists()


def test_one_run_at_a_time_and_a_killed_one_frees_it(tmp_path: Path):
    program = (
        "import sys, signal\nfrom ductile.launch.folder import run_folder\n"
        "with run_folder(sys.argv[1], False):\n    print('mine', flush=True)\n    signal.pause()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with (
            pytest.raises(FolderInUse, match=rf"in use by another run \(process {other.pid}\)"),
            run_folder(str(tmp_path), clean=True),
        ):
            pass
    finally:
        other.kill()
        other.wait(10)
        other.stdout.close()
    with run_folder(str(tmp_path), clean=False):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
