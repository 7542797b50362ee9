"""A run whose slots move all the time learns what the same run learns that is left alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.end_to_end.runs import Run
from tests.end_to_end.test_scheduling import write_scheduled
from tests.end_to_end.watched import FOLDER, trained_in
from tests.trainer.test_resize_equivalence import TOLERANCE

NUM_STEPS = 3
"""And 96 answers. A token is drawn by its number, so it is another one only if that falls within the rounding between
two of them. A run of which that is so cannot be compared beyond it; with this seed it is not, in these steps."""
FLAGS = (
    "--orchestrator.sampling.seed", "5",
    "--orchestrator.max-async-level", "0",  # so that all of a step's answers are sampled from the same weights
    "--trainer.optim.lr", "1e-4",  # as in the equivalence of resized runs: training magnifies rounding
)  # fmt: skip


def run_to_the_end(folder: Path, model: Path, start, policy: str) -> Run:
    config = write_scheduled(folder, model, policy, max_steps=NUM_STEPS, interval=100, generate="1-2", train=0)
    config.write_text(config.read_text().replace("letters.Letters", "letters.Numbered"))
    run = start(config, *FLAGS, module="tests.end_to_end.watched", **{FOLDER: str(folder), "RESTLESS_SEED": "1"})
    assert run.ends(within_s=90) == 0, run.said()
    return run


def steps(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if row["step"]]


@pytest.mark.slow
def test_nobody_can_tell_that_slots_moved(tmp_path: Path, model: Path, start) -> None:
    alone = run_to_the_end(tmp_path / "alone", model, start, "static")
    moved = run_to_the_end(tmp_path / "moved", model, start, "tests.end_to_end.moves.Restless")
    assert not alone.events("switched")
    assert len(moved.events("resized")) >= NUM_STEPS
    assert sum(event["num_handoffs"] for event in moved.events("switched")) > 0
    ours, theirs = (Counter(sample.tokens for sample in trained_in(tmp_path / name)) for name in ("moved", "alone"))
    assert ours == theirs, "the same samples, each as often"
    assert ours.total() == NUM_STEPS * 32
    for ours, theirs in zip(steps(moved), steps(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE, abs=1e-8)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
    ours, theirs = (load_file(run.folder / "model" / "model.safetensors") for run in (moved, alone))
    for name, weights in theirs.items():
        assert (ours[name] - weights).abs().max() <= TOLERANCE * weights.abs().max(), name
