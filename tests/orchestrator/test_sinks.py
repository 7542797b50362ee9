import subprocess
import sys
import types

import pytest

from ductile.events.checkpoints import CheckpointSaved
from ductile.orchestrator.commands.sinks import SinkMissing, TensorboardSink, WandbSink


def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorboardSink(tmp_path)
    for step, loss in ((1, 0.5), (2, 0.25)):
        sink.on_metrics(step, {"loss": loss, "seconds/wait": 1.0})
    sink.on_event(CheckpointSaved(1, "", sentence="Saved."))
    sink.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert "seconds/wait" in reader.Tags()["scalars"]


def test_tensorboard_needs_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ductile.orchestrator.commands.sinks import TensorboardSink\n"
        f"sink = TensorboardSink(Path({str(tmp_path)!r})); sink.on_metrics(1, {{'x': 1.0}}); sink.close()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_wandb_logs_metrics_by_step(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **keys: calls.append(keys) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WandbSink(tmp_path, "p", "n", offline=True, config={"max_steps": 3})
    sink.on_metrics(1, {"loss": 0.5})
    sink.close()
    assert calls[0]["mode"] == "offline"
    assert (calls[0]["project"], calls[0]["dir"]) == ("p", str(tmp_path))
    assert calls[1:] == [(1, {"loss": 0.5}), "finish"]


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SinkMissing, match=r"pip install wandb, or leave the table out"):
        WandbSink(tmp_path, "p", None, offline=True, config={})
