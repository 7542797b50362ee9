import subprocess
import sys
import time
import types

import pytest

from ductile.config.schema.run import WandbConfig
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.events.checkpoints import CheckpointSaved, RunResumed
from ductile.events.resizes import TrainerWentBack
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.commands.sinks import SinkMissing, TensorboardSink, WandbSink


def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorboardSink(tmp_path)
    for step, loss in ((1, 0.5), (2, 0.25)):
        sink.on_metrics(step, {"loss": loss, "seconds/wait": 1.0})
    sink.on_event(CheckpointSaved(1, "", sentence="Saved."))
    sink.close(0)
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert "seconds/wait" in reader.Tags()["scalars"]


def test_tensorboard_needs_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ductile.orchestrator.commands.sinks import TensorboardSink\n"
        f"sink = TensorboardSink(Path({str(tmp_path)!r})); sink.on_metrics(1, {{'x': 1.0}}); sink.close(0)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def wandb(monkeypatch):
    """W&B as a module that keeps what it is called with in `calls`."""
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    module, run = types.ModuleType("wandb"), types.SimpleNamespace(id="abc123")
    module.calls = []
    run.log = lambda values, step: module.calls.append((step, values))
    run.finish = lambda exit_code: module.calls.append(("finish", exit_code))
    module.init = lambda **keys: module.calls.append(keys) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_logs_metrics_by_step(tmp_path, wandb):
    sink = WandbSink(Recorder(tmp_path), WandbConfig(project="p", name="n", offline=True), config={"max_steps": 3})
    sink.on_metrics(1, {"loss": 0.5})
    sink.close(0)
    asked, *logged = wandb.calls
    assert (asked["mode"], asked["project"], asked["dir"]) == ("offline", "p", str(tmp_path))
    assert "id" not in asked
    assert logged == [(1, {"loss": 0.5}), ("finish", 0)]


def test_the_environment_of_wandb_wins_over_our_defaults_and_a_key_over_both(tmp_path, wandb, monkeypatch):
    WandbSink(Recorder(tmp_path), WandbConfig(), config={})
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    WandbSink(Recorder(tmp_path), WandbConfig(), config={})
    WandbSink(Recorder(tmp_path), WandbConfig(project="p", name="n", offline=False), config={})
    assert [asked["project"] for asked in wandb.calls] == ["ductile", "mine", "p"]
    assert not {"name", "mode"} & wandb.calls[1].keys(), "W&B reads WANDB_NAME and WANDB_MODE itself"
    assert (wandb.calls[2]["name"], wandb.calls[2]["mode"]) == ("n", "online")


@pytest.mark.parametrize(("code", "finished"), [(0, 0), (1, 1), (2, 2), (130, 255)])
def test_wandb_is_told_how_the_run_ended(tmp_path, wandb, code, finished):
    record = Recorder(tmp_path)
    record.listeners.append(WandbSink(record, WandbConfig(), config={}))
    record.close(code)
    assert wandb.calls[-1] == ("finish", finished)


def test_a_resumed_run_is_the_same_run_of_wandb_taken_back_once_it_has_resumed(tmp_path, wandb):
    record = Recorder(tmp_path)
    WandbSink(record, WandbConfig(project="p"), config={})
    sink = WandbSink(record, WandbConfig(project="p"), config={}, last_kept=2)
    assert [(asked.get("id"), asked.get("resume_from")) for asked in wandb.calls] == [(None, None), ("abc123", None)]
    sink.on_event(RunResumed(3))
    assert wandb.calls[-1]["resume_from"] == "abc123?_step=2"
    WandbSink(record, WandbConfig(project="q"), config={}, last_kept=2)
    assert "id" not in wandb.calls[-1], "the other project does not have it"


def test_a_run_that_goes_back_by_itself_goes_back_in_wandb_and_begins_anew_there_where_it_has_no_step(tmp_path, wandb):
    record, back = Recorder(tmp_path), TrainerWentBack(2, (1,), (0, 1), (0,), ParallelDims(), last_kept=2)
    sink = WandbSink(record, WandbConfig(project="p"), config={})
    for event in (back, RunResumed(2)):
        sink.on_event(event)
    assert wandb.calls[-1]["resume_from"] == "abc123?_step=2"
    sink.on_event(TrainerWentBack(0, (1,), (0, 1), (0,), ParallelDims()))
    finished, begun = wandb.calls[-2:]
    assert (finished, "id" in begun) == (("finish", 1), False)


def test_where_wandb_cannot_go_back_the_run_is_the_same_and_the_user_is_told(tmp_path, wandb):
    record, init = Recorder(tmp_path), wandb.init
    WandbSink(record, WandbConfig(project="p"), config={})

    def old(resume_from=None, **keys):
        if resume_from:
            raise ValueError("rewind is not enabled for your account")
        return init(**keys)

    wandb.init = old
    WandbSink(record, WandbConfig(project="p"), config={}, last_kept=2).on_event(RunResumed(2))
    assert (wandb.calls[-1]["id"], wandb.calls[-1]["resume"]) == ("abc123", "allow")
    [told] = read_jsonl(tmp_path / "events.jsonl")
    assert "cannot take its run abc123 back to step 2" in told["sentence"]
    assert "rewind is not enabled for your account" in told["sentence"]


@pytest.mark.parametrize("last_kept", [None, 2])
def test_where_wandb_begins_no_run_the_user_is_told_what_to_write(tmp_path, wandb, last_kept):
    WandbSink(Recorder(tmp_path), WandbConfig(project="p"), config={})

    def init(**keys):
        raise RuntimeError("No API key configured. Use `wandb login` to log in.")

    wandb.init = init
    with pytest.raises(SinkMissing, match=r"W&B begins no run: .*No API key.*--wandb.offline"):
        WandbSink(Recorder(tmp_path), WandbConfig(project="p"), config={}, last_kept=last_kept)


def test_tensorboard_forgets_steps_that_are_taken_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for life, steps in enumerate(((1, 2, 3, 4), (3, 4, 5))):
        sink = TensorboardSink(tmp_path, 2 if life else None)
        if life:
            sink.on_event(RunResumed(2))
        for step in steps:
            sink.on_metrics(step, {"loss": float(10 * life + step)})
        sink.close(0)
        time.sleep(1.1)  # the files' names have seconds, and are read in their order
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [
        (1, 1),
        (2, 2),
        (3, 13),
        (4, 14),
        (5, 15),
    ]


def test_tensorboard_forgets_a_step_whose_row_is_written_anew(tmp_path):
    """The step that the run goes on after owes its evaluation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last_kept, steps in ((None, (1, 2, 3)), (1, (2, 3))):
        sink = TensorboardSink(tmp_path, last_kept)
        if last_kept:
            sink.on_event(RunResumed(2))
        for step in steps:
            sink.on_metrics(step, {"loss": float(step)})
        sink.close(0)
        time.sleep(1.1)
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == [1, 2, 3]


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SinkMissing, match=r"pip install wandb, or leave the table out"):
        WandbSink(Recorder(tmp_path), WandbConfig(), config={})
