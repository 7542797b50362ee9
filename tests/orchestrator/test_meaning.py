"""What is other at a resume: refused, told, or nothing."""

import json

import pytest

from ductile.config.reading.imports import source_of
from ductile.config.reading.key_tree import find
from ductile.config.schema.run import RLConfig
from ductile.orchestrator.commands.run_meaning import CHANGES_NOTHING, NUM_ASKED, prompts_fingerprint
from ductile.orchestrator.ending.meaning import changes, going_on, measures_alike, next_learning_rate
from ductile.orchestrator.ending.progress import CheckpointError, Checkpoints, Progress
from ductile.tasks.prompts import PromptPosition

MEANING = {
    "examples": 32,
    "prompts": "aa",
    "rows": "bb",
    "held_out": "8 examples cc",
    "trainer.scheduler.type": "linear",
    "trainer.scheduler.warmup_steps": 0,
    "trainer.scheduler.decay_steps": None,
    "trainer.scheduler.min_lr": 0.0,
    "trainer.optim.type": "adamw",
    "trainer.optim.lr": 1e-4,
    "trainer.model.optimization_dtype": "float32",
    "orchestrator.seed": 0,
    "orchestrator.n_minibatches": 1,
    "max_steps": 10,
    "num_updates": 10,
}


def at_step(step=4, **other):
    return Progress(step, PromptPosition(8 * step), updates=step, meaning={**MEANING, **other})


@pytest.mark.parametrize(
    ("before", "now", "refused", "told"),
    [
        ({}, {}, [], []),
        ({}, {"examples": 40, "prompts": "a2", "rows": "b2"}, ["examples"], []),
        ({}, {"prompts": "a2", "rows": "b2"}, ["prompts"], []),
        ({}, {"rows": "b2"}, [], ["rows"]),
        ({}, {"held_out": "8 examples c2"}, [], ["held_out"]),
        ({}, {"orchestrator.seed": 7}, ["orchestrator.seed"], []),
        ({}, {"trainer.optim.type": "sgd"}, ["trainer.optim.type"], []),
        ({}, {"trainer.model.optimization_dtype": "bfloat16"}, ["trainer.model.optimization_dtype"], []),
        ({"trainer.model.optimization_dtype": "bfloat16"}, {}, [], ["trainer.model.optimization_dtype"]),
        ({}, {"trainer.optim.lr": 1e-3}, [], ["trainer.optim.lr", "lr"]),
        ({}, {"max_steps": 20, "num_updates": 20}, [], ["max_steps", "lr"]),
        ({}, {"rows": "b2", "trainer.optim.type": "sgd"}, ["trainer.optim.type"], ["rows"]),
        ({}, {"orchestrator.n_minibatches": 4, "num_updates": 28}, [], ["orchestrator.n_minibatches", "lr"]),
        ({"a.key.of.an.earlier.version": 1}, {"a.key.of.a.later.version": 2}, [], []),
    ],
)  # fmt: skip
def test_changes(before, now, refused, told):
    found = changes(at_step(**before), {**MEANING, **now}, 4)
    assert [each.key for each in found if each.is_refused] == refused
    assert [each.key for each in found if not each.is_refused] == told


def test_a_change_is_told_with_its_key_and_both_values():
    [lr, of_next] = changes(at_step(), {**MEANING, "trainer.optim.lr": 1e-3}, 4)
    assert lr.sentence == "trainer.optim.lr was 0.0001 up to step 4 and is 0.001 now."
    assert of_next.sentence == (
        "The learning rate of the next optimizer step was to be 6e-05 and is 0.0006 (trainer.optim.lr)."
    )


def test_a_learning_rate_that_a_key_of_one_side_changes_names_it():
    before = {name: value for name, value in MEANING.items() if name != "trainer.scheduler.min_lr"}
    [change] = changes(Progress(4, meaning=before), {**MEANING, "trainer.scheduler.min_lr": 9e-5}, 4)
    assert change.sentence.endswith("(trainer.scheduler.min_lr).")


def test_of_long_lists_the_user_is_shown_what_differs():
    rewards = [f"a_file_with_a_long_name.py:reward_{n} (9f86d081884c7d65)" for n in range(3)]
    other = [*rewards[:2], "other.py:reward (60303ae22b998861)"]
    [change] = changes(at_step(reward=rewards), {**MEANING, "reward": other}, 4)
    assert "reward_2 (9f86" in change.sentence
    assert "other.py:reward (6030" in change.sentence


def test_a_refusal_says_what_to_write_and_how_to_begin_anew(tmp_path):
    with pytest.raises(CheckpointError) as refused:
        going_on(at_step(), {**MEANING, "orchestrator.seed": 7}, 10, 1, tmp_path)
    said = str(refused.value)
    assert "orchestrator.seed was 0 up to step 4 and is 7 now" in said
    assert "Write orchestrator.seed = 0." in said
    assert f"--model.name {tmp_path / 'model'}" in said


def test_a_checkpoint_of_an_earlier_version_goes_on_with_a_sentence(tmp_path):
    began = going_on(Progress(4), MEANING, 10, 1, tmp_path)
    [change] = began.changes
    assert "does not say with which examples, seeds, dtypes" in change.sentence
    assert began.progress.meaning["examples"] == 32, "the next checkpoint says it"
    assert going_on(Progress(), MEANING, 10, 1, tmp_path).changes == (), "a new run has nothing to compare with"


def test_the_learning_rate_of_a_constant_schedule_goes_on():
    constant = {"trainer.scheduler.type": "constant", "trainer.scheduler.warmup_steps": 0}
    before = {name: value for name, value in MEANING.items() if "scheduler" not in name} | constant
    found = changes(Progress(4, meaning=before), {**before, "max_steps": 20, "num_updates": 20}, 4)
    assert [each.key for each in found] == ["max_steps"]
    assert next_learning_rate(before, 1000) == 1e-4


def test_the_optimizer_steps_that_are_done_are_counted_whatever_a_step_has_of_them():
    progress = Progress(5, updates=5)
    assert progress.updates_by(10, per_step=4) == 25
    assert progress.after(7, PromptPosition(), per_step=4).updates == 13
    assert Progress(5).updates_by(10, per_step=2) == 20, "an earlier version did not count them"


@pytest.mark.parametrize(("key", "alike"), [("held_out", False), ("rows", True), ("orchestrator.seed", True)])
def test_held_out_rewards_are_compared_when_they_measure_alike(key, alike):
    assert measures_alike(changes(at_step(), {**MEANING, key: "other"}, 4)) == alike


def test_a_meaning_comes_back_from_the_disk(tmp_path):
    checkpoints = Checkpoints(tmp_path / "state")
    progress = going_on(Progress(), {**MEANING, "betas": (0.9, 0.99)}, 10, 1, tmp_path).progress
    checkpoints.commit(checkpoints.begin(3), progress.after(3, PromptPosition(24)))
    again = going_on(checkpoints.load(3), {**MEANING, "betas": (0.9, 0.99)}, 10, 1, tmp_path)
    assert again.changes == ()
    assert json.loads((tmp_path / "state/step_3/progress.json").read_text())["meaning"]["examples"] == 32


@pytest.mark.parametrize("root", CHANGES_NOTHING, ids=lambda root: root.__name__)
def test_what_changes_nothing_is_a_key(root):
    names = {"resize", "loss_impl", "dist_timeout_seconds"} if root is RLConfig else {"scorer", "tokenizer", "seq_len"}
    missing = {name for name in CHANGES_NOTHING[root] if not find(root, tuple(name.split(".")))}
    assert missing <= names, "it has another name, or is gone"


def test_where_code_lies_is_found_without_running_it(tmp_path, monkeypatch):
    package = tmp_path / "ours" / "scores"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise RuntimeError")
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "good.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    assert source_of("ours.scores.good.reward") == package / "good.py"
    assert source_of("ours.scores.good:reward") == package / "good.py"
    assert source_of("ours.scores.made") == package / "__init__.py"
    assert source_of(f"{package / 'good.py'}:reward") == package / "good.py"
    assert source_of("nowhere.reward") is None


class Counting:
    """A task of many examples, each of which takes a while to make."""

    name = "counting"

    def __init__(self, shift=0):
        self.shift, self.made = shift, 0

    def __len__(self):
        return 10_000

    def messages(self, example):
        self.made += 1
        return [{"role": "system", "content": "Count."}, {"role": "user", "content": str(example + self.shift)}]


def test_a_task_that_makes_its_examples_is_asked_for_some():
    task = Counting()
    assert prompts_fingerprint(task, range(9000)) == prompts_fingerprint(Counting(), range(9000))
    assert prompts_fingerprint(Counting(1), range(9000)) != prompts_fingerprint(Counting(), range(9000))
    assert task.made == NUM_ASKED
