import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ductile.orchestrator.ending.folder import WRITTEN, FolderInUse, run_folder
from ductile.orchestrator.ending.old_run import FAILED_START, OLD, ForgetOldRun, put_back, set_aside


def test_makes_the_folder_and_its_logs(tmp_path: Path):
    with run_folder(str(tmp_path / "runs" / "new"), clean=False) as folder:
        assert (folder / "logs").is_dir()


def old_run(folder: Path) -> dict[str, str]:
    """Something under every name that a run writes, one of them a link out of the folder. Returns all there is."""
    for name in WRITTEN:
        if name.endswith((".toml", ".json", ".jsonl")):
            (folder / name).write_text(f"the old {name}")
        elif name != "model":
            (folder / name).mkdir()
            (folder / name / "old").write_text("old")
    (folder / "notes.txt").write_text("mine")
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("precious")
    (folder / "model").symlink_to(elsewhere)
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


def write_as_a_new_run(folder: Path) -> None:
    for name in ("config.toml", "events.jsonl", "samples.jsonl", "logs/slot-0.log"):
        (folder / name).write_text("new")
    (folder / "model").mkdir()


def test_clean_deletes_what_runs_write_and_nothing_else_once_the_new_run_has_begun(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    old_run(folder)
    with run_folder(str(folder), clean=True):
        assert {path.name for path in folder.iterdir()} == {".lock", "logs", "notes.txt", OLD}
        write_as_a_new_run(folder)
        (folder / "metrics.jsonl").write_text("{}\n")
        forget = ForgetOldRun(folder)
        forget.on_metrics(0, {})
        assert not (folder / OLD).exists()
        forget.close(0)
    new = {"config.toml", "events.jsonl", "samples.jsonl", "metrics.jsonl", "model", "logs", "logs/slot-0.log"}
    assert contents(folder).keys() == {*new, "notes.txt"}
    assert (tmp_path / "elsewhere/weights").read_text() == "precious"


def test_a_start_that_never_begins_leaves_the_old_run_as_it_was(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    before = old_run(folder)
    for attempt in ("first", "second"):
        with run_folder(str(folder), clean=True):
            write_as_a_new_run(folder)
            (folder / "logs/slot-0.log").write_text(attempt)
        logs = {f"logs/{FAILED_START}": "", f"logs/{FAILED_START}/slot-0.log": attempt}
        assert contents(folder) == before | logs
    assert (folder / "model").is_symlink()


@pytest.mark.parametrize("num_renames", range(2 * (len(WRITTEN) + 3)))
def test_a_kill_at_any_moment_costs_nothing(tmp_path: Path, monkeypatch, num_renames: int):
    """Set aside, written anew and put back, with a kill before a certain rename. The next start finds all of it."""
    folder = tmp_path / "run"
    folder.mkdir()
    before = old_run(folder)
    left, rename = num_renames, Path.rename

    def kill(path: Path, to: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as killed, suppress(KeyboardInterrupt):
        killed.setattr(Path, "rename", kill)
        set_aside(folder)
        (folder / "logs").mkdir()
        write_as_a_new_run(folder)
        put_back(folder)
    with run_folder(str(folder), clean=False):
        after = contents(folder)
    assert {name: text for name, text in after.items() if FAILED_START not in name} == before


def test_a_kill_after_the_first_step_keeps_the_new_run(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    old_run(folder)
    set_aside(folder)
    (folder / "metrics.jsonl").write_text("{}\n")
    with run_folder(str(folder), clean=False):
        assert contents(folder) == {"metrics.jsonl": "{}\n", "notes.txt": "mine", "logs": ""}


def test_one_run_at_a_time_and_a_killed_one_frees_it(tmp_path: Path):
    program = (
        "import sys, signal\nfrom ductile.orchestrator.ending.folder import run_folder\n"
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
