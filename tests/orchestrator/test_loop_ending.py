"""What ends a run, and what is saved all the same."""

import asyncio
from functools import partial

import pytest

from ductile.core.batch.advantage import mean_baseline
from ductile.observe import read_jsonl
from ductile.orchestrator.ending.run_until import SlotDied
from ductile.orchestrator.loop.evaluate import RewardsFailed
from ductile.orchestrator.loop.skipped_steps import Diverged
from ductile.roles import CustomCodeFailed, Late, SlotLost
from ductile.tasks.grader import Graded
from tests.orchestrator.doubles import (
    FakeGenerators,
    FakeTrainer,
    InProcessGraders,
    NotingSaver,
    Stage,
    clock,
    run,
)


def test_weights_that_do_not_arrive_end_the_run(tmp_path):
    class Refusing(FakeGenerators):
        async def receive(self, manifest):
            if manifest.version == 1:
                raise RuntimeError("slot 1 (generate) refused Receive")
            return await super().receive(manifest)

    stage = Stage(tmp_path, max_steps=3, generators=Refusing)
    with pytest.raises(RuntimeError, match="refused Receive"):
        run(stage.go())


class FailAfter(InProcessGraders):
    """The rewards of the first 20 completions work, and no other."""

    num_asked = 0

    async def reward(self, task, example, completion):
        self.num_asked += 1
        if self.num_asked > 20:
            return Graded(error="the reward raised KeyError")
        return await super().reward(task, example, completion)


def test_rewards_that_fail_end_the_run_when_they_are_too_many(tmp_path):
    stage = Stage(tmp_path, max_steps=9, graders=FailAfter, max_reward_error_share=0.5)
    with pytest.raises(
        RewardsFailed, match=r"in step \d, \d of 8 rewards failed; the last time the reward raised KeyErr"
    ):
        run(stage.go())
    shares = [row["reward_error_share"] for row in read_jsonl(tmp_path / "metrics.jsonl")[1:]]
    assert shares[0] == 0
    assert max(shares[:-1]) <= 0.5 < shares[-1]


def test_an_error_of_a_generator_ends_the_run_with_its_sentence(tmp_path):
    class Breaks(FakeGenerators):
        async def generate(self, request):
            if len(self.requests) == 20:
                raise SlotLost("slot 1 was killed by SIGKILL while it ran Generate")
            return await super().generate(request)

    stage = Stage(tmp_path, generators=Breaks)
    with pytest.raises(SlotLost, match="slot 1 was killed"):
        run(stage.go())
    assert [step for step, _ in stage.saved] == [2], "the trainer is as good as before"
    assert stage.fake_generators.num_running == 0


def test_a_group_that_has_failed_is_not_there_to_be_stopped(tmp_path):
    """It is still in the books when the next version goes live, too old by then: that must not hide what failed."""

    class Breaks(FakeGenerators):
        async def generate(self, request):
            if len(self.requests) == 4:
                raise SlotLost("slot 1 was killed by SIGKILL while it ran Generate")
            return await super().generate(request)

    stage = Stage(tmp_path, max_off_policy_steps=1, generators=Breaks)
    with pytest.raises(SlotLost, match="slot 1 was killed"):
        run(stage.go())
    stage.buffer.next_version(9)
    assert stage.buffer.stale_in_flight()
    stage.rollouts.now_live(9)


def test_an_advantage_function_that_raises_ends_the_run_with_a_sentence_and_its_steps_saved(tmp_path):
    def unfair(rewards, group):
        if stage.loop.step == 2:
            return [1 / 0]
        return mean_baseline(rewards, group)

    stage = Stage(tmp_path, max_steps=50, advantage=unfair)
    said = (
        r"orchestrator.advantage failed on prompt train/0/\d+: "
        r"ZeroDivisionError: division by zero \(test_loop_ending.py:"
    )
    with pytest.raises(CustomCodeFailed, match=said):
        run(stage.go())
    assert [step for step, _ in stage.saved] == [2]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_a_failing_evaluation_neither_loses_the_step_nor_its_row(tmp_path):
    class Dies(FakeGenerators):
        async def generate(self, request):
            if request.id.startswith("eval") and self.version == 2:
                raise SlotLost("slot 1 was killed by SIGKILL while it ran Generate")
            return await super().generate(request)

    stage = Stage(tmp_path, max_steps=4, eval_prompts=2, eval_interval=2, generators=Dies)
    with pytest.raises(SlotLost):
        run(stage.go())
    assert [step for step, _ in stage.saved] == [2]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("optim_s", [0.1, 20.0])
def test_a_death_leaves_no_optimizer_step_half_done(tmp_path, optim_s):
    """The weights and the books of what they were trained on are saved together."""

    async def death():
        await asyncio.sleep(7.3)
        return "slot 1 (generate, pid 7) was killed by SIGKILL while idle"

    stage = Stage(tmp_path, max_steps=50, trainer=partial(FakeTrainer, optim_s=optim_s), death=death)
    with pytest.raises(SlotDied, match="slot 1"):
        run(stage.go())
    [(step, _)] = stage.saved
    assert step == stage.fake_trainer.steps
    assert len(stage.trained) == 4 * step


@pytest.mark.parametrize("updates_of_the_next_step", [0, 1])
def test_who_asks_to_stop_in_a_long_step_has_the_last_one_saved_at_once(tmp_path, updates_of_the_next_step):
    """Batch systems kill half a minute after they ask, and a step may take ten times as long.

    Weights that an update of the next step has changed already belong to no step, and are not saved.
    """
    saved_soon = []

    async def ask(stage):
        async def later():
            while stage.fake_trainer.steps < 2 + updates_of_the_next_step:  # noqa: ASYNC110
                await asyncio.sleep(1)
            await asyncio.sleep(10)
            stage.stop.set()
            await asyncio.sleep(1)
            saved_soon.extend(step for step, _ in stage.saved)

        stage.asking = asyncio.create_task(later())

    stage = Stage(tmp_path, max_steps=50, n_minibatches=2, trainer=partial(FakeTrainer, chunk_s=100.0))
    assert run(stage.go(ask)) == 2
    assert saved_soon == ([1] if updates_of_the_next_step == 0 else [])
    assert [step for step, _ in stage.saved] == [*saved_soon, 2], "the step under way is finished, too"


def test_a_trainer_that_cannot_be_saved_is_an_event_and_the_cause_is_raised(tmp_path):
    class Dies(FakeTrainer):
        async def publish(self, version):
            if version == 2:
                raise SlotLost("slot 0 (train) was killed by SIGKILL")
            return await super().publish(version)

    class NoSaver(NotingSaver):
        async def save(self, progress):
            raise SlotLost("slot 0 (train) is gone")

    with pytest.raises(SlotLost, match="was killed by SIGKILL"):
        run(Stage(tmp_path, max_steps=5, trainer=Dies, saver=NoSaver).go())
    told = [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "not_saved"]
    assert told == ["Nothing of this run is saved: slot 0 (train) is gone."]


def test_an_error_of_the_trainer_is_not_hidden_by_slow_generators(tmp_path):
    class Dies(FakeTrainer):
        async def forward_backward(self, samples, seq_len):
            await asyncio.sleep(1)
            raise SlotLost("slot 0 (train) was killed by SIGKILL")

    slow_tail = lambda request: 1.0 if int(request.id.split("/")[2]) % 2 else 500.0  # noqa: E731

    async def timed(stage):
        with pytest.raises(SlotLost, match="slot 0"):
            await stage.go()
        return clock()

    stage = Stage(tmp_path, trainer=Dies, generators=partial(FakeGenerators, delay=slow_tail, capacity=100))
    assert run(timed(stage)) < 10


def test_nothing_to_train_on_within_the_deadline_says_so(tmp_path):
    stage = Stage(tmp_path, timeout_s=50, generators=partial(FakeGenerators, delay=lambda request: 1e6))
    with pytest.raises(
        Late,
        match=r"no prompt group to train on within 50 s \(cluster.group_timeout_s\): \d+ groups are being generated",
    ):
        run(stage.go())


def test_cancelling_the_run_leaves_nothing_behind(tmp_path):
    async def cancelled(stage):
        task = asyncio.create_task(stage.go())
        await asyncio.sleep(1.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    stage = Stage(tmp_path, max_steps=50)
    run(cancelled(stage))
    assert stage.fake_generators.num_running == 0
    assert not stage.fake_trainer.busy


def test_steps_that_are_thrown_away_are_told_and_too_many_in_a_row_end_the_run_saved(tmp_path):
    trainer = partial(FakeTrainer, skips={2, 4, 5, 7, 8, 9, 10})
    stage = Stage(tmp_path, max_steps=20, max_skipped_steps=3, trainer=trainer)
    said = (
        r"last 3 optimizer steps were not finite \(trainer\.optim\.max_skipped_steps\).* trainer\.model\.compute_dtype"
    )
    with pytest.raises(Diverged, match=said):
        run(stage.go())
    told = [row["step"] for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "step_skipped"]
    assert told == [2, 4, 5, 7, 8, 9]
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 9
    assert stage.saved[-1][0] == 9


def test_without_a_limit_steps_are_thrown_away_for_ever(tmp_path):
    stage = Stage(tmp_path, max_steps=5, max_skipped_steps=None, trainer=partial(FakeTrainer, skips=range(9)))
    assert run(stage.go()) == 5
