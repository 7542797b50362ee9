"""What a run tells, and what its slots have traced, on one clock."""

import json
from pathlib import Path

from ductile.core.instances.instances import InstanceId, instance_on
from ductile.core.instances.placement import Placement
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.facts.profile import Setting
from ductile.dashboard.chrome_trace import LANES, RUN, roles_held, slot_events, write_trace
from ductile.events.resizes import TrainerResized
from ductile.events.scheduling import OrdersDone
from ductile.events.slots import SlotStarted, SlotWasLost
from ductile.events.steps import WorkBegan
from ductile.messages.workers import CLOCK_EVENT

GENERATOR, LATER = instance_on("generate", (1,)), instance_on("generate", (0,), birth=1)
SETTING = Setting(Placement((0,), (1,), (), "as said"), Limits(), "model", 2, 4, 2, 64, 128, instances=(GENERATOR,))
STORY = [
    SlotStarted(0, ("train",), "cpu", 17, time_s=100.0),
    SlotStarted(1, ("generate",), "cpu", 18, time_s=100.0),
    WorkBegan(SETTING, time_s=101.0),
    TrainerResized(1, (0,), (0, 1), time_s=103.0, took_s=0.5, pause_s=0.1, seconds={"freeze": 0.1}),
    OrdersDone(2.0, 0.1, (1,), began=(LATER,), ended=(InstanceId("generator-1"),), time_s=104.0),
    SlotWasLost(1, ("train",), time_s=105.0),
]
TRACED = [
    {"ph": "M", "name": "process_name", "pid": 17, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "pid": 17, "tid": 17, "ts": 0.0, "args": {"name": "thread 17"}},
    {"ph": "X", "name": f"{CLOCK_EVENT}{102 * 10**9}", "pid": 17, "tid": 17, "ts": 5.0, "dur": 1.0},
    {"ph": "X", "name": "aten::mm", "pid": 17, "tid": 17, "ts": 1005.0, "dur": 7.0},
    {"ph": "s", "name": "ac2g", "pid": 17, "tid": 17, "ts": 1005.0, "id": 3},
    {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 0.0, "dur": 9.0},
]


def test_roles_are_held_from_when_to_when() -> None:
    assert sorted(roles_held(STORY, 110.0)) == [
        (0, "generate", 104.0, 110.0),
        (0, "train", 100.0, 110.0),
        (1, "generate", 100.0, 104.0),
        (1, "train", 103.0, 105.0),
    ]


def test_a_slot_s_events_are_one_process_on_the_run_s_clock() -> None:
    found = slot_events(TRACED, 1)
    assert {event["pid"] for event in found} == {1}
    assert [event["name"] for event in found] == ["thread_name", f"{CLOCK_EVENT}{102 * 10**9}", "aten::mm", "ac2g"]
    assert found[2]["ts"] == 102e6 + 1000.0
    assert found[3]["id"] == "1/3"


def test_a_run_and_its_slots_are_one_trace(tmp_path: Path) -> None:
    traces = {tmp_path / f"slot_{slot}_step_2.json": slot for slot in (0, 1, 2)}
    (tmp_path / "slot_0_step_2.json").write_text(json.dumps({"traceEvents": TRACED}))
    (tmp_path / "slot_1_step_2.json").write_text('{"traceEvents": [')  # its disk was full
    metrics = [{"step": 2, "time": 103.5, "step_s": 1.5}]
    missing = write_trace(tmp_path / "trace.json", [event.as_row() for event in STORY], metrics, traces)
    assert [sentence.split(" in ")[0] for sentence in missing] == ["slot 1 has no trace", "slot 2 has no trace"]
    whole = json.loads((tmp_path / "trace.json").read_text())
    assert whole["baseTimeNanoseconds"] == 100 * 10**9
    events = {event["name"]: event for event in whole["traceEvents"] if event["ph"] == "X"}
    assert (events["aten::mm"]["pid"], events["aten::mm"]["ts"]) == (0, 2_001_000.0)
    assert (events["step 2"]["pid"], events["step 2"]["ts"], events["step 2"]["dur"]) == (RUN, 2e6, 1.5e6)
    assert (events["resize"]["ts"], events["resize"]["dur"]) == (2.5e6, 0.5e6)
    assert events["resize"]["args"]["after"] == [0, 1]
    assert {event["tid"] for event in whole["traceEvents"] if event["name"] == "train"} == {LANES["train"]}
