import json

import pytest

from ductile.loop.samples import SampleLog, choose
from ductile.observe import read_jsonl
from ductile.records import Prompt, Rollout, RolloutGroup
from tests.loop.doubles import Count, Letters


def group(example, *rewards):
    rollouts = tuple(Rollout((65,), (True,), (0.0,), (0,), "stop", reward) for reward in rewards)
    return RolloutGroup(Prompt(f"train/0/{example}", "train", example, (1,)), rollouts)


@pytest.mark.parametrize(
    ("num", "chosen"),
    [(0, []), (1, [(0, 1.0)]), (3, [(0, 1.0), (1, 3.0), (0, None)]), (9, [(0, 1.0), (1, 3.0), (0, None), (1, 4.0)])],
)
def test_many_prompts_before_many_siblings(num, chosen):
    groups = [group(0, 1.0, None), group(1, 3.0, 4.0)]
    assert [(prompt.example, rollout.reward) for prompt, rollout in choose(groups, num)] == chosen


def test_steps_that_are_repeated_are_not_told_twice(tmp_path):
    file = tmp_path / "samples.jsonl"
    log = SampleLog(file, {"train": Count()}, Letters(), 2)
    for step in (1, 2, 3):
        log.keep(step, [group(step, 0.5, None, 1.0)])
    log = SampleLog(file, {"train": Count()}, Letters(), 1, done=2)
    log.keep(3, [group(7, 0.25)])
    rows = read_jsonl(file)
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.5), (1, None), (2, 0.5), (2, None), (3, 0.25)]
    assert (rows[-1]["question"], rows[-1]["num_tokens"], rows[-1]["finish_reason"]) == ("7", 1, "stop")
    assert rows[-1]["completion"] == Letters().decode((65,))
    json.dumps(rows)
