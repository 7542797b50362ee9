"""`ductile plan` and `ductile simulate --run`: a run's own recording, on other placements and with other policies."""

import itertools
import json
import tomllib
from statistics import fmean

import pytest

from ductile.config.checks.asked_placement import placement_of
from ductile.config.checks.asked_policy import policy_of
from ductile.config.reading.parse import parse
from ductile.config.schema.run import RLConfig
from ductile.config.schema.simulate import SimulateConfig
from ductile.core.instances.placement import Placement
from ductile.core.scheduling.facts.profile import FORMAT
from ductile.core.scheduling.policies.arrange import BOTH
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.names import NAMES
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns, Static
from ductile.events.checkpoints import CheckpointSaved
from ductile.events.resizes import TrainerResized
from ductile.observe import Recorder
from ductile.sim import command, plan_command
from ductile.sim.arms import collocate
from ductile.sim.configured import configured
from ductile.sim.plan import CONFIGURED, Case, case_of, own_case, verdict
from ductile.sim.recording import NoRecording, read_recording, recorded_scenario
from ductile.sim.run import simulate
from tests.config.stories import furnish
from tests.nightly import mostly_nightly
from tests.sim.recorded import record_run
from tests.sim.scenarios import scenario


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, scenario({"actor": 0, "rollout": "1-2"}, groups_per_step=8, num_steps=3), "static")
    return folder


@pytest.mark.parametrize(
    ("policy", "ahead"),
    mostly_nightly(itertools.product(["static", "rules", "model"], [0, 1]), ("static", 0)),
)
def test_a_run_s_own_step_is_predicted_from_its_recording(tmp_path, policy, ahead):
    """The recorded lengths are dealt anew inside a step, so one prediction is off by luck; several are not."""
    off = []
    for seed in range(4):
        folder = tmp_path / str(seed)
        record_run(folder, scenario(groups_per_step=16, num_steps=5, max_async_level=ahead, seed=seed), policy)
        recording = read_recording(folder)
        off.append(own_case(recording).step_s / recording.step_s - 1)
    assert fmean(off) == pytest.approx(0, abs=0.05), off


@pytest.mark.parametrize("policy", ["static", "rules"])
def test_another_run_s_step_is_predicted_from_the_recording_of_one(tmp_path, policy):
    """The other run was held out: only its placement and policy are told."""
    record_run(tmp_path / "known", scenario(groups_per_step=16, num_steps=4), "static")
    record_run(tmp_path / "other", scenario({"actor": 0, "rollout": "1-5"}, groups_per_step=16, num_steps=4), policy)
    known, other = read_recording(tmp_path / "known"), read_recording(tmp_path / "other")
    assert case_of(known, other.setting).step_s == pytest.approx(other.step_s, rel=0.1)


def test_speeds_are_the_mean_of_the_compared_steps(tmp_path):
    """In seconds: half as fast in one step of two is two thirds as fast on the whole."""
    record_run(tmp_path, scenario(groups_per_step=4, num_steps=3))
    events = tmp_path / "events.jsonl"
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    slow = next(row for row in rows if row["kind"] == "profile" and row["step"] == 2)
    slow["speeds"]["train"]["tokens_per_s"] /= 2
    slow["speeds"]["decode"]["step_s"] *= 2
    events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    speeds = recorded_scenario(read_recording(tmp_path)).speeds
    assert speeds.train.tokens_per_s == pytest.approx(800 * 2 / 3)
    assert speeds.decode.step_s == pytest.approx(0.015)


def test_everything_comes_from_the_recording(run):
    recorded, original = recorded_scenario(read_recording(run)), scenario({"actor": 0, "rollout": "1-2"})
    assert (recorded.placement.train, recorded.placement.generate) == ((0,), (1, 2))
    assert (recorded.speeds, recorded.costs, recorded.limits) == (original.speeds, original.costs, original.limits)
    assert (recorded.work.num_steps, recorded.work.rollouts_per_step) == (3, 32)


def test_the_recorded_completions_are_simulated_step_by_step(run):
    recording = read_recording(run)
    recorded, seen = recorded_scenario(recording), sorted(n for step in recording.steps for n in step.lengths)
    names = [(group, f"{group}/{member}/0") for group in recorded.work.given for member in range(4)]
    assert sorted(recorded.work.length(*name) for name in names) == seen


def test_a_run_that_goes_on_is_simulated_one_step_further(tmp_path):
    """Its last recorded step is not its last one: generation runs ahead in it."""
    record_run(tmp_path, scenario(groups_per_step=4, num_steps=3))
    events = tmp_path / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(True)[:-1]))
    recording = read_recording(tmp_path)
    assert len(recording.steps) == 2
    assert recorded_scenario(recording).work.num_steps == 3


def test_steps_with_an_evaluation_are_not_compared(tmp_path):
    record_run(tmp_path, scenario(groups_per_step=4, num_steps=4))
    metrics = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[2]["eval_reward"] = 0.5
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording = read_recording(tmp_path)
    assert [recording.steps[place].step for place in recording.counted] == [2, 4]


def test_groups_that_teach_nothing_make_the_trainer_faster(tmp_path):
    record_run(tmp_path, scenario(groups_per_step=4, num_steps=3))
    (tmp_path / "config.toml").write_text("[orchestrator]\ndrop_zero_advantage = true\n")
    rows = [{"step": step, "groups_equal": 1.0} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recording = read_recording(tmp_path)
    assert recording.trained_share == 0.75
    assert recorded_scenario(recording).speeds.train.tokens_per_s == pytest.approx(800 / 0.75)


def test_only_the_last_life_of_a_resumed_run_counts(tmp_path):
    record_run(tmp_path, scenario(groups_per_step=4, num_steps=2))
    record_run(tmp_path, scenario({"actor": 0, "rollout": 1}, groups_per_step=4, num_steps=3))
    recording = read_recording(tmp_path)
    assert recording.setting.home.num_slots == 2
    assert len(recording.steps) == 3


def test_a_recording_that_ends_in_the_middle_of_a_line_is_read_to_the_line_before(tmp_path):
    record_run(tmp_path, scenario(groups_per_step=4, num_steps=3))
    whole = read_recording(tmp_path)
    for name in ("events.jsonl", "metrics.jsonl"):
        with (tmp_path / name).open("ab") as stream:
            stream.write('{"step": 4, "kind": "profile", "sentence": "→'.encode()[:-1])
    assert read_recording(tmp_path) == whole


def _no_profiles(folder):
    record = Recorder(folder)
    record.event(CheckpointSaved(1, "", sentence="Saved."))
    record.close()


def _one_profile(folder):
    record_run(folder, scenario(groups_per_step=4, num_steps=1))


def _strange(folder):
    record_run(folder, scenario(groups_per_step=4, num_steps=2))
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace('"decode":', '"decoding":'))


def _newer(folder):
    record_run(folder, scenario(groups_per_step=4, num_steps=2))
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace(f'"version": {FORMAT}', f'"version": {FORMAT + 1}'))


@pytest.mark.parametrize(
    ("furnish", "said"),
    [
        (lambda folder: folder.rmdir(), "There is no run"),
        (lambda folder: None, "holds no run that has begun"),
        (_no_profiles, "was recorded without its setting"),
        (_one_profile, "has profiles of 1 step, and needs two"),
        (_strange, "was recorded by another version of ductile"),
        (_newer, f"format {FORMAT + 1}, and this ductile reads formats 1 to {FORMAT}"),
    ],
)
def test_a_folder_that_cannot_be_planned_from_is_told_in_a_sentence(tmp_path, capsys, furnish, said):
    folder = tmp_path / "x"
    folder.mkdir()
    furnish(folder)
    assert plan_command.main(["--run", str(folder)]) == 2
    sentence = capsys.readouterr().err
    assert said.lower() in sentence.lower()
    assert sentence.startswith("ductile plan: ")
    assert command.main(["--run", str(folder)]) == 2
    assert said.lower() in capsys.readouterr().err.lower()
    with pytest.raises(NoRecording):
        read_recording(folder)


def test_the_table_has_every_way_and_ends_in_a_sentence(run, tmp_path, capsys):
    assert plan_command.main(["--run", str(run), "--json", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {(case["policy"], len(case["train"])) for case in plan["cases"]} == {
        *((policy, count) for policy in ("static", "rules", "rules_policies", "model") for count in (1, 2)),
        ("collocated", 3),
    }
    assert plan["error"] == pytest.approx(plan["predicted"]["step_s"] / plan["measured_step_s"] - 1)
    assert f"A step took {plan['measured_step_s']:.2f} s" in said
    assert plan["verdict"].lower() in [line.lower() for line in said.splitlines()]
    for name in {case["policy"] for case in plan["cases"]} - set(NAMES):
        assert f"\n{name}: policy " in said, "a row that is no value of cluster.policy is explained"
    assert plan["toml"] in said
    best = min(plan["cases"], key=lambda case: case["step_s"])
    assert tomllib.loads(plan["toml"])["cluster"]["policy"] == CONFIGURED.get(best["policy"], (best["policy"], ()))[0]


@pytest.mark.parametrize(
    ("case", "policy"),
    [
        (("static", 8.0, (0,), (1, 2, 3)), Static()),
        (("model", 8.0), Model()),
        (("rules", 8.0), Rules()),
        (("rules_policies", 8.0), Rules(True, True)),
        (("collocated", 8.0, (0, 1, 2, 3), (0, 1, 2, 3)), InTurns()),
    ],
)
def test_a_way_is_written_as_a_config_that_means_it_over_one_that_says_otherwise(tmp_path, monkeypatch, case, policy):
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    case = _case(*case)
    (tmp_path / "way.toml").write_text(case.toml())
    (tmp_path / "other.toml").write_text(_case("model", 9.0, (0, 1), (2, 3)).toml())
    config = parse(RLConfig, ["@", "good.toml", "@", "other.toml", "@", "way.toml"]).config
    assert policy_of(config.cluster) == policy
    placement = placement_of(config)
    assert (placement.train, placement.generate) == (case.placement.train, case.placement.generate)


def _case(policy, step_s, train=(0, 1), generate=(2, 3)):
    return Case(policy, Placement(train, generate, (), ""), step_s, 0.1, 0.0)


COLLOCATED = _case("collocated", 10.5, (0, 1, 2, 3), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            [_case("model", 7.8, (0,), (1, 2, 3)), _case("model", 7.81), COLLOCATED],
            "policy model on the same placement saves 22% against this run's own way; collocated would be 5% "
            "slower than this run.",
        ),
        (
            [_case("static", 8.0, (0,), (1, 2, 3))],
            "policy static on train 0, generate 1-3 saves 20% against this run's own way.",
        ),
        (
            [_case("model", 9.95), COLLOCATED],
            "nothing here is faster than this run's own way, policy static begun with train 0-1, generate 2-3; "
            "collocated would be 5% slower than this run.",
        ),
        (
            [_case("model", 9.0), _case("collocated", 8.0, (0, 1, 2, 3), (0, 1, 2, 3))],
            "collocated on train and generate 0-3 saves 20% against this run's own way.",
        ),
    ],
)
def test_the_verdict(others, said):
    assert verdict(_case("static", 10.0), others) == said


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            [_case("static", 13.0), _case("static", 12.0, (0,), (1, 2, 3)), _case("model", 10.0), COLLOCATED],
            "nothing here is faster than this run's own way, policy model begun with train 0-1, generate 2-3; the best "
            "split whose slots keep their roles, train 0, generate 1-3, would be 20% slower than this run; collocated "
            "would be 5% slower than this run.",
        ),
        (
            [_case("static", 9.0), _case("model", 10.0)],
            "policy static on the same placement saves 10% against this run's own way.",
        ),
    ],
)
def test_a_run_with_a_scheduler_is_told_what_it_would_be_without(others, said):
    assert verdict(_case("model", 10.0), others) == said


def _predicted_from(run, tmp_path, capsys):
    assert plan_command.main([str(run), "--json", str(tmp_path / "plan.json")]) == 0
    return capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())


def test_a_prediction_that_is_far_off_is_not_to_be_relied_on(tmp_path, capsys):
    """The steps took nearly twice as long as the recorded speeds make them."""
    record_run(tmp_path, scenario(groups_per_step=2, num_steps=3))
    assert _predicted_from(tmp_path, tmp_path, capsys)[1]["doubts"] == []
    events = tmp_path / "events.jsonl"
    rows = [json.loads(line) for line in events.read_text().splitlines()]
    for row in rows:
        for edge in {"start_s", "end_s"} & row.keys():
            row[edge] *= 1.8
    events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said, plan = _predicted_from(tmp_path, tmp_path, capsys)
    (doubt,) = plan["doubts"]
    assert doubt.startswith("Do not rely on this table: the run's own step is predicted 4")
    assert "% too short" in doubt
    assert f"\n{doubt}\n\npolicy " in said
    assert f"\nIf the table holds all the same: {plan['verdict']}\n" in said
    assert "As TOML" not in said


@pytest.mark.parametrize(("policy", "told"), mostly_nightly([("static", True), ("model", False)], ("static", True)))
def test_resizes_by_hand_are_told_and_those_of_a_scheduler_are_simulated(tmp_path, capsys, policy, told):
    record_run(tmp_path, scenario(groups_per_step=4, num_steps=3), policy)
    record = Recorder(tmp_path)
    for _ in range(2):
        record.event(TrainerResized(1, (0,), (0, 1), sentence="Trainer resized."))
    record.close()
    said = _predicted_from(tmp_path, tmp_path, capsys)[0]
    assert ("resized by hand 2 times" in said) == told


def test_simulate_and_plan_begin_a_policy_on_the_run_s_own_placement(tmp_path, capsys):
    """Though the best split is another."""
    run = tmp_path / "run"
    record_run(run, scenario({"actor": "0-1", "rollout": 2}, groups_per_step=8, num_steps=3))
    words = ["--run", str(run), "--arms", '["best_static", "model"]', "--output-dir", str(tmp_path)]
    assert command.main(words) == 0
    arms = {arm["arm"]: arm for arm in json.loads((tmp_path / "simulated.json").read_text())["arms"]}
    assert (arms["best_static"]["train"], arms["model"]["train"]) == ("0", "0-1")
    _, plan = _predicted_from(run, tmp_path, capsys)
    home = next(case for case in plan["cases"] if case["policy"] == "model" and case["train"] == [0, 1])
    recording = read_recording(run)
    assert recording.mean_s(arms["model"]["step_s"]) == pytest.approx(home["step_s"])


def test_simulate_takes_a_recording_and_what_is_written_goes_before_it(run, tmp_path, capsys):
    words = ["--run", str(run), "--arms", '["static"]', "--output-dir", str(tmp_path / "out")]
    assert command.main(words) == 0
    said = capsys.readouterr().out
    assert "From" in said
    assert "3 steps of 8 x 4 rollouts on 3 slots" in said
    slower = [
        *words,
        "--speeds.decode-step-s",
        "0.1",
        "--work.steps",
        "1",
        "--cluster.component-placement.rollout",
        "1-4",
    ]
    assert command.main([*slower, "--cluster.component-placement.actor", "0"]) == 0
    assert "1 step of 8 x 4 rollouts on 5 slots" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("placement", "shares"), [({"actor": 0, "rollout": "1-2"}, False), ({"actor,rollout": "0-2"}, True)]
)
def test_a_run_on_gpus_is_planned_with_what_gpus_have_memory_for(tmp_path, monkeypatch, capsys, placement, shares):
    """Slots share only on a placement that has them share, whatever the run's own has."""
    record_run(tmp_path, scenario(placement, groups_per_step=4, num_steps=3, on_gpu=True))
    simulated = {}

    def noted(scenario, policy):
        simulated[scenario.placement.shares] = scenario.limits.may_share
        result = simulate(scenario, policy)
        if not scenario.placement.shares:
            assert not [move for change in result.changes for move in change.decision.moves if move.after == BOTH]
        return result

    monkeypatch.setattr("ductile.sim.plan.simulate", noted)
    said, plan = _predicted_from(tmp_path, tmp_path, capsys)
    assert simulated == ({False: False, True: True} if shares else {False: False})
    assert ("collocated" in {case["policy"] for case in plan["cases"]}) == shares
    assert ("\ncollocated is left out: nothing in this run says that its GPUs have memory" in said) != shares


@pytest.mark.parametrize(("words", "may_share"), [((), True), (("--cluster.device", "cuda"), False)])
def test_the_devices_of_a_simulated_run_say_what_shares(run, words, may_share):
    """Of one that is written down, and of one that was recorded."""
    for recording in (None, read_recording(run)):
        made = configured(parse(SimulateConfig, [*words]).config, recording)
        assert made.limits.may_share == may_share
        assert made.at(collocate(made.placement)).limits.may_share
