"""A trainer that has lost slots goes back to its last checkpoint by itself, on the slots that are left: what it learns
from there on is what a run learns that is resumed by hand from the same checkpoint, on the same slots."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Run, checkpointed_steps, summary, write_config, write_sft

MAX_STEPS = 6
SAVED = 3
"""The step of the checkpoint that is there when a slot is lost, and the only one."""
EVERY = {"max_steps": MAX_STEPS, "interval": SAVED}
ENDS_WITHIN_S = 300.0


def pids_of(run: Run) -> dict[int, int]:
    return {event["slot"]: event["pid"] for event in run.events("slot_started")}


def stopped_between_steps(run: Run, after: int) -> None:
    """Return when the run is in the middle of a step after this one, and no checkpoint is due in it."""
    run.until_step(after)


def curve(run: Run) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in run.metrics()}


def by_hand(start: Any, run: Run, config: Path, folder: Path, *flags: str, command: str, **how: Any) -> Run:
    """The same run, resumed by hand from the checkpoint that it went back to."""
    folder.mkdir()
    shutil.copytree(run.folder / "state" / f"step_{SAVED}", folder / "run" / "state" / f"step_{SAVED}")
    file = folder / config.name
    file.write_text(config.read_text().replace(str(run.folder), str(folder / "run")))
    again = start(file, "--resume", *flags, command=command, **how)
    assert again.ends(within_s=ENDS_WITHIN_S) == 0, again.said()
    return again


def test_sft_goes_back_when_a_slot_is_killed_in_the_middle_of_a_step(tmp_path: Path, model: Path, start):
    config = write_sft(tmp_path, model, **EVERY, train='"0-1"')
    run = start(config, command="sft")
    run.until(lambda: run.events("saved"))
    run.until_step(SAVED + 1)
    pid = pids_of(run)[1]
    os.kill(pid, signal.SIGKILL)
    assert run.ends(within_s=ENDS_WITHIN_S) == 0, run.said()
    print(run.said())
    [back] = run.events("went_back")
    assert (back["step"], back["lost"], back["before"], back["after"]) == (SAVED, [1], [0, 1], [0])
    assert back["sentence"].startswith(f"Trainer goes back to the checkpoint of step {SAVED} on slot 0, since slot 1 (")
    assert f"pid {pid}) was killed by SIGKILL" in back["sentence"]
    assert [row["step"] for row in run.metrics()] == list(range(1, MAX_STEPS + 1))
    assert summary(run.folder)["slots"] == {"train": [0]}
    assert checkpointed_steps(run.folder) == [SAVED, MAX_STEPS]
    again = by_hand(
        start, run, config, tmp_path / "hand", "--cluster.component-placement", '{"actor": 0}', command="sft"
    )
    later = range(SAVED + 1, MAX_STEPS + 1)
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [curve(run)[step][name] for step in later] == [curve(again)[step][name] for step in later], name
