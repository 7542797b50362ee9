"""Runs whose slots are taken away and come back, in virtual time; schedules as files; and the spot planner."""

import itertools
import json

import pytest

from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns, Static
from ductile.sim import plan_command
from ductile.sim.preempted import NotSurvived
from ductile.sim.preemptions import BadSchedule, Preemption, read_preemptions
from ductile.sim.recording import read_recording
from ductile.sim.run import simulate
from ductile.sim.spot import SpotPlanner, best_case, spot_verdict
from tests.nightly import mostly_nightly
from tests.sim.recorded import record_run
from tests.sim.scenarios import scenario

POLICIES = [Static(), Rules(), Rules(True, True), Model()]
SHARED = {"actor,rollout": "0-3"}
SCORED = {"actor": "0-1", "rollout": "2-4", "inference": 5}


def away(at_s, slots, back_s=None, notice_s=5.0):
    taken = [Preemption(at_s, "preempt", slots, notice_s)]
    return taken if back_s is None else [*taken, Preemption(back_s, "return", slots)]


APART = {"actor": "0-2", "rollout": "3-5"}
PLACES = {
    "a generator": (APART, away(1, (4,), 6)),
    "all train slots": (APART, away(1, (0, 1, 2), 6)),
    "two": (APART, [*away(1, (3, 4), 9), *away(5, (0,))]),
    "the only train slot": ({"actor": 0, "rollout": "1-5"}, away(1, (0,), 6)),
    "the scorer": (SCORED, away(2, (5,), 8)),
    "all generators": (SCORED, away(2, (2, 3, 4), 8)),
}


@pytest.mark.parametrize(
    ("place", "policy"),
    mostly_nightly(itertools.product(PLACES, POLICIES), *((place, Static()) for place in PLACES), ("two", Model())),
)
def test_every_rollout_is_trained_once_whoever_is_taken_away(place, policy):
    """The real loop refuses to train a rollout twice, and waits for ever for one that is lost."""
    placement, schedule = PLACES[place]
    score = "inference" in placement
    made = scenario(placement, score=score, num_steps=3, groups_per_step=4)
    alone = simulate(made, Static())
    result = simulate(made, policy, preemptions=schedule)
    assert len(result.step_s) == 3
    assert result.num_tokens == alone.num_tokens
    absent_s = result.wall_s * result.num_slots - result.slot_seconds
    assert absent_s > 0, "what is gone costs nothing"
    assert sum(result.totals.values()) == pytest.approx(result.slot_seconds)
    assert [failure for change in result.changes for failure in change.failures] == []


def test_static_slots_get_back_what_they_held():
    made = scenario(SCORED, score=True, num_steps=3)
    result = simulate(made, Static(), preemptions=away(3, (0, 1, 2), 9))
    last = {span.slot: span.activity for span in result.spans if span.activity in ("train", "generate", "score")}
    assert (last[0], last[1], last[2], last[5]) == ("train", "train", "generate", "score")


def test_slots_share_what_is_left_and_take_turns():
    result = simulate(scenario(SHARED, num_steps=2), InTurns(), preemptions=away(3, (1, 2), 10))
    assert len(result.step_s) == 2


def test_what_cannot_be_emptied_cuts_the_run():
    with pytest.raises(NotSurvived, match=r"at 3 s slots 0-5 cannot be emptied: no other slot can take the trainer's"):
        simulate(scenario(), Static(), preemptions=away(3, tuple(range(6))))
    with pytest.raises(NotSurvived, match="not empty within 0 s"):
        simulate(scenario(), Static(), preemptions=away(3, (4,), notice_s=0.0))


CSV = "at_s,event,slots,notice_s\n120, preempt, 2-3, 20\n300,return,2-3,\n30,preempt,1,\n"
TOML = """
preemptions = [
  { at_s = 120, event = "preempt", slots = "2-3", notice_s = 20 },
  { at_s = 300, event = "return", slots = "2-3" },
  { at_s = 30.0, event = "preempt", slots = 1 },
]
"""


@pytest.mark.parametrize(("name", "text"), [("a.csv", CSV), ("a.toml", TOML)])
def test_a_schedule_is_csv_or_toml(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_preemptions(tmp_path / name, range(4)) == (
        Preemption(30, "preempt", (1,)),
        Preemption(120, "preempt", (2, 3), 20),
        Preemption(300, "return", (2, 3)),
    )


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", "is a .csv or a .toml file"),
        ("a.csv", "", "the first line names nothing; write at_s,event,slots,notice_s"),
        ("a.csv", "at_s,event,slots\n", "has no preemptions"),
        ("a.csv", "at_s,event,slots\n1,stop,2\n", "line 2: event = 'stop'; write preempt or return"),
        ("a.csv", "at_s,event,slots\nsoon,preempt,2\n", "line 2: at_s = 'soon'; write seconds, 0 or more"),
        ("a.csv", "at_s,event,slots\n1,preempt,3-2\n", "'3-2' runs backwards"),
        ("a.csv", "at_s,event,slots\n1,preempt,2\n", "at 1 s: the run has no slot 2; it has slots 0-1"),
        ("a.csv", "at_s,event,slots\n1,return,1\n", "slot 1 is not gone; have it return later"),
        ("a.csv", "at_s,event,slots\n1,preempt,1\n9,return,1\n", "slot 1 is gone only at 31 s"),
        ("a.csv", "at_s,event,slots\n1,preempt,1\n9,preempt,1\n", "slot 1 is gone already"),
        ("a.toml", "at_s = 1", "has the keys at_s: write tables"),
        ("a.toml", "[[preemptions]]\nat = 1\n", "preemptions[0]: at is no key; write at_s, event, slots, notice_s"),
        ("a.toml", "[[", "is no TOML"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_its_place(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadSchedule) as refused:
        read_preemptions(tmp_path / name, range(2))
    assert says in str(refused.value)
    assert str(tmp_path / name) in str(refused.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, scenario({"actor": 0, "rollout": "1-2"}, groups_per_step=3, num_steps=2), "static")
    return folder


def test_the_planner_predicts_the_whole_run_and_what_it_costs(run):
    recording = read_recording(run)
    planner = SpotPlanner(recording, away(1, (2,), 6), price=3.6, num_steps=2)
    own, quiet = planner.own_case(), SpotPlanner(recording, away(1e6, (2,)), price=3.6, num_steps=2).own_case()
    assert own.wall_s > quiet.wall_s, "a generator is missing"
    assert own.cost == pytest.approx(own.slot_hours * 3.6)
    assert quiet.slot_hours == pytest.approx(3 * quiet.wall_s / 3600)
    assert own.slot_hours < 3 * own.wall_s / 3600
    others = list(planner.other_cases())
    assert {each.is_without for each in others} == {False, True}
    assert all(each.case.placement.slots == ((0, 1) if each.is_without else (0, 1, 2)) for each in others)
    best = best_case([own, *others])
    assert best is not None
    assert best.cost == min(each.cost for each in (own, *others) if not each.cut)
    assert best.case.policy in spot_verdict(own, others)


def test_a_way_that_would_be_cut_is_no_best_way(run):
    planner = SpotPlanner(read_recording(run), away(2, (0, 1, 2)), price=1.0, num_steps=2)
    own = planner.own_case()
    assert own.cut.startswith("at 2 s slots 0-2 cannot be emptied")
    assert spot_verdict(own, []) == f"No way survives this schedule: {own.cut}."


def test_the_command_prints_a_table_and_writes_it(run, tmp_path, capsys):
    (tmp_path / "spot.csv").write_text("at_s,event,slots,notice_s\n2,preempt,2,5\n9,return,2,\n")
    words = [str(run), "--preemptions", str(tmp_path / "spot.csv"), "--price", "2.5", "--steps", "1"]
    assert plan_command.main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    assert "Predicted: 1 step, with slot 2 taken away by 1 notice, at 2.5 a slot and hour." in said
    assert "The best mix is" in said
    table = json.loads((tmp_path / "plan.json").read_text())
    assert (table["price"], table["num_steps"], len(table["preemptions"])) == (2.5, 1, 2)
    assert table["best"]["cost"] <= table["predicted"]["cost"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--price", "2"], "are for --preemptions FILE"),
        (["--preemptions", "x.csv", "--price", "-1"], "is no price"),
        (["--preemptions", "x.csv", "--steps", "0"], "is no number of steps"),
    ],
)
def test_flags_that_cannot_be_are_refused(run, capsys, words, says):
    with pytest.raises(SystemExit):
        plan_command.main([str(run), *words])
    assert says in capsys.readouterr().err
