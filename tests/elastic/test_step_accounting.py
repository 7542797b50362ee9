"""What a policy is told of a step, while the step is made."""

import asyncio
from dataclasses import dataclass
from functools import partial

import pytest

from ductile.elastic.step_accounting import SamplesInFlight
from tests.orchestrator.doubles import FakeGenerators, FakeScorer, FakeTrainer, Stage, run


@dataclass
class Books:
    pending_samples: int = 0
    pending_tokens: int = 0
    num_waiting: int = 0


class ToldTrainer(FakeTrainer):
    """Says what it has been given, as the real one does."""

    books: Books

    async def forward_backward(self, samples, seq_len):
        self.books.pending_samples, self.books.pending_tokens = len(samples), sum(map(len, samples))
        await super().forward_backward(samples, seq_len)
        self.books.pending_samples = self.books.pending_tokens = 0


def watched(tmp_path, every_s=0.1, steps_ahead=0, **changes):
    """The loop's run, and (time, batch) every so often."""
    books, seen = Books(), []
    ToldTrainer.books = books

    async def watch(stage):
        while not stage.ended:
            pending = SamplesInFlight(books.pending_samples, books.pending_tokens)
            seen.append(stage.accounting.batch(pending, books.num_waiting))
            await asyncio.sleep(every_s)

    class Watched(Stage):
        ended = False

        async def go(self, during=None):
            async def running():
                await asyncio.sleep(0)
                await watch(self)

            watching = asyncio.create_task(running())
            try:
                return await super().go(during)
            finally:
                self.ended = True
                await watching

    stage = Watched(tmp_path, max_async_level=steps_ahead, trainer=ToldTrainer, drop_zero_advantage=False, **changes)
    run(stage.go())
    return seen


@pytest.mark.parametrize("scorer", [None, FakeScorer])
@pytest.mark.parametrize("ahead", [0, 1])
def test_every_rollout_of_a_step_is_somewhere_and_only_once(tmp_path, scorer, ahead):
    slow = partial(FakeGenerators, capacity=4, delay=lambda request: 0.3 + int(request.id.split("/")[3]) / 2)
    seen = watched(tmp_path, steps_ahead=ahead, scorer=scorer, generators=slow, max_steps=3)
    assert {batch.step for batch in seen} == {0, 1, 2, 3}
    for batch in seen:
        assert 0 <= batch.trained <= batch.num_rollouts
        assert batch.missing <= batch.left
        if batch.step < 3:
            # What is under way in whole groups is neither here nor there; everything else adds up.
            known = batch.trained + batch.ready + batch.to_score + batch.partial + batch.to_start
            assert known <= (1 + ahead) * batch.num_rollouts
    assert any(batch.partial for batch in seen)
    assert any(batch.trained == batch.num_rollouts for batch in seen)
    assert any((batch.to_score if scorer else batch.ready) for batch in seen)
    trained = [batch.trained for batch in seen if batch.step == 1]
    assert trained == sorted(trained), "what is trained stays trained until the step ends"
    ready_tokens = [batch.ready_tokens for batch in seen if batch.ready]
    assert all(tokens > 0 for tokens in ready_tokens)


def test_optimizer_steps_are_counted(tmp_path):
    seen = watched(tmp_path, max_steps=2, groups_per_step=4, n_minibatches=2)
    assert {batch.num_updates for batch in seen} == {2}
    assert {batch.update for batch in seen if batch.step < 2} >= {0, 1}


def test_the_last_evaluation_is_a_step_that_trains_nothing(tmp_path):
    slow = partial(FakeGenerators, delay=lambda request: 5.0 if "eval" in request.id else 0.5, receive_s=1.0)
    seen = watched(tmp_path, max_steps=2, eval_prompts=3, generators=slow)
    last = [batch for batch in seen if batch.step == 2]
    assert {(batch.num_rollouts, batch.trained, batch.missing) for batch in last} == {(0, 0, 0)}
    assert last[0].to_start == 3, "while the weights travel the generators that it needs can be had"
    assert last[0].steps_left == 1
    assert last[-1].to_start == 0
