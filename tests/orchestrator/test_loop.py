import asyncio
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ductile.core.rollouts.provenance import KnownWeights
from ductile.observe import Recorder, read_jsonl
from ductile.records import Prompt, Rollout, RolloutGroup
from tests.nightly import examples
from tests.orchestrator.doubles import (
    FakeGenerators,
    FakeScorer,
    FakeTrainer,
    InProcessGraders,
    Stage,
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


def test_a_group_without_samples_keeps_no_other_from_being_scored(tmp_path):
    """The first group keeps the trainer at work, all rewards of the second are equal, and the third is not to wait."""
    order: dict[str, int] = {}
    number = lambda request: order.setdefault(str(request.group), len(order))  # noqa: E731
    completions: dict[int, int] = {}

    def digit(request):
        group = number(request)
        completions[group] = completions.get(group, 0) + 1
        return 1 if group == 1 else completions[group]

    stage = Stage(
        tmp_path,
        max_steps=1,
        groups_per_step=3,
        max_async_level=0,
        scorer=partial(FakeScorer, score_s=1.0),
        trainer=partial(FakeTrainer, chunk_s=10.0),
        generators=partial(FakeGenerators, capacity=64, delay=lambda request: (1, 3, 5)[number(request)], digit=digit),
    )
    run(stage.go())
    happened = [what.split()[0] for what in stage.diary.what("score", "forward_backward done")]
    assert happened == ["score", "score", "forward_backward", "forward_backward"]


class OneByOne(InProcessGraders):
    """Rewards of one grader process, each of which takes a while."""

    def __init__(self, tasks, seconds):
        super().__init__(tasks)
        self.free, self.seconds = asyncio.Lock(), seconds

    async def reward(self, task, example, completion):
        async with self.free:
            await asyncio.sleep(self.seconds)
        return await super().reward(task, example, completion)


def test_completions_that_end_together_are_one_chunk_where_rewards_are_quick(tmp_path):
    for seconds, chunks in ((0.005, ["forward_backward 8"]), (1.0, ["forward_backward 2"] * 4)):
        graders = partial(OneByOne, seconds=seconds)
        stage = Stage(tmp_path / str(seconds), max_steps=1, seq_len=100, graders=graders)
        run(stage.go())
        assert [what for what in stage.diary.what("forward_backward") if not what.endswith("done")] == chunks


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


def test_strictly_on_policy_without_async(tmp_path):
    stage = Stage(tmp_path, max_steps=5, max_async_level=0, generators=partial(FakeGenerators, delay=random_delays(3)))
    run(stage.go())
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["off_policy_max"] for row in rows if row["step"]] == [0.0] * 5
    assert stage.fake_generators.num_aborted == 0
    assert len(stage.fake_generators.requests) == 5 * 4 * 2


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    max_async_level=st.integers(0, 3),
    max_off_policy_steps=st.integers(0, 3),
    groups_per_step=st.integers(1, 5),
    n_minibatches=st.integers(1, 3),
    capacity=st.integers(1, 40),
    num_ranks=st.integers(1, 3),
    per_rank=st.sampled_from([1, 8]),
    on_stale=st.sampled_from(["drop", "wait"]),
)
def test_never_beyond_the_bound_whatever_the_delays(
    tmp_path_factory,
    seed,
    max_async_level,
    max_off_policy_steps,
    groups_per_step,
    n_minibatches,
    capacity,
    num_ranks,
    per_rank,
    on_stale,
):
    folder = tmp_path_factory.mktemp("run")
    stage = Stage(
        folder,
        max_steps=4,
        groups_per_step=groups_per_step,
        n_minibatches=min(n_minibatches, groups_per_step),
        max_async_level=max_async_level,
        max_off_policy_steps=max_off_policy_steps,
        on_stale=on_stale,
        generators=partial(FakeGenerators, capacity=capacity, delay=random_delays(seed)),
        trainer=partial(FakeTrainer, num_ranks=num_ranks, micro_batches_per_rank=per_rank, chunk_s=0.1),
    )
    assert run(stage.go()) == 4
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["step"]]
    bound = 0 if max_async_level == 0 else max_off_policy_steps
    assert max(row["off_policy_max"] for row in rows) <= bound
    assert len(stage.trained) == 4 * groups_per_step
    assert len({prompt.id for _, prompt in stage.trained}) == len(stage.trained)
    assert stage.fake_generators.max_running < capacity + stage.group_size
    assert stage.fake_generators.num_running == 0
    if on_stale == "wait":
        assert stage.buffer.num_dropped == 0
        assert len(stage.fake_generators.requests) == 4 * groups_per_step * stage.group_size


def test_minibatches_are_optimizer_steps_over_shares_of_the_groups(tmp_path):
    stage = Stage(tmp_path, max_steps=2, groups_per_step=5, n_minibatches=2)
    run(stage.go())
    assert stage.fake_trainer.steps == 4
    assert stage.diary.what("publish") == ["publish 0", "publish 1", "publish 2"]
    # token_mean: the loss denominator is the number of sampled tokens, 2 a completion, 2 completions a group
    assert stage.fake_trainer.loss_denominators == [3 * 4, 2 * 4, 3 * 4, 2 * 4]


def test_a_batch_without_any_advantage_takes_no_optimizer_step(tmp_path):
    stage = Stage(tmp_path, max_steps=2, generators=partial(FakeGenerators, digit=lambda request: 1))
    assert run(stage.go()) == 2
    assert stage.fake_trainer.loss_denominators == []
    assert stage.fake_trainer.samples == []
    assert stage.fake_trainer.steps == 2  # of the schedule, which ends with the run
    assert "nothing_to_learn" in [row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")]
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["groups_equal"] == 4


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
    assert slow in [prompt.id for _, prompt in stage.trained]
    assert stage.buffer.num_dropped >= 1
    events = [row for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "group_dropped"]
    assert events[0]["prompt"] == slow
    assert "max_off_policy_steps is 1" in events[0]["sentence"]
    assert stage.fake_generators.num_aborted == 2 * stage.buffer.num_dropped


def test_the_trainer_waits_for_slow_groups_so_that_it_learns_from_all_lengths_alike(tmp_path):
    class LongIsSlow(FakeGenerators):
        async def generate(self, request):
            self.num_tokens = 20 if hash(request.group) % 3 == 0 else 2
            self.delay = lambda request: 10.0 if hash(request.group) % 3 == 0 else 0.5
            return await super().generate(request)

    rows = {}
    for on_stale in ("drop", "wait"):
        stage = Stage(
            tmp_path / on_stale, 8, max_off_policy_steps=1, seq_len=32, on_stale=on_stale, generators=LongIsSlow
        )
        run(stage.go())
        rows[on_stale] = read_jsonl(tmp_path / on_stale / "metrics.jsonl")[-1]
    assert rows["drop"]["groups_dropped"] > 0 < rows["drop"]["stopped_completions"]
    assert rows["wait"]["groups_dropped"] == rows["wait"]["stopped_completions"] == 0
    assert rows["wait"]["trained_length_mean"] == rows["wait"]["sampled_length_mean"] > 2


@pytest.mark.parametrize("known_by", ["the trainer's snapshot", "what was sent to servers"])
def test_tokens_of_weights_that_were_never_published_are_not_trained_on(tmp_path, known_by):
    class Publishes(FakeTrainer):
        async def publish(self, version):
            return replace(await super().publish(version), digest=f"digest {version}")

    def hear(stage):
        async def heard():
            stage.loop.publisher.on_live.add(lives.append)

        return heard()

    class LiesOnce(FakeGenerators):
        liar = ""

        async def receive(self, manifest):
            given = await super().receive(manifest)
            sent = KnownWeights(manifest.version, f"digest {manifest.version}", {"embed": "its part"})
            return given if given.digest else sent

        async def generate(self, request):
            self.liar = self.liar or request.id
            generation = await super().generate(request)
            lies = request.id == self.liar and len(self.requests) < 20
            digests = {version: "another" if lies else f"digest {version}" for version in generation.versions}
            return replace(generation, digests=digests)

    lives = []
    trainer = Publishes if known_by == "the trainer's snapshot" else FakeTrainer
    stage = Stage(tmp_path, max_steps=3, generators=LiesOnce, trainer=trainer)
    assert run(stage.go(hear)) == 3
    assert [each.digest for each in lives] == [f"digest {version}" for version in range(4)]
    assert all(each.tensors for each in lives) == (trainer is FakeTrainer), "the canaries see which tensor is wrong"
    group = stage.fake_generators.liar.rsplit("/", 2)[0]
    (told,) = [row for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "group_refused"]
    assert told["prompt"] == group
    assert "weights another that are called version 0" in told["sentence"]
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["groups_refused"] == 1
    assert [prompt.id for _, prompt in stage.trained].count(group) == 1
    assert len(stage.trained) == 3 * 4


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


def test_the_lengths_of_completions_that_are_dropped_when_finished_are_counted(tmp_path):
    stage = Stage(tmp_path, max_steps=2)
    run(stage.go())
    buffer = stage.buffer
    buffer._record = Recorder(tmp_path / "afterwards")
    prompt = Prompt("train/0/99", "t", 0, (1,))
    buffer._running[prompt.id] = buffer._prompts._under_way[prompt.id] = 0
    short, long = (Rollout((7,) * n, (True,) * n, (0.0,) * n, (-50,) * n, "stop", 1.0) for n in (2, 8))
    buffer.put(RolloutGroup(prompt, (short, long)))
    buffer._drop_stale()
    assert (buffer.num_dropped_completions, buffer.num_dropped_tokens) == (2, 10)
