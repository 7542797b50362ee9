"""Resumes of real processes on the quickstart's model: `ductile rl` and `ductile sft`, cut by signals or by max_steps.

`PAIRS` has a function for each: it has the run uncut and cut, changes something, goes on, and looks at what came of it.
"""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import ductile
from ductile.observe import read_jsonl
from tests.end_to_end.runs import Run

ROOT = Path(ductile.__file__).parents[2]
MODEL = ROOT / "examples/quickstart/model"
ENDS_WITHIN_S = 200.0
SFT = """
model.name = "{model}"
data = {{ path = "{data}", batch_size = 16, seq_len = 128 }}
max_steps = {max_steps}
output_dir = "{folder}"
cluster = {{ device = "cpu", component_placement = {{ actor = 0 }} }}
optim.lr = 1e-4
scheduler = {{ type = "linear", warmup_steps = 0 }}
ckpt.interval = 2
"""
RL = """
model.name = "{model}"
seq_len = 96
max_steps = {max_steps}
output_dir = "{folder}"
cluster = {{ device = "cpu", component_placement = {{ actor = 0, rollout = 1 }} }}
trainer.optim.lr = 1e-4
ckpt.interval = 1

[orchestrator]
batch_size = 16
rollouts_per_example = 4
max_async_level = 0
num_samples_kept = 64
sampling.max_tokens = 24
eval = {{ num_examples = 4, interval = 2 }}
task = {{ type = "jsonl", path = "{data}", reward = "{root}/examples/own_task/reward.py:correct" }}
"""
Start = Callable[..., Run]


class Pair:
    """A run uncut, and the same run cut, each with data and a config of its own."""

    def __init__(self, folder: Path, start: Start, command: str, max_steps: int = 8) -> None:
        self.folder, self.start, self.command, self.max_steps = folder, start, command, max_steps
        self.data, source = folder / "data.jsonl", "own_task/questions" if command == "rl" else "quickstart/sft"
        folder.mkdir(parents=True)
        lines = (ROOT / f"examples/{source}.jsonl").read_text().splitlines(keepends=True)
        self.data.write_text("".join(lines[:24]))

    def life(self, name: str, *flags: str) -> Run:
        """A life of the run in `folder/name/run`."""
        file = self.folder / name / "config.toml"
        file.parent.mkdir(exist_ok=True)
        settings = {"model": MODEL, "data": self.data, "max_steps": self.max_steps, "root": ROOT}
        text = RL if self.command == "rl" else SFT
        file.write_text(text.format(folder=file.parent / "run", **settings))
        return self.start(file, *flags, command=self.command)

    def whole(self) -> Run:
        run = self.life("whole")
        assert run.ends(ENDS_WITHIN_S) == 0, run.said()
        return run

    def cut(self, signum: signal.Signals, after: int) -> None:
        run = self.life("cut")
        run.until_step(after)
        run.process.send_signal(signum)
        assert run.ends(ENDS_WITHIN_S) in (130, -signal.SIGKILL), run.said()

    def again(self, *flags: str, code: int = 0) -> Run:
        run = self.life("cut", "--resume", *flags)
        assert run.ends(ENDS_WITHIN_S) == code, run.said()
        return run


def weights(run: Run) -> dict[str, Any]:
    return load_file(run.folder / "model" / "model.safetensors")


def curve(run: Run, name: str) -> list[Any]:
    return [(row["step"], row.get(name)) for row in run.metrics()]


def prompts(run: Run) -> dict[int, set[str]]:
    asked: dict[int, set[str]] = {}
    for row in read_jsonl(run.folder / "samples.jsonl"):
        asked.setdefault(row["step"], set()).add(row["prompt"])
    return asked


def nothing_in_sft(folder: Path, start: Start) -> None:
    pair = Pair(folder, start, "sft")
    whole = pair.whole()
    pair.cut(signal.SIGINT, 3)
    again = pair.again()
    assert not again.events("resumed_otherwise")
    assert curve(again, "lr") == curve(whole, "lr")
    assert curve(again, "loss") == curve(whole, "loss")
    was, now = weights(whole), weights(again)
    assert all((was[name] == now[name]).all() for name in was)


def slots_of_sft(folder: Path, start: Start) -> None:
    pair = Pair(folder, start, "sft")
    whole = pair.whole()
    pair.cut(signal.SIGKILL, 3)
    again = pair.again("--cluster.component-placement", '{"actor": "0-1"}')
    assert not again.events("resumed_otherwise")
    assert curve(again, "lr") == curve(whole, "lr")
    losses = ([loss for _, loss in curve(run, "loss")] for run in (whole, again))
    assert next(losses) == pytest.approx(next(losses), rel=1e-3)


def dtype_of_sft(folder: Path, start: Start) -> None:
    pair = Pair(folder, start, "sft")
    pair.cut(signal.SIGTERM, 2)
    said = pair.again("--model.optimization-dtype", "bfloat16", code=2).said()
    assert 'model.optimization_dtype was "float32" up to step' in said
    assert 'and is "bfloat16" now' in said


def more_steps_of_sft(folder: Path, start: Start) -> None:
    pair = Pair(folder, start, "sft", max_steps=4)
    first = pair.life("cut")
    assert first.ends(ENDS_WITHIN_S) == 0, first.said()
    again = pair.again("--max-steps", "6")
    lrs = dict(curve(again, "lr"))
    assert [lrs[step] for step in (4, 5, 6)] == pytest.approx([0.25e-4, 1e-4 / 3, 1e-4 / 6])
    assert "was to be 0 and is 3.33333e-05 (max_steps)" in again.said()


def nothing_in_rl(folder: Path, start: Start) -> None:
    pair = Pair(folder, start, "rl", max_steps=6)
    whole = pair.whole()
    pair.cut(signal.SIGINT, 3)
    again = pair.again()
    assert not again.events("resumed_otherwise")
    assert prompts(again) == prompts(whole)
    evaluated = [[step for step, reward in curve(run, "eval_reward") if reward is not None] for run in (whole, again)]
    assert evaluated == [[0, 2, 4, 6]] * 2
    assert json.loads((again.folder / "summary.json").read_text())["eval_step_last"] == 6


def last_evaluation_of_rl(folder: Path, start: Start) -> None:
    """Ctrl-C in the last step: it is saved, and what was due after it is done by a resume."""
    pair = Pair(folder, start, "rl", max_steps=3)
    pair.cut(signal.SIGINT, 2)
    again = pair.again()
    summary = json.loads((again.folder / "summary.json").read_text())
    assert (summary["steps"], summary["eval_step_last"]) == (3, 3)
    assert again.events("exported") or curve(again, "eval_reward")[-1][1] is not None


def data_of_rl(folder: Path, start: Start) -> None:
    pair = Pair(folder, start, "rl", max_steps=6)
    pair.cut(signal.SIGKILL, 2)
    lines = pair.data.read_text()
    pair.data.write_text(lines + lines)
    said = pair.again(code=2).said()
    assert re.search(r"The number of examples to train on .* was 20 up to step \d and is 44 now", said), said
    pair.data.write_text(lines)
    pair.again()


PAIRS = (
    nothing_in_sft,
    slots_of_sft,
    dtype_of_sft,
    more_steps_of_sft,
    nothing_in_rl,
    last_evaluation_of_rl,
    data_of_rl,
)
