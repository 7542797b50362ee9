"""A run that its scheduler resizes through four meshes in every step. It learns what it learns when it is left alone;
and a slot, or the whole run, that is killed around a resize costs no sample.

The suite has one of the kills. Thirty, in about a quarter of an hour, with what happened in each: `make layouts`.
"""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from ductile.cli import main
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from tests.end_to_end.runs import Run, checkpointed_steps, summary, write_config
from tests.end_to_end.test_chaos import (
    GROUP_SIZE,
    HEARTBEAT_TIMEOUT_S,
    SAMPLES_PER_STEP,
    VERDICT_WITHIN_S,
    assert_nothing_is_left,
)
from tests.end_to_end.watched import FOLDER, trained_in

LAYOUTS = ("pp=2,tp=2", "cp=3", "tp=2")
MESHES = [ParallelDims(), ParallelDims(tp=2), ParallelDims(cp=3), ParallelDims(pp=2, tp=2)]
"""By number of train slots, from one on."""
SCHEDULED = (
    "--cluster.auto-scheduler", "--cluster.policy", "tests.end_to_end.moves.ThroughLayouts",
    "--trainer.resize.layouts", json.dumps(LAYOUTS),
)  # fmt: skip
ON_POLICY = ("--orchestrator.max-async-level", "0")  # all of a step's completions are of the weights before it
ALIKE = (
    *ON_POLICY,
    "--orchestrator.sampling.seed", "5",
    "--orchestrator.drop-zero-advantage", "false",
    "--trainer.loss.type", "grpo",
)  # fmt: skip
PATIENT = ("--cluster.heartbeat-timeout-s", f"{HEARTBEAT_TIMEOUT_S:g}", "--trainer.resize.timeout-s", "5")
LEARNING_STEPS, LEAST_GAIN = 12, 0.25
TOLERANCE = 1e-4
MAX_STEPS = 4
NUM_TRIALS = os.environ.get("LAYOUT_TRIALS")
IN_SUITE = (9,)
"""The orchestrator, after a checkpoint."""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_resized_through_four_meshes_learns_what_it_learns_alone(tmp_path: Path, model: Path, start) -> None:
    alone, moved = (
        start(write_config(tmp_path / name, model, max_steps=LEARNING_STEPS, interval=100), *ALIKE, *flags)
        for name, flags in (("alone", ()), ("moved", SCHEDULED))
    )
    for run in (alone, moved):  # side by side
        assert run.ends(within_s=180) == 0, run.said()
    assert meshes_of(moved) == {1, 2, 3, 4}
    assert len(moved.events("resized")) >= LEARNING_STEPS
    assert not alone.events("resized")
    assert not moved.events("policy_failed")
    assert main(["replay", str(moved.folder)]) == 0, "every decision is made again the same"
    assert main(["report", str(moved.folder)]) == 0
    report = (moved.folder / "report.html").read_text()
    assert "Samples of the last steps" in report
    assert "pp 2 · tp 2" in report
    for ours, theirs in zip(moved.metrics()[1:], alone.metrics()[1:], strict=True):
        assert ours["trained_tokens"] == ours["sampled_tokens"] == theirs["sampled_tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE), ours["step"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["reward_mean"] == pytest.approx(theirs["reward_mean"], abs=TOLERANCE)
    learned = [summary(run.folder) for run in (moved, alone)]
    for each in learned:
        assert each["eval_reward_last"] - each["eval_reward_first"] >= LEAST_GAIN
    most = max(
        abs(ours["loss"] - theirs["loss"])
        for ours, theirs in zip(moved.metrics()[1:], alone.metrics()[1:], strict=True)
    )
    gain = learned[0]["eval_reward_last"] - learned[0]["eval_reward_first"]
    print(f"{len(moved.events('resized'))} resizes, held-out gain {gain:.3f}, losses at most {most:.1e} apart")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(int(NUM_TRIALS)) if NUM_TRIALS else IN_SUITE)
def test_a_run_killed_around_a_resize_goes_on_and_trains_each_sample_once(
    tmp_path: Path, model: Path, start, seed: int
) -> None:
    config = write_config(tmp_path, model, max_steps=MAX_STEPS)
    config.write_text(config.read_text().replace("letters.Letters", "letters.Numbered"))
    flags = (*ON_POLICY, *SCHEDULED, *PATIENT, "--orchestrator.drop-zero-advantage", "false")

    def live(name: str, *more: str, **environment: str) -> Run:
        (tmp_path / name).mkdir()
        return start(
            config, *flags, *more, module="tests.end_to_end.watched", **{FOLDER: str(tmp_path / name)}, **environment
        )

    life = live("first", RESIZE_STRIKE_SEED=str(seed))
    code = life.ends(within_s=VERDICT_WITHIN_S)
    strike = json.loads((tmp_path / "first" / "strike.json").read_text())
    assert code == 0 or code == (-signal.SIGKILL if strike["how"] == "end" else 1), life.said()
    assert "Traceback" not in life.said()
    assert_nothing_is_left(life)
    trained = trained_in(tmp_path / "first", life.events("went_back"))
    saved = max(checkpointed_steps(life.folder), default=0)
    if code != 0:
        assert code != 1 or ("Go on with: ductile rl @" in life.said()) == bool(saved)
        again = live("again", "--resume" if saved else "--clean")
        assert again.ends(within_s=VERDICT_WITHIN_S) == 0, again.said()
        assert meshes_of(again)
        trained = [sample for sample in trained if sample.step <= saved] + list(trained_in(tmp_path / "again"))
    of_each_prompt = Counter(sample.prompt for sample in trained)
    assert set(of_each_prompt.values()) == {GROUP_SIZE}
    assert Counter(sample.step for sample in trained) == dict.fromkeys(range(1, MAX_STEPS + 1), SAMPLES_PER_STEP)
    assert [row["step"] for row in life.metrics()] == list(range(MAX_STEPS + 1))
    print("trial {}: {how} slot {slot} {roles} at {command} {nth} + {delay_s:.3f} s;".format(seed, **strike), end=" ")
    print(f"exit code {code}, saved {saved}; {' / '.join(event['sentence'] for event in life.events('slot_lost'))}")


def meshes_of(run: Run) -> set[int]:
    """Numbers of slots that the run was resized to; each had the layout listed for it."""
    resized = run.events("resized")
    assert all(ParallelDims(**event["after_dims"]) == MESHES[len(event["after"]) - 1] for event in resized)
    return {len(event["after"]) for event in resized}
