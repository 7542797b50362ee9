import asyncio

import pytest

from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.loop.episode import Episodes
from ductile.orchestrator.loop.evaluate import Evaluation, RewardsFailed, pass_at_k
from ductile.records import Prompt, Sampling
from ductile.tasks.grader import Graded
from tests.orchestrator.doubles import Count, Diary, FakeGenerators, InProcessGraders, Letters, run


def test_pass_at_k_equals_counting_all_choices():
    from itertools import combinations

    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([1] * c + [0] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_evaluation_reports_average_pass_at_k_and_samples(tmp_path):
    async def evaluate():
        # Of each prompt's four completions the first scores 1, the others 0.
        generators = FakeGenerators(Diary(), digit=lambda request: int("/0/" in request.id.removeprefix("eval/0/")[1:]))
        generators.version = 0
        tasks = {"train": Count()}
        letters = Letters()
        episodes = Episodes(tasks, letters, generators, InProcessGraders(tasks), 64)
        prompts = [Prompt(f"eval/0/{i}", "train", i, (ord("a") + i,)) for i in range(5)]
        record = Recorder(tmp_path)
        evaluation = Evaluation(episodes, prompts, Sampling(), record, samples_per_example=4)
        report = await evaluation.run(step=7)
        record.close()
        return report, evaluation, generators

    report, evaluation, generators = run(evaluate())
    assert report.reward_mean == 0.25
    assert report.pass_at == {1: 0.25, 2: 0.5, 4: 1.0}
    assert report.num_completions == 20
    assert report.metrics() == {
        "eval_reward": 0.25,
        "eval_length_mean": 2.0,
        "eval_reward_error_share": 0.0,
        "eval_pass_at_1": 0.25,
        "eval_pass_at_2": 0.5,
        "eval_pass_at_4": 1.0,
    }
    assert [sample.prompt for sample in report.samples] == ["0", "1", "2"]
    assert report.samples[0].completion == "x1"
    assert evaluation.last is report
    assert len({request.id for request in generators.requests}) == 20
    event = read_jsonl(tmp_path / "events.jsonl")[0]
    assert event["sentence"] == "Held-out reward after step 7: 0.250, over 20 completions."


class FailsOn(InProcessGraders):
    """Rewards that fail for the completions that `fails` names."""

    def __init__(self, tasks, fails):
        super().__init__(tasks)
        self.fails = fails

    async def reward(self, task, example, completion):
        if self.fails(example):
            return Graded(error=f"the reward of example {example} raised KeyError")
        return await super().reward(task, example, completion)


def evaluate_with(tmp_path, fails, **keys):
    async def evaluate():
        generators = FakeGenerators(Diary(), digit=lambda request: 1)
        generators.version = 0
        tasks = {"train": Count()}
        episodes = Episodes(tasks, Letters(), generators, FailsOn(tasks, fails), 64)
        prompts = [Prompt(f"eval/0/{i}", "train", i, (65,)) for i in range(4)]
        return await Evaluation(episodes, prompts, Sampling(), Recorder(tmp_path), **keys).run(0)

    return run(evaluate())


def test_completions_that_could_not_be_scored_are_left_out_of_the_means(tmp_path):
    report = evaluate_with(tmp_path, lambda example: example == 2, max_reward_error_share=0.25)
    assert (report.reward_mean, report.pass_at, report.reward_error_share) == (1.0, {1: 1.0}, 0.25)


def test_a_pass_at_k_without_enough_scored_completions_is_left_out_and_not_zero(tmp_path):
    failed = iter([False, True, False, False] * 4)
    report = evaluate_with(tmp_path, lambda example: next(failed), samples_per_example=4)
    assert report.pass_at == {1: 1.0, 2: 1.0}
    assert "eval_pass_at_4" not in report.metrics()


def test_an_evaluation_with_too_many_failed_rewards_ends_the_run(tmp_path):
    with pytest.raises(RewardsFailed) as error:
        evaluate_with(tmp_path, lambda example: example > 0, max_reward_error_share=0.5)
    assert str(error.value) == (
        "in the evaluation after step 0, 3 of 4 rewards failed; the last time the reward of example 3 raised KeyError"
    )


def test_the_first_failure_is_raised_and_the_rest_is_aborted(tmp_path):
    class Breaks(FakeGenerators):
        async def generate(self, request):
            if "/3/" in request.id:
                raise RuntimeError("slot 1 is gone")
            return await super().generate(request)

    async def evaluate():
        generators = Breaks(Diary(), delay=lambda request: 100.0)
        generators.version = 0
        tasks = {"train": Count()}
        episodes = Episodes(tasks, Letters(), generators, InProcessGraders(tasks), 64)
        prompts = [Prompt(f"eval/0/{i}", "train", i, (65,)) for i in range(5)]
        record = Recorder(tmp_path)
        with pytest.raises(RuntimeError, match="slot 1 is gone"):
            await Evaluation(episodes, prompts, Sampling(), record).run(0)
        record.close()
        return generators.num_running, asyncio.get_running_loop().time()

    assert run(evaluate()) == (0, 0.0)
