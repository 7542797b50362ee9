import asyncio

import pytest

from ductile.core.instances.placement import place
from ductile.core.scheduling.costs.cost_model import CostModel
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.facts.ledger import Span
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.elastic.profiling import Profiler
from ductile.observe import Recorder, read_jsonl
from ductile.records import Generation
from tests.elastic.test_activity import Story

PHASES = {
    "seconds/optim_step": 0.4,
    "seconds/publish": 0.2,
    "seconds/receive": 0.1,
    "seconds/score": 1.0,
    "tokens": 50.0,
}


def profiled(tmp_path, during):
    async def story():
        run, record = Story(), Recorder(tmp_path)
        await run.begin()
        profiler = Profiler(
            record,
            run.activity,
            CostModel(),
            prompt_tokens=lambda: 7.0,
            num_switches=lambda: int(run.now_s // 4),
            scorer_seconds=lambda: 2.0,
            num_updates=2,
            began_s=run.now_s,
            clock=lambda: run.now_s,
        )
        record.listeners.append(profiler)
        await during(run, record, profiler)
        record.close()

    asyncio.run(story())
    rows = read_jsonl(tmp_path / "events.jsonl")
    return [StepProfile.from_fields(row) for row in rows if row["kind"] == "profile"], rows


def test_the_spans_of_all_steps_cover_slots_times_time(tmp_path):
    async def during(run, record, profiler):
        record.metrics(0, {"eval_reward": 0.1})
        for step in (1, 2, 3):
            await run.generate(0)
            await run.passes(3.0)
            record.metrics(step, PHASES)

    steps, _ = profiled(tmp_path, during)
    assert [(each.step, each.start_s, each.end_s) for each in steps] == [(1, 0, 3), (2, 3, 6), (3, 6, 9)]
    for each in steps:
        assert sum(span.seconds for span in each.spans) == pytest.approx(4 * 3.0)
        assert all(each.start_s <= span.start_s <= span.end_s <= each.end_s for span in each.spans)
        assert Span(0, each.start_s, each.end_s, "generate") in each.spans
    assert [each.num_switches for each in steps] == [2, 0, 1]


def test_it_measures_what_the_loop_timed_and_counts_training_s_completions(tmp_path):
    async def during(run, record, profiler):
        profiler.on_finished(Generation("train/0/1/0/0", (1,) * 9, (0.0,) * 9, (0,) * 9, "stop"))
        profiler.on_finished(Generation("eval/0/1/0/0", (1,) * 3, (0.0,) * 3, (0,) * 3, "stop"))
        run.now_s += 1.0
        record.metrics(1, PHASES)

    (step,), _ = profiled(tmp_path, during)
    assert step.lengths == (9,)
    assert step.speeds.optim_s == pytest.approx(0.2)
    assert (step.speeds.publish_s, step.speeds.receive_s) == (0.2, 0.1)
    assert step.speeds.score_tokens_per_s == pytest.approx(25.0)


def test_the_setting_is_written_once_and_says_nothing_to_people(tmp_path):
    setting = Setting(place({"actor": 0, "rollout": 1}), Limits(), "model", 3, 4, 8, 100, 128)

    async def during(run, record, profiler):
        profiler.open(setting)

    _, rows = profiled(tmp_path, during)
    assert [row["sentence"] for row in rows] == [""]
    assert Setting.from_fields(rows[0]) == setting


def test_a_thousand_gaps_between_commands_are_one_stretch(tmp_path):
    async def during(run, record, profiler):
        for _ in range(200):
            await run.generate(0)
            run.now_s += 0.05
            run.activity._generating.discard(0)
            run.activity._tell(0)
            run.now_s += 0.001
        record.metrics(1, PHASES)

    (step,), _ = profiled(tmp_path, during)
    assert len([span for span in step.spans if span.slot == 0]) == 1
    assert sum(span.seconds for span in step.spans if span.slot == 0) == pytest.approx(200 * 0.051, abs=1e-2)
