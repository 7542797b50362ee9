import json

import pytest

from ductile.orchestrator.loop.samples import choose, sample_rows
from ductile.records import Prompt, Rollout, RolloutGroup
from tests.orchestrator.doubles import Letters


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


def test_a_row_tells_of_a_rollout_without_asking_the_task():
    prompt, tokenizer = Prompt("train/0/7", "train", 7, (ord("7"),)), Letters()
    rollout = Rollout((65,), (True,), (0.0,), (0,), "stop", 0.25)
    (row,) = sample_rows([RolloutGroup(prompt, (rollout,))], tokenizer, 1)
    assert (row["prompt"], row["completion"], row["reward"]) == ("7", "A", 0.25)
    assert (row["num_tokens"], row["finish_reason"]) == (1, "stop")
    json.dumps(row)
