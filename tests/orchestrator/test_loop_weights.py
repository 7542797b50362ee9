"""New weights on their way, slots that settle, and a trainer that is held."""

from contextlib import nullcontext
from functools import partial

import pytest

from ductile.events.phases import StepListener
from tests.orchestrator.doubles import (
    FakeGenerators,
    FakeScorer,
    FakeTrainer,
    Stage,
    run,
)


class FixedRoles(StepListener):
    """In place of a controller: no slot changes its role."""

    def __init__(self, stage):
        self.stage = stage

    def at_work(self, on_error):
        return nullcontext()

    async def begin_step(self, version):
        pass

    async def joined(self):
        pass

    def go_on(self):
        pass


class UntilAllIsScored(FixedRoles):
    """Training waits until all that the step trains on is scored."""

    def __init__(self, stage):
        super().__init__(stage)
        self.on_phase_end(None)

    def on_phase_end(self, phase):
        stage = self.stage
        stage.fake_trainer.pause.set(stage.buffer.num_taken < 8 or stage.accounting.scoring.rollouts > 0)


class HeldTrainer(FakeTrainer):
    async def forward_backward(self, samples, seq_len):
        self.diary.note(f"given {len(samples)}")
        await self.pause.over.wait()
        await super().forward_backward(samples, seq_len)


@pytest.mark.parametrize("capacity", [3, 64])
def test_a_trainer_that_is_held_until_all_is_scored_goes_on(tmp_path, capacity):
    """Else chunk upon chunk would wait for the trainer to take the one before."""
    stage = Stage(
        tmp_path,
        max_steps=1,
        groups_per_step=8,
        generators=partial(FakeGenerators, capacity=capacity, num_tokens=8),
        trainer=HeldTrainer,
        scorer=FakeScorer,
        drop_zero_advantage=False,
        controller=UntilAllIsScored,
    )
    assert run(stage.go()) == 1
    assert len(stage.diary.what("score")) > 2
    assert len(stage.diary.what("given")) == 2, "what was scored meanwhile goes to the trainer as one"
    assert len(stage.fake_trainer.samples) == 16
    assert stage.fake_trainer.loss_denominators == [16 * 8]


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

    class Noting(FixedRoles):
        async def begin_step(self, version):
            self.stage.diary.note(f"begin {version}")

        async def joined(self):
            self.stage.diary.note("joined")

        def go_on(self):
            self.stage.diary.note("go on")

    slow = partial(FakeGenerators, receive_s=5.0, capacity=64, delay=lambda request: 0.01)
    stage = Stage(
        tmp_path,
        max_steps=3,
        max_async_level=2,
        generators=slow,
        trainer=partial(FakeTrainer, chunk_s=1.0),
        controller=Noting,
    )
    run(stage.go())
    assert stage.diary.what("optim_step", "begin 2", "live 1")[:4] == ["optim_step"] * 2 + ["live 1", "begin 2"]
    told = stage.diary.what("begin", "go on")
    assert told == [what for version in range(4) for what in (f"begin {version}", "go on")]
    order = stage.diary.what("publish", "joined", "live")
    assert order == [what for version in range(4) for what in (f"publish {version}", "joined", f"live {version}")]


def test_nothing_is_started_with_weights_that_are_about_to_be_replaced(tmp_path):
    stage = Stage(tmp_path, max_steps=4, max_async_level=1, generators=partial(FakeGenerators, receive_s=5.0))
    run(stage.go())
    publishing = False
    for _, what in stage.diary.lines:
        publishing = what.startswith("publish") or (publishing and not what.startswith("live"))
        assert not (publishing and what.startswith("start"))
