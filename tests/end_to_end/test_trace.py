"""A run that is resized while it trains, as a trace."""

import json
import signal
from pathlib import Path

import pytest

from ductile.dashboard.chrome_trace import LANES, RUN
from ductile.orchestrator.control.control import Run as LiveRun
from tests.end_to_end.runs import write_sft


@pytest.mark.slow
def test_a_run_s_trace_has_its_steps_its_roles_and_its_resizes(tmp_path: Path, model: Path, start) -> None:
    config = write_sft(tmp_path, model, max_steps=100_000, interval=100_000)
    run = start(config, "--trace", "--trace.steps", "2", "3", "--data.batch-size", "4", command="sft")
    run.until_step(4)
    LiveRun(run.folder).resize([0, 1])
    run.until_step(run.metrics()[-1]["step"] + 1)
    run.process.send_signal(signal.SIGINT)
    assert run.ends(within_s=200) == 130, run.said()
    file = run.folder / "trace" / "trace.json"
    assert f"The trace is in {file}" in run.said()
    events = json.loads(file.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and isinstance(event["pid"], int) for event in slices)

    steps = {event["name"]: event for event in slices if event["pid"] == RUN}
    (resize,) = (event for event in slices if event["name"] == "resize")
    assert (resize["args"]["before"], resize["args"]["after"]) == ([0], [0, 1])
    assert resize["ts"] > steps["step 3"]["ts"] + steps["step 3"]["dur"]
    trains = {event["pid"]: event for event in slices if event["tid"] == LANES["train"]}
    assert trains[0]["ts"] < steps["step 1"]["ts"] + steps["step 1"]["dur"]
    assert trains[1]["ts"] == pytest.approx(resize["ts"] + resize["dur"], abs=1.0)

    operators = [event for event in slices if event["name"].startswith("aten::")]
    assert {event["pid"] for event in operators} == {0}
    assert len({event["name"] for event in operators}) > 5
    began = steps["step 2"]["ts"]
    ended = steps["step 3"]["ts"] + steps["step 3"]["dur"]
    times_us = [event["ts"] for event in operators]
    assert began - 2000 < min(times_us) < max(times_us) < ended + 2000, "to the milliseconds that events are told in"
