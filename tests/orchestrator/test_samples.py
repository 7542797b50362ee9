import json

import pytest

from ductile.orchestrator.loop.samples import choose, sample_rows
from ductile.records import Prompt, Rollout, RolloutGroup
from ductile.tasks.tokenizer import Tokenizer
from tests.orchestrator.doubles import Letters
from tests.tiny import make_tokenizer_files


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


def test_a_sample_is_what_was_sampled(tmp_path):
    tokenizer = Tokenizer.from_folder(make_tokenizer_files(tmp_path))
    prompt = Prompt("train/0/7", "train", 7, tokenizer.apply_chat_template([{"role": "user", "content": "?"}]))
    said = "<|bos|>1<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    ids, mask = tokenizer.encode(said), [True] * len(tokenizer.encode(said))
    rollout = Rollout(ids, mask, [0.0] * len(ids), [0] * len(ids), "stop", 0.25)
    (row,) = sample_rows([RolloutGroup(prompt, (rollout,))], tokenizer, 1)
    assert (row["prompt"], row["completion"]) == ("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n", said)
