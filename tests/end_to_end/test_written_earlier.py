"""A run that an earlier version wrote is read: its events, metrics and samples, its resolved config, its checkpoint.

`written_earlier` is the output folder of a run on four slots: 3 steps, roles changed several times a step by
`tests.end_to_end.moves.OnceAStep`, a checkpoint of step 3 by two train slots, and the model of that step. Its events
are of format 1 (`ductile.core.scheduling.facts.profile`).
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ductile.cli import main
from ductile.core.instances.placement import Placement
from ductile.dashboard.run_report import read_run_report
from ductile.observe import read_jsonl
from ductile.sim.plan import own_case
from ductile.sim.recording import read_recording
from tests.end_to_end.runs import Run

WRITTEN = Path(__file__).parent / "written_earlier"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the run in `run`, with the model that it began with in `model`."""
    shutil.copytree(WRITTEN, tmp_path / "run")
    shutil.copytree(WRITTEN / "model", tmp_path / "model")
    return tmp_path / "run"


def resumed(folder: Path, *flags: str) -> Run:
    """The run goes on by its own resolved config; only the paths are those of this machine."""
    here = ["--model.name", str(folder.parent / "model"), "--output-dir", str(folder)]
    shutil.copy(folder / "config.toml", folder.parent / "rl.toml")
    return Run(folder.parent / "rl.toml", "--resume", *here, *flags)


def test_its_report_shows_every_step_role_and_decision(folder: Path, capsys: pytest.CaptureFixture[str]):
    report = read_run_report(folder)
    assert report.missing == ()
    assert [row["step"] for row in report.steps] == [1, 2, 3]
    assert {activity for (activity, _) in report.seconds()} >= {"train", "generate", "score", "switch", "idle"}
    written = json.loads((folder / "summary.json").read_text())
    assert report.idle_share == pytest.approx(written["idle_share"], abs=0.15), "as the run measured itself"
    rows = read_jsonl(WRITTEN / "events.jsonl")
    assert len(report.resizes) == sum(row["kind"] == "resized" for row in rows) == 4
    assert len(report.decisions) == sum(row["kind"] in ("decided", "switched") for row in rows) == 12
    assert len(report.samples) > 0
    assert main(["report", str(folder)]) == 0
    page = Path(capsys.readouterr().out.split()[-1].rstrip("."))
    assert "Slot 0 train → generate, slot 1 generate → score" in page.read_text()


def test_it_is_planned_and_simulated_from_its_recording(folder: Path):
    recording = read_recording(folder)
    assert recording.setting.home == Placement((0,), (1, 2), (3,), "as component_placement says")
    assert [step.step for step in recording.steps] == [1, 2, 3]
    sampled = sum(row.get("sampled_tokens", 0) for row in read_jsonl(folder / "metrics.jsonl"))
    assert sum(sum(step.lengths) for step in recording.steps) == sampled, "the tokens of every completion are there"
    assert 0 < own_case(recording).step_s < 100 * recording.step_s
    assert main(["plan", str(folder)]) == 0


def test_its_checkpoint_is_the_model_that_it_exported(folder: Path):
    """A resume at the last step trains nothing, and writes the model that is missing: from the checkpoint alone."""
    shutil.rmtree(folder / "model")
    run = resumed(folder)
    try:
        assert run.ends(200) == 0, run.said()
    finally:
        run.close()
    was, now = load_file(WRITTEN / "model" / "model.safetensors"), load_file(folder / "model" / "model.safetensors")
    assert was.keys() == now.keys()
    assert all((was[name] == now[name]).all() for name in was)
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3], "nothing was trained again"


def test_it_goes_on(folder: Path):
    run = resumed(folder, "--max-steps", "5")
    try:
        assert run.ends(200) == 0, run.said()
    finally:
        run.close()
    steps = [row["step"] for row in run.metrics() if "loss" in row]
    assert steps == [1, 2, 3, 4, 5]
    assert run.events("exported")[-1]["sentence"].startswith("The model of step 5")
    [told] = run.events("resumed_otherwise")
    assert "is of an earlier version and does not say with which examples" in told["sentence"]
    # Its moments were loaded too: a first step of Adam from zero moments would move each weight by the learning rate.
    last = json.loads((folder / "summary.json").read_text())
    assert last["began_at_step"] == 3
    assert last["eval_reward_last"] >= 0.7, "0.78 at step 3"
    report = read_run_report(folder)
    assert report.missing == ()
    assert [row["step"] for row in report.steps] == [1, 2, 3, 4, 5]
