"""Ctrl-C, what is saved then, and going on from it."""

import asyncio
from functools import partial

import pytest

from ductile.observe import read_jsonl
from ductile.orchestrator.ending.progress import Progress
from ductile.roles import Late
from tests.orchestrator.doubles import (
    FakeGenerators,
    Stage,
    random_delays,
    run,
)


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
    assert len(stage.trained) == 4 * step
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
    assert len({prompt.id for _, prompt in stage.trained}) == 4
    assert len(stage.fake_generators.requests) == 8, "the first step's, and no more"
    assert stopped


def test_resume_trains_each_prompt_once_an_epoch(tmp_path):
    """With groups in flight and in the buffer at the save, and the run stopped and continued again and again."""
    whole = Stage(tmp_path / "whole", max_steps=10, num_examples=20)
    run(whole.go())
    step, position, trained, lives = 0, None, [], 0
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
        trained += stage.trained
        lives += 1
    assert lives > 2
    assert sorted(prompt.id for _, prompt in trained) == sorted(prompt.id for _, prompt in whole.trained)
    assert len({prompt.id for _, prompt in trained}) == 40  # two epochs of 20


def test_a_killed_run_repeats_only_what_the_checkpoint_does_not_know(tmp_path):
    stage = Stage(tmp_path, max_steps=6, save_interval=2, num_examples=24)
    run(stage.go())
    step, position = stage.saved[0]
    again = Stage(tmp_path / "again", max_steps=6, num_examples=24, step=step, position=position)
    run(again.go())
    before = {prompt.id for at, prompt in stage.trained if at < step}
    after = {prompt.id for _, prompt in again.trained}
    assert not before & after
    assert len(before | after) == 24
    assert Progress.from_json({"step": step, "prompts": {"next": 1, "under_way": [3]}}).step == step


def test_ctrl_c_does_not_wait_for_generators_to_take_weights(tmp_path):
    """The running step is saved at once, and nobody would sample from its weights."""

    class Deaf(FakeGenerators):
        async def receive(self, manifest):
            if manifest.version == 1:
                await asyncio.sleep(100)
                raise Late("slot 1 did not reply to Receive within 100 s")
            return await super().receive(manifest)

    async def stop(stage):
        await after_step_1(stage)
        stage.stop.set()

    stage = Stage(tmp_path, max_steps=50, generators=Deaf)
    with pytest.raises(Late, match="Receive"):
        run(stage.go(stop))
    [saved_s] = [at for at, what in stage.diary.lines if what == "checkpoint 2"]
    assert saved_s < 10
    assert stage.diary.what("publish") == ["publish 0", "publish 1"]
