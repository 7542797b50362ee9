"""A run whose slots move all the time learns what the same run learns that is left alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ductile.trainer.state import GRADIENT
from tests.end_to_end.runs import Run
from tests.end_to_end.test_scheduling import BOTH_RULES, write_scheduled
from tests.end_to_end.watched import DRAWS, FOLDER, STATES, moved_in, trained_in
from tests.nightly import mostly_nightly
from tests.trainer.test_resize_equivalence import TOLERANCE

FEW_STEPS = 4
NUM_ROLLOUTS, GROUP_SIZE = 16, 4
FLAGS = (
    "--orchestrator.batch-size", str(NUM_ROLLOUTS),
    "--orchestrator.rollouts-per-example", str(GROUP_SIZE),
    "--orchestrator.sampling.seed", "5",
    "--orchestrator.max-async-level", "0",  # so that all of a step's completions have the log-probs of the same weights
    "--orchestrator.advantage.type", "custom",
    "--orchestrator.advantage.import-path", "tests.end_to_end.watched.rewards_alone",
    "--trainer.loss.type", "custom",
    "--trainer.loss.import-path", "tests.end_to_end.watched.reinforce",
    "--trainer.optim.lr", "1e-4",  # as in the equivalence of resized runs: training magnifies rounding
)  # fmt: skip


def begin(folder: Path, model: Path, start, policy: str, *flags: str, num_steps: int) -> Run:
    config = write_scheduled(folder, model, policy, max_steps=num_steps, interval=100, generate="1-2", train=0)
    # Two at a time: no generator is ever done with its share before the policy hears of the first completion.
    text = config.read_text().replace("letters.Letters", "letters.Even")
    config.write_text(f"inference.max_num_seqs = 2\n{text}")
    watched = {FOLDER: str(folder), STATES: "1", DRAWS: "1", "RESTLESS_SEED": "1"}
    return start(config, *FLAGS, *flags, module="tests.end_to_end.watched", **watched)


def steps(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if row["step"]]


def moved_bit_for_bit(folder: Path, epoch: int) -> bool:
    """Asserts that every whole copy of the state, before and after, is the same: weights, both moments and, within a
    batch, the gradient so far. Returns whether it was within one."""
    before, after = (moved_in(folder, epoch, side) for side in ("before", "after"))
    assert before.layout != after.layout
    whole = before.copies[0]
    assert {name.partition("/")[0] for name in whole} >= {"model", "exp_avg", "exp_avg_sq"}
    for copy in (*before.copies, *after.copies):
        assert copy.keys() == whole.keys(), epoch
        wrong = [name for name in copy if copy[name] != whole[name]]
        assert wrong == [], f"change {epoch}, from {before.layout} to {after.layout}"
    return any(name.startswith(GRADIENT) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "num_resizes"), mostly_nightly([(10, 4), (50, 20)], (10, 4)))
def test_nobody_can_tell_that_slots_moved(tmp_path: Path, model: Path, start, num_steps: int, num_resizes: int) -> None:
    alone = begin(tmp_path / "alone", model, start, "static", num_steps=num_steps)
    moved = begin(tmp_path / "moved", model, start, "tests.end_to_end.moves.OnceAStep", num_steps=num_steps)
    for run in (alone, moved):  # side by side
        assert run.ends(within_s=180) == 0, run.said()
    assert not alone.events("switched")
    assert not moved.events("policy_failed")
    inside = [moved_bit_for_bit(tmp_path / "moved", event["epoch"]) for event in moved.events("resized")]
    assert len(inside) >= num_resizes
    if num_steps > 10:  # what happens in few of them is up to the machine
        assert any(inside)
        assert sum(event["num_migrations"] for event in moved.events("switched")) > 0

    ours, theirs = (sorted(trained_in(tmp_path / name), key=lambda s: s.tokens) for name in ("moved", "alone"))
    for sample, other in zip(ours, theirs, strict=True):
        assert sample.tokens == other.tokens
        assert sample.logprobs == pytest.approx(other.logprobs, rel=TOLERANCE, abs=0.0), "of the weights of its step"
    of_each_prompt = Counter(sample.prompt for sample in ours)
    assert len(of_each_prompt) == num_steps * NUM_ROLLOUTS // GROUP_SIZE
    assert set(of_each_prompt.values()) == {GROUP_SIZE}, "each sample is trained once"
    assert [row["step"] for row in steps(alone)] == list(range(1, num_steps + 1))
    assert_learned_the_same(moved, alone)


def assert_learned_the_same(moved: Run, alone: Run) -> None:
    for ours, theirs in zip(steps(moved), steps(alone), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE, abs=0.0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE, abs=0.0)
    ours, theirs = (load_file(run.folder / "model" / "model.safetensors") for run in (moved, alone))
    assert ours.keys() == theirs.keys()
    for name, weights in theirs.items():
        assert (ours[name] - weights).abs().max() <= TOLERANCE * weights.abs().max(), name


@pytest.mark.slow
@pytest.mark.nightly
def test_nobody_can_tell_which_policy_decided(tmp_path: Path, model: Path, start) -> None:
    """Of those that come with ductile, in a few steps; what each of them moves is its own affair."""
    policies = {"alone": ("static",), "rules": ("rules", *BOTH_RULES), "model": ("tests.end_to_end.moves.Keen",)}
    runs = {name: begin(tmp_path / name, model, start, *how, num_steps=FEW_STEPS) for name, how in policies.items()}
    for run in runs.values():  # side by side
        assert run.ends(within_s=180) == 0, run.said()
    alone = runs.pop("alone")
    for moved in runs.values():
        assert moved.events("switched")
        assert not moved.events("policy_failed")
        assert_learned_the_same(moved, alone)
