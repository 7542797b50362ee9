"""Every kind of event is read back from its line as it was written, and lines of other versions are read on over."""

import json
from pathlib import Path

import pytest

from ductile.core.instances.carrier_choice import CarrierChoice
from ductile.core.instances.instances import InstanceId, instance_on
from ductile.core.instances.placement import Placement
from ductile.core.instances.update_outcomes import InstanceOutcome
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.scheduling.facts.cluster_state import Limits
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.events import checkpoints, ending, nodes, resizes, rollouts, scheduling, servers, slots, steps
from ductile.events.lines import KINDS, UnreadEvent, read_event
from ductile.observe import JournalUnwritable, ListenerFailed, RunEvent, json_line, read_jsonl
from tests.core.scheduling.scenes import COSTS, SPEEDS

WRITTEN_EARLIER = Path(__file__).parents[1] / "end_to_end" / "written_earlier" / "events.jsonl"
INSTANCE = instance_on("generate", (2, 3), birth=7)
WAYS = {"a": CarrierChoice("http", "it is on another host and takes part in no process group")}
SETTING = Setting(Placement((0,), (1,), (), "as said"), Limits(), "model", 2, 4, 2, 64, 128, instances=(INSTANCE,))
EVENTS = (
    slots.SlotStarted(0, ("train", "generate"), "cpu", 17),
    slots.SlotWasLost(3, ("generate",)),
    slots.SlotRestarting(3),
    slots.SlotRestarted(3, ("score",), "cuda:1", 18, 1.5, 2, (INSTANCE,)),
    slots.SlotGivenBack(3, ("score",)),
    slots.SlotNoticed((3, 4), 120.0, "ductile drain"),
    slots.SlotGone(3, ("generate",), 0.5),
    slots.SlotNotEmptied((4,)),
    slots.SlotIsBack(3, ("generate",), "cuda:0", 19),
    nodes.NodesAwaited(2, "10.0.0.1:7000"),
    nodes.NodeJoined(1, "worker", "10.0.0.2", (4, 5)),
    nodes.NodeWasLost(1),
    nodes.NodeWasNoticed(1, (4, 5), None),
    scheduling.StateParked((2, 3), False, 1 << 20, 0, 0.25),
    servers.ServerJoined("10.0.0.7:8000", "http://10.0.0.7:8000", 3, 1.5),
    servers.ServerChanged("10.0.0.7:8000", "ready", "suspect"),
    servers.ServerLeft("10.0.0.7:8000", True),
    servers.ServerNoted(),
    servers.WeightUpdateEnded(3, (InstanceOutcome("a", "stale", "it hangs"),), 2, 1.5, 0.1, 64, "0" * 16, 32, WAYS),
    steps.WorkBegan(SETTING),
    steps.StepProfiled(StepProfile(1, 0.0, 1.0, (), (4, 7), 9.0, SPEEDS, COSTS)),
    steps.BatchesReady(100, 2, 1),
    steps.NothingToLearn(),
    steps.StepSkipped(4, 2),
    steps.Evaluated(4, 0.5),
    rollouts.PromptSkipped(),
    rollouts.DataNoted(),
    rollouts.GroupDropped("train/0/1"),
    rollouts.GroupRefused("train/0/1"),
    rollouts.PromptDroppedTwice("train/0/1"),
    rollouts.CanaryDisagreed(3, InstanceId("generator-2"), "stale_kv"),
    rollouts.RequestRestarted(InstanceId("generator-2")),
    rollouts.RewardError("Traceback"),
    rollouts.GradersNotFenced(),
    checkpoints.OldRunReplaced(),
    checkpoints.RunResumed(3),
    checkpoints.StartedAnew(),
    checkpoints.CheckpointRenamed(),
    checkpoints.CheckpointSaved(3, "/there"),
    checkpoints.ModelExported(3),
    checkpoints.CheckpointNotSaved(),
    checkpoints.ModelNotExported(),
    scheduling.OrdersGiven(1.0, 0.25, 2.0),
    scheduling.TrainingHeld(1.0, True),
    scheduling.OrdersDone(1.0, 0.5, (1, 2), 3, ("slot 1 stays",), (INSTANCE,), (InstanceId("generator-2"),)),
    scheduling.PolicyFailed("Traceback"),
    resizes.TrainerResized(1, (0,), (0, 1), 4, ParallelDims(), ParallelDims(dp_shard=2), 0.1, 0.2, {"freeze": 0.1}),
    resizes.ResizeRolledBack(1, (0,), (0, 1), 4, ParallelDims(), ParallelDims(dp_shard=2), traceback="Traceback"),
    resizes.TrainerWentBack(4, (1,), (0, 1), (0,), ParallelDims(), 2, 4),
    ending.StopAsked(),
    ending.EndedAsAsked(),
    ending.EndedByDeath("slot_died"),
    ending.EndedByFailure(traceback="Traceback"),
    ListenerFailed("Traceback"),
    JournalUnwritable(),
)


def line(event: RunEvent) -> dict[str, object]:
    return json.loads(json_line(event.as_row()))


def test_every_kind_has_an_event_here():
    assert {type(event) for event in EVENTS} == set(KINDS.values())


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_read_back_from_its_line(event: RunEvent):
    assert list(line(event))[:3] == ["time", "kind", "sentence"]
    assert read_event(line(event)) == event


def test_fields_that_are_none_are_not_written():
    assert line(scheduling.OrdersGiven(1.0)) == {"time": 0.0, "kind": "decided", "sentence": "", "at_s": 1.0}
    assert line(ending.EndedByFailure("late")).keys() == {"time", "kind", "sentence", "code"}


def test_a_number_that_is_not_finite_is_none():
    assert read_event(line(steps.Evaluated(0, float("nan")))) == steps.Evaluated(0, None)
    assert read_event(line(scheduling.OrdersGiven(1.0, 0.5, float("inf")))) == scheduling.OrdersGiven(1.0, 0.5)


def test_a_line_of_format_1_is_read():
    events = [read_event(row) for row in read_jsonl(WRITTEN_EARLIER)]
    assert not [event for event in events if isinstance(event, UnreadEvent)]
    assert {type(event) for event in events} >= {steps.WorkBegan, resizes.TrainerResized, scheduling.OrdersDone}


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [("slept", {}, "'slept' is unknown"), ("slot_lost", {}, "`slot`"), ("saved", {"step": "3", "path": ""}, "`int`")],
)
def test_of_a_line_of_another_version_time_and_sentence_are_read(kind, fields, why):
    event = read_event({"time": 5.0, "kind": kind, "sentence": "It is so.", **fields})
    assert isinstance(event, UnreadEvent)
    assert (event.written, event.time_s, event.sentence) == (kind, 5.0, "It is so.")
    assert why in event.why


@pytest.mark.parametrize(
    ("earlier", "event"),
    [
        ("restarted", rollouts.RequestRestarted(InstanceId("generator-2"), sentence="Once.", time_s=1.5)),
        ("refused", scheduling.PolicyFailed("Traceback", sentence="Once.", time_s=1.5)),
    ],
)
def test_words_of_earlier_versions_are_read(earlier: str, event: RunEvent):
    assert read_event({**event.as_row(), "kind": earlier}) == event
