import asyncio
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ductile.core.batch.advantage import mean_baseline
from ductile.loop.attend import SlotDied
from ductile.loop.evaluate import RewardsFailed
from ductile.loop.overlap import Pause
from ductile.loop.progress import Progress
from ductile.loop.skips import Diverged
from ductile.observe import Recorder, read_jsonl
from ductile.records import Prompt, Rollout, RolloutGroup
from ductile.roles import CustomCodeFailed, Late, SlotLost
from ductile.tasks.grader import Verdict
from tests.loop.doubles import (
    FakeGenerators,
    FakeScorer,
    FakeTrainer,
    InProcessGraders,
    Stage,
    clock,
    random_delays,
    run,
)


def test_the_order_of_one_round(tmp_path):
    stage = Stage(tmp_path, max_steps=2, max_async_level=0, scorer=FakeScorer, eval_prompts=2)
    assert run(stage.go()) == 2
    verbs = stage.diary.what("publish", "live", "withdraw", "optim_step", "checkpoint")
    once = ["publish", "live", "withdraw"]
    assert [verb.split()[0] for verb in verbs] == [*once, "optim_step", *once, "optim_step", *once, "checkpoint"]
    assert verbs[-1] == "checkpoint 2"


def test_the_trainer_works_on_the_first_groups_while_others_are_generated(tmp_path):
    slow_last = lambda request: 10.0 if int(request.id.split("/")[2]) % 4 == 3 else 1.0  # noqa: E731
    stage = Stage(tmp_path, max_steps=1, max_async_level=0, generators=partial(FakeGenerators, delay=slow_last))
    run(stage.go())
    first_work = next(at for at, what in stage.diary.lines if what.startswith("forward_backward"))
    last_group_s = max(at for at, what in stage.diary.lines if what.startswith("forward_backward"))
    assert first_work < 2
    assert last_group_s > 10
    assert len(stage.diary.what("optim_step")) == 1


def test_the_next_chunk_is_scored_while_the_trainer_works(tmp_path):
    stage = Stage(
        tmp_path,
        max_steps=1,
        groups_per_step=8,
        generators=partial(FakeGenerators, capacity=64, num_tokens=8),
        trainer=partial(FakeTrainer, chunk_s=5.0),
        scorer=FakeScorer,
    )
    run(stage.go())
    scored = [at for at, what in stage.diary.lines if what.startswith("score")]
    trained = [at for at, what in stage.diary.lines if what == "forward_backward done"]
    assert len(scored) == len(trained) == 3
    assert scored[1] < trained[0]
    assert scored[2] == trained[0], "one chunk ahead, not more: the scorer must not outrun the trainer"


class UntilAllIsScored:
    """In place of a conductor: training waits until all that the step trains on is scored."""

    def __init__(self, loop):
        self.hold, self.loop = Pause(), loop
        self.notify()

    def notify(self):
        self.hold.set(self.loop.buffer.num_taken < 8 or self.loop.scoring.rollouts > 0)

    def settle(self, version):
        pass

    async def joined(self):
        pass

    def go_on(self):
        pass


class HeldTrainer(FakeTrainer):
    hold: Pause

    async def forward_backward(self, samples, seq_len):
        self.diary.note(f"given {len(samples)}")
        await self.hold.over.wait()
        await super().forward_backward(samples, seq_len)


@pytest.mark.parametrize("capacity", [3, 64])
def test_a_trainer_that_is_held_until_all_is_scored_goes_on(tmp_path, capacity):
    """Else chunk upon chunk would wait for the trainer to take the one before."""

    async def hold(stage):
        stage.loop.conductor = UntilAllIsScored(stage.loop)
        stage.fake_trainer.hold = stage.loop.conductor.hold

    stage = Stage(
        tmp_path,
        max_steps=1,
        groups_per_step=8,
        generators=partial(FakeGenerators, capacity=capacity, num_tokens=8),
        trainer=HeldTrainer,
        scorer=FakeScorer,
        drop_zero_advantage=False,
    )
    assert run(stage.go(hold)) == 1
    assert len(stage.diary.what("score")) > 2
    assert len(stage.diary.what("given")) == 2, "what was scored meanwhile goes to the trainer as one"
    assert len(stage.fake_trainer.samples) == 16
    assert stage.fake_trainer.divisors == [16 * 8]


def test_every_sample_has_the_scorers_logprobs(tmp_path):
    stage = Stage(tmp_path, scorer=FakeScorer, needs_reference=True)
    run(stage.go())
    assert {sample.old_logprobs[-1] for sample in stage.fake_trainer.samples} == {-0.25}
    assert {sample.ref_logprobs[-1] for sample in stage.fake_trainer.samples} == {-1.0}


def test_the_scorer_has_the_weights_that_are_trained(tmp_path):
    stage = Stage(tmp_path, scorer=FakeScorer)
    run(stage.go())
    scored_with = []
    step = 0
    for _, what in stage.diary.lines:
        step += what == "optim_step"
        if what.startswith("score policy"):
            scored_with.append((step, int(what.split()[-1])))
    assert scored_with
    assert all(step == version for step, version in scored_with)


def test_the_trainer_goes_on_while_new_weights_travel(tmp_path):
    slow = partial(FakeGenerators, receive_s=5.0, capacity=64, delay=lambda request: 0.01)
    stage = Stage(tmp_path, max_steps=3, max_async_level=2, generators=slow, trainer=partial(FakeTrainer, chunk_s=1.0))
    run(stage.go())
    live_1 = next(at for at, what in stage.diary.lines if what == "live 1")
    second_step = [at for at, what in stage.diary.lines if what == "publish 2"]
    assert second_step[0] < live_1, "what was there to train on did not have to wait"
    assert stage.diary.what("live", "withdraw") == [
        f"{verb} {version}" for version in range(4) for verb in ("live", "withdraw")
    ], "no version is withdrawn before it is live, none overtakes another"


def test_slots_settle_for_the_next_version_when_the_last_one_is_live(tmp_path):
    """Training may outrun slow weights, and what is decided then would be decided twice at once."""

    class Settling:
        def __init__(self, diary):
            self.diary = diary

        def settle(self, version):
            self.diary.note(f"settle {version}")

        async def joined(self):
            self.diary.note("joined")

        def go_on(self):
            self.diary.note("go on")

    async def conducted(stage):
        stage.loop.conductor = Settling(stage.diary)

    slow = partial(FakeGenerators, receive_s=5.0, capacity=64, delay=lambda request: 0.01)
    stage = Stage(tmp_path, max_steps=3, max_async_level=2, generators=slow, trainer=partial(FakeTrainer, chunk_s=1.0))
    run(stage.go(conducted))
    assert stage.diary.what("optim_step", "settle 2", "live 1")[:4] == ["optim_step"] * 2 + ["live 1", "settle 2"]
    told = stage.diary.what("settle", "go on")
    assert told[1:] == [what for version in (1, 2, 3) for what in (f"settle {version}", "go on")]
    order = stage.diary.what("publish", "joined", "live")
    assert order[3:] == [what for version in (1, 2, 3) for what in (f"publish {version}", "joined", f"live {version}")]


def test_nothing_is_started_with_weights_that_are_about_to_be_replaced(tmp_path):
    stage = Stage(tmp_path, max_steps=4, max_async_level=1, generators=partial(FakeGenerators, receive_s=5.0))
    run(stage.go())
    publishing = False
    for _, what in stage.diary.lines:
        publishing = what.startswith("publish") or (publishing and not what.startswith("live"))
        assert not (publishing and what.startswith("start"))


def test_weights_that_do_not_arrive_end_the_run(tmp_path):
    class Refusing(FakeGenerators):
        async def receive(self, manifest):
            if manifest.version == 1:
                raise RuntimeError("slot 1 (generate) refused Receive")
            await super().receive(manifest)

    stage = Stage(tmp_path, max_steps=3, generators=Refusing)
    with pytest.raises(RuntimeError, match="refused Receive"):
        run(stage.go())


def test_strictly_on_policy_without_async(tmp_path):
    stage = Stage(tmp_path, max_steps=5, max_async_level=0, generators=partial(FakeGenerators, delay=random_delays(3)))
    run(stage.go())
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["off_policy_max"] for row in rows if row["step"]] == [0.0] * 5
    assert stage.fake_generators.num_aborted == 0
    assert len(stage.fake_generators.requests) == 5 * 4 * 2


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    max_async_level=st.integers(0, 3),
    max_off_policy_steps=st.integers(0, 3),
    groups_per_step=st.integers(1, 5),
    n_minibatches=st.integers(1, 3),
    capacity=st.integers(1, 40),
    num_ranks=st.integers(1, 3),
)
def test_never_beyond_the_bound_whatever_the_delays(
    tmp_path_factory, seed, max_async_level, max_off_policy_steps, groups_per_step, n_minibatches, capacity, num_ranks
):
    folder = tmp_path_factory.mktemp("run")
    stage = Stage(
        folder,
        max_steps=4,
        groups_per_step=groups_per_step,
        n_minibatches=min(n_minibatches, groups_per_step),
        max_async_level=max_async_level,
        max_off_policy_steps=max_off_policy_steps,
        generators=partial(FakeGenerators, capacity=capacity, delay=random_delays(seed)),
        trainer=partial(FakeTrainer, num_ranks=num_ranks, chunk_s=0.1),
    )
    assert run(stage.go()) == 4
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"]]
    bound = 0 if max_async_level == 0 else max_off_policy_steps
    assert max(row["off_policy_max"] for row in rows) <= bound
    assert len(stage.learned) == 4 * groups_per_step
    assert len({prompt.id for _, prompt in stage.learned}) == len(stage.learned)
    assert stage.fake_generators.max_running < capacity + stage.group_size
    assert stage.fake_generators.num_running == 0


def test_minibatches_are_optimizer_steps_over_shares_of_the_groups(tmp_path):
    stage = Stage(tmp_path, max_steps=2, groups_per_step=5, n_minibatches=2)
    run(stage.go())
    assert stage.fake_trainer.steps == 4
    assert stage.diary.what("publish") == ["publish 0", "publish 1", "publish 2"]
    # token_mean: the divisor is the number of sampled tokens, 2 an answer, 2 answers a group
    assert stage.fake_trainer.divisors == [3 * 4, 2 * 4, 3 * 4, 2 * 4]


def test_a_batch_without_any_advantage_takes_no_optimizer_step(tmp_path):
    stage = Stage(tmp_path, max_steps=2, generators=partial(FakeGenerators, digit=lambda request: 1))
    assert run(stage.go()) == 2
    assert stage.fake_trainer.divisors == []
    assert stage.fake_trainer.samples == []
    assert stage.fake_trainer.steps == 2  # of the schedule, which ends with the run
    assert "nothing_to_learn" in [row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")]
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["groups_equal"] == 4


class FailAfter(InProcessGraders):
    """The rewards of the first 20 answers work, and no other."""

    num_asked = 0

    async def reward(self, task, example, completion):
        self.num_asked += 1
        if self.num_asked > 20:
            return Verdict(error="the reward raised KeyError")
        return await super().reward(task, example, completion)


def test_rewards_that_fail_end_the_run_when_they_are_too_many(tmp_path):
    stage = Stage(tmp_path, max_steps=9, graders=FailAfter, max_reward_error_share=0.5)
    with pytest.raises(
        RewardsFailed, match=r"in step \d \d of 8 rewards failed; the last time the reward raised KeyErr"
    ):
        run(stage.go())
    shares = [row["reward_error_share"] for row in read_jsonl(tmp_path / "metrics.jsonl")[1:]]
    assert shares[0] == 0
    assert max(shares[:-1]) <= 0.5 < shares[-1]


def test_groups_that_are_too_old_are_asked_again(tmp_path):
    class OneSlowGroup(FakeGenerators):
        slow = ""

        async def generate(self, request):
            self.slow = self.slow or request.group
            self.delay = lambda request: 30.0 if request.group == self.slow and self.version < 3 else 0.5
            return await super().generate(request)

    stage = Stage(tmp_path, max_steps=6, max_off_policy_steps=1, generators=OneSlowGroup)
    run(stage.go())
    slow = stage.fake_generators.slow
    assert slow in [prompt.id for _, prompt in stage.learned]
    assert stage.buffer.num_dropped >= 1
    events = [row for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "group_dropped"]
    assert events[0]["prompt"] == slow
    assert "max_off_policy_steps is 1" in events[0]["sentence"]
    assert stage.fake_generators.num_aborted == 2 * stage.buffer.num_dropped


def test_generation_runs_ahead_but_not_further_than_asked(tmp_path):
    stage = Stage(
        tmp_path,
        max_steps=4,
        max_async_level=1,
        generators=partial(FakeGenerators, capacity=1000, delay=lambda request: 0.1),
        trainer=partial(FakeTrainer, chunk_s=20.0),
    )
    run(stage.go())
    live, started = -1, {}
    for _, what in stage.diary.lines:
        if what.startswith("live"):
            live += 1
        if what.startswith("start"):
            started.setdefault(live, set()).add(what)
    assert {version: len(groups) for version, groups in started.items()} == {0: 8, 1: 4, 2: 4}


def test_evaluation_sees_one_version_and_comes_first_last_and_when_due(tmp_path):
    stage = Stage(tmp_path, max_steps=4, eval_prompts=3, eval_interval=2)
    run(stage.go())
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2, 4]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    requests = stage.fake_generators.requests
    evaluated = [request.priority for request in requests if "eval" in request.id]
    assert min(evaluated) > max(request.priority for request in requests if "eval" not in request.id)


async def after_step_1(stage):
    while not stage.fake_trainer.steps:
        await stage.buffer.changed()


async def stop_soon(stage):
    await asyncio.sleep(2.0)
    stage.stop.set()


def test_stop_finishes_the_step_and_saves(tmp_path):
    stage = Stage(tmp_path, max_steps=50)
    step = run(stage.go(during=stop_soon))
    assert 0 < step < 50
    assert stage.saved[-1][0] == step
    assert len(stage.learned) == 4 * step
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == step


def test_stop_does_not_wait_for_an_evaluation(tmp_path):
    eval_forever = lambda request: 1e5 if "eval" in request.id else 0.1  # noqa: E731
    stage = Stage(tmp_path, eval_prompts=2, timeout_s=10, generators=partial(FakeGenerators, delay=eval_forever))
    assert run(stage.go(during=stop_soon)) == 0
    assert stage.fake_generators.num_running == 0
    assert stage.saved == []


def test_nothing_is_started_beyond_the_step_that_is_the_last(tmp_path):
    stage = Stage(tmp_path, max_steps=50, max_async_level=3, generators=partial(FakeGenerators, capacity=2))
    run(stage.go(during=stop_soon))
    stopped = [at for at, what in stage.diary.lines if what.startswith("start") and at > 2.0]
    assert len({prompt.id for _, prompt in stage.learned}) == 4
    assert len(stage.fake_generators.requests) == 8, "the first step's, and no more"
    assert stopped


def test_resume_trains_each_prompt_once_an_epoch(tmp_path):
    """With groups in flight and in the buffer at the save, and the run stopped and continued again and again."""
    whole = Stage(tmp_path / "whole", max_steps=10, num_examples=20)
    run(whole.go())
    step, position, learned, lives = 0, None, [], 0
    while step < 10:
        stage = Stage(
            tmp_path / f"life{lives}",
            max_steps=10,
            num_examples=20,
            step=step,
            position=position,
            generators=partial(FakeGenerators, delay=random_delays(lives)),
        )
        run(stage.go(during=stop_soon))
        assert stage.saved[-1][0] > step
        step, position = stage.saved[-1]
        learned += stage.learned
        lives += 1
    assert lives > 2
    assert sorted(prompt.id for _, prompt in learned) == sorted(prompt.id for _, prompt in whole.learned)
    assert len({prompt.id for _, prompt in learned}) == 40  # two epochs of 20


def test_a_killed_run_repeats_only_what_the_checkpoint_does_not_know(tmp_path):
    stage = Stage(tmp_path, max_steps=6, save_interval=2, num_examples=24)
    run(stage.go())
    step, position = stage.saved[0]
    again = Stage(tmp_path / "again", max_steps=6, num_examples=24, step=step, position=position)
    run(again.go())
    before = {prompt.id for at, prompt in stage.learned if at < step}
    after = {prompt.id for _, prompt in again.learned}
    assert not before & after
    assert len(before | after) == 24
    assert Progress.from_json({"step": step, "prompts": {"next": 1, "under_way": [3]}}).step == step


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
    assert stage.buffer.hopeless()
    stage.rollouts.now_live(9)


def test_ctrl_c_does_not_wait_for_generators_to_take_weights(tmp_path):
    """The running step is saved at once, and nobody would sample from its weights."""

    class Deaf(FakeGenerators):
        async def receive(self, manifest):
            if manifest.version == 1:
                await asyncio.sleep(100)
                raise Late("slot 1 did not answer Receive within 100 s")
            await super().receive(manifest)

    async def stop(stage):
        await after_step_1(stage)
        stage.stop.set()

    stage = Stage(tmp_path, max_steps=50, generators=Deaf)
    with pytest.raises(Late, match="Receive"):
        run(stage.go(stop))
    [saved_s] = [at for at, what in stage.diary.lines if what == "checkpoint 2"]
    assert saved_s < 10
    assert stage.diary.what("publish") == ["publish 0", "publish 1"]


def test_an_advantage_function_that_raises_ends_the_run_with_a_sentence_and_its_steps_saved(tmp_path):
    def unfair(rewards, group):
        if stage.loop.step == 2:
            return [1 / 0]
        return mean_baseline(rewards, group)

    stage = Stage(tmp_path, max_steps=50, advantage=unfair)
    said = r"orchestrator.advantage failed on prompt train/0/\d+: ZeroDivisionError: division by zero \(test_loop.py:"
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
    """The weights and the books of what they have learned are saved together."""

    async def death():
        await asyncio.sleep(7.3)
        return "slot 1 (generate, pid 7) was killed by SIGKILL while idle"

    stage = Stage(tmp_path, max_steps=50, trainer=partial(FakeTrainer, optim_s=optim_s), death=death)
    with pytest.raises(SlotDied, match="slot 1"):
        run(stage.go())
    [(step, _)] = stage.saved
    assert step == stage.fake_trainer.steps
    assert len(stage.learned) == 4 * step


def test_a_trainer_that_cannot_be_saved_is_an_event_and_the_cause_is_raised(tmp_path):
    class Dies(FakeTrainer):
        async def publish(self, version):
            if version == 2:
                raise SlotLost("slot 0 (train) was killed by SIGKILL")
            return await super().publish(version)

    async def save(step):
        raise SlotLost("slot 0 (train) is gone")

    async def no_save(stage):
        stage.loop.save = save

    with pytest.raises(SlotLost, match="was killed by SIGKILL"):
        run(Stage(tmp_path, max_steps=5, trainer=Dies).go(no_save))
    told = [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "not_saved"]
    assert told == ["What was trained since the last checkpoint cannot be saved: slot 0 (train) is gone."]


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
    with pytest.raises(Late, match=r"no prompt group to train on within 50 s: \d+ groups are being generated"):
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


def test_a_prompt_that_is_dropped_twice_is_told_once_with_what_to_change(tmp_path):
    class OneSlowGroup(FakeGenerators):
        slow = ""

        async def generate(self, request):
            self.slow = self.slow or request.group
            self.delay = lambda request: 30.0 if request.group == self.slow and self.version < 7 else 0.5
            return await super().generate(request)

    stage = Stage(tmp_path, max_steps=10, max_off_policy_steps=1, generators=OneSlowGroup)
    run(stage.go())
    events = read_jsonl(tmp_path / "events.jsonl")
    assert len([row for row in events if row["kind"] == "group_dropped"]) > 2
    (told,) = [row for row in events if row["kind"] == "prompt_dropped_twice"]
    assert told["prompt"] == stage.fake_generators.slow
    assert "orchestrator.max_off_policy_steps (1)" in told["sentence"]


def test_the_lengths_of_answers_that_are_dropped_when_finished_are_counted(tmp_path):
    stage = Stage(tmp_path, max_steps=2)
    run(stage.go())
    buffer = stage.buffer
    buffer._record = Recorder(tmp_path / "afterwards")
    prompt = Prompt("train/0/99", "t", 0, (1,))
    buffer._running[prompt.id] = buffer._prompts._under_way[prompt.id] = 0
    short, long = (Rollout((7,) * n, (True,) * n, (0.0,) * n, (-50,) * n, "stop", 1.0) for n in (2, 8))
    buffer.put(RolloutGroup(prompt, (short, long)))
    buffer._drop_stale()
    assert (buffer.num_dropped_answers, buffer.num_dropped_tokens) == (2, 10)
