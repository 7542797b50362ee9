import json
import re
from dataclasses import replace

import pytest

from ductile.config.reading.parse import parse
from ductile.config.schema.simulate import SimulateConfig
from ductile.core.instances.instances import instance_on
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules, choose_layout, layout_for
from ductile.core.layout.choice.layout_text import in_words
from ductile.core.layout.geometry.parallel_layout import RankShape
from ductile.core.scheduling.costs.cost import TrainSpeed
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.facts.ledger import Span
from ductile.core.scheduling.orders import Decision, RoleChange
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns, Static
from ductile.elastic.policy_decision import BadDecision
from ductile.observe import read_jsonl
from ductile.sim.arms import run_arms
from ductile.sim.command import main
from ductile.sim.configured import configured
from ductile.sim.loads import SimulatedLoads
from ductile.sim.recording import read_recording, recorded_scenario
from ductile.sim.run import simulate
from ductile.sim.scenario import lognormal
from ductile.sim.simulated_actuator import SimulatedActuator
from ductile.sim.timeline import causes, gantt, svg
from tests.core.scheduling.scenes import id_on
from tests.sim.recorded import record_run
from tests.sim.scenarios import scenario

UNEVEN = '{"actor": 0, "rollout": 1, "inference": "2-4"}'
POLICIES = [Static(), InTurns(), Rules(), Rules(True, True), Model()]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"max_async_level": 1},
        {"n_minibatches": 3},
        {"placement": {"actor,rollout": "0-3"}},
        {"placement": {"actor": "0-1", "rollout": "2-4", "inference": 5}, "score": True},
    ],
    ids=["on-policy", "ahead", "minibatches", "shared", "scorer"],
)
def test_every_rollout_is_trained_once_and_every_second_is_accounted_for(policy, changed):
    result = simulate(scenario(**changed), policy)
    assert len(result.step_s) == 2
    assert sum(result.step_s) == pytest.approx(result.wall_s, rel=0.05)
    assert sum(result.totals.values()) == pytest.approx(result.wall_s * result.num_slots)
    assert sum(result.idle.values()) == pytest.approx(result.totals.get("idle", 0.0))
    assert sum(span.seconds for span in result.spans) == pytest.approx(result.wall_s * result.num_slots)


@pytest.mark.parametrize("policy", [Static(), Rules(True, True), Model()], ids=repr)
def test_slots_that_change_roles_wait_for_slow_groups_too(policy, tmp_path):
    waits = {"num_steps": 5, "max_async_level": 1, "max_off_policy_steps": 1, "on_stale": "wait"}
    result = simulate(scenario(**waits, draw=lognormal(100, 1.6), alike=0.9), policy, tmp_path)
    assert len(result.step_s) == 5
    assert "group_dropped" not in {row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")}


@pytest.mark.parametrize("policy", [Rules(), Model()], ids=repr)
def test_the_trainer_goes_through_the_layouts_that_are_listed_for_its_numbers_of_slots(policy, monkeypatch):
    seen = []
    resize = SimulatedActuator.resize

    async def noted(actuator, layout, release):
        seen.append(layout)
        return await resize(actuator, layout, release)

    monkeypatch.setattr(SimulatedActuator, "resize", noted)
    rules = LayoutRules(asked=AskedLayout(tp=2), listed=("pp=2,tp=2",))
    result = simulate(scenario({"actor": "0-1", "rollout": "2-5"}, rules=rules), policy)
    assert len(result.step_s) == 2
    assert seen
    assert all(layout.dims == choose_layout(len(layout.slots), rules).layout.dims for layout in seen)


def test_ranks_of_several_slots_take_as_long_as_they_were_measured_to():
    given, rules = scenario(), LayoutRules(listed=("tp=3",))
    slow = replace(given.speeds, train=replace(given.speeds.train, rank_speeds=((RankShape(tp=3), 0.5),)))
    alone, tp3, slow_tp3 = (
        simulate(each, Static())
        for each in (given, replace(given, rules=rules), replace(given, rules=rules, speeds=slow))
    )
    assert slow_tp3.wall_s > max(alone.wall_s, tp3.wall_s)


def test_stages_wait_longer_where_an_optimizer_step_has_few_samples():
    def train_s(listed: str, n_minibatches: int) -> float:
        given = scenario(rules=LayoutRules(listed=(listed,)), n_minibatches=n_minibatches)
        speeds = replace(given.speeds, train=TrainSpeed(800), optim_s=0.0)
        return simulate(replace(given, speeds=speeds), Static()).totals["train"]

    assert train_s("tp=3", 12) == pytest.approx(train_s("tp=3", 1))
    assert train_s("pp=3", 12) > 1.15 * train_s("pp=3", 1), "messages of 4 micro-batches, where 12 fill the stages"


class Looks:
    """It keeps what it is told of the step, and changes nothing."""

    def __init__(self) -> None:
        self.states: list[ClusterState] = []

    def decide(self, state: ClusterState) -> Decision:
        self.states.append(state)
        return Decision()


@pytest.mark.parametrize("scores", [False, True])
def test_policies_are_told_each_rollout_of_the_step_once(scores: bool):
    """By the books that a live run keeps; one that has just ended is nowhere until its group has heard of it."""
    policy = Looks()
    placement = {"actor": "0-1", "rollout": "2-4", "inference": 5} if scores else {"actor": "0-1", "rollout": "2-5"}
    simulate(scenario(placement, score=scores, n_minibatches=3), policy)
    assert {state.batch.step for state in policy.states} >= {0, 1}
    for state in policy.states:
        step = state.batch
        parts = (step.trained, step.ready, step.to_score, step.partial, len(state.unfinished), step.to_start)
        assert min(parts) >= 0, step
        assert step.num_rollouts == (48 if step.step < 2 else 0)
        assert sum(parts) <= step.num_rollouts, step
    wholly_told = [state for state in policy.states if not state.unfinished and not state.batch.partial]
    assert any(state.batch.trained + state.batch.ready == 48 for state in wholly_told)
    assert {state.batch.update for state in policy.states} == {0, 1, 2, 3}


@pytest.mark.parametrize("n_minibatches", [1, 2, 5])
@pytest.mark.parametrize("score_tokens_per_s", [100, 5000])
def test_a_trainer_that_waits_for_scores_gets_them(n_minibatches, score_tokens_per_s):
    """However slow the scorer: all that the optimizer step wants is scored while the trainer is held."""
    work = scenario({"actor": 0, "rollout": "1-3", "inference": 4}, score=True, n_minibatches=n_minibatches)
    work = replace(work, speeds=replace(work.speeds, score_tokens_per_s=score_tokens_per_s))
    result = simulate(work, Rules(wait_before_last_iter=True))
    assert len(result.step_s) == 2
    takes = [change for change in result.changes if RoleChange(4, ("score",), ("train",)) in change.decision.moves]
    assert takes, "all slots take the last part, the scorer too"
    scored = [span for span in result.spans if span.activity == "score"]
    for change in takes:
        assert not [span for span in scored if span.start_s < change.at_s < span.end_s], "none is still to be scored"


def test_the_work_is_the_same_whatever_the_slots_do():
    tokens = {simulate(scenario(), policy).num_tokens for policy in POLICIES}
    assert len(tokens) == 1


def test_the_same_scenario_gives_the_same_run():
    first, second = simulate(scenario(), Model()), simulate(scenario(), Model())
    assert first.spans == second.spans
    assert [each.decision for each in first.changes] == [each.decision for each in second.changes]


def test_nobody_is_left_idle_for_want_of_a_decision():
    """On-policy and long-tailed, slots that follow the work beat every fixed split, and generating in turns."""
    big = scenario(groups_per_step=32, group_size=8, num_steps=3)
    walls = {outcome.name: outcome.result.wall_s for outcome in run_arms(big, ["best_static", "collocated", "model"])}
    assert walls["model"] < 0.85 * walls["best_static"]
    assert walls["model"] < 0.95 * walls["collocated"]


def test_decisions_are_sentences_in_the_events(tmp_path):
    simulate(scenario(), Model(), tmp_path)
    said = [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "decided"]
    assert any("generate → train" in sentence and "net gain" in sentence for sentence in said)


def test_a_policy_that_orders_what_cannot_be_ends_the_run_with_a_sentence():
    class Bad:
        def decide(self, state):
            return Decision((RoleChange(0, ("generate",), ("train",)),))

    with pytest.raises(BadDecision, match="slot 0 holds train, not generate"):
        simulate(scenario(), Bad())


def test_switches_that_cost_too_much_are_not_made():
    dear = scenario()
    result = simulate(replace(dear, costs=replace(dear.costs, resize_s=500.0, assign_s=500.0)), Model())
    assert not any(each.decision.moves for each in result.changes)


def test_pictures_show_every_slot():
    result = simulate(scenario(), Model())
    lines = gantt(result.spans, width=60).split("\n")
    assert [line[0] for line in lines[:6]] == ["0", "1", "2", "3", "4", "5"]
    assert all(len(line) == 62 for line in lines[:6])
    image = svg(result.spans, "a < b")
    assert image.startswith("<svg")
    assert "a &lt; b" in image
    assert image.count("<rect") > 20


def test_the_command_compares_and_writes_what_it_found(tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("50\n90\n800\n40\n")
    config = tmp_path / "sim.toml"
    config.write_text(
        f"""
        output_dir = "{tmp_path}/out"
        arms = ["static", "collocated", "model", "{tmp_path}/mine.py:Mine", "model"]
        [work]
        steps = 1
        prompts_per_step = 4
        lengths = {{ type = "file", path = "{tmp_path}/lengths.txt" }}
        """
    )
    (tmp_path / "mine.py").write_text("from ductile.core.scheduling.policies.rules import Home as Mine\n")
    assert main(["@", str(config)]) == 0
    said = capsys.readouterr().out
    assert "collocated" in said
    assert "G generate" in said
    arms = json.loads((tmp_path / "out/simulated.json").read_text())["arms"]
    assert [arm["arm"] for arm in arms] == ["static", "collocated", "model", f"{tmp_path}/mine.py:Mine", "model"]
    for arm in arms:
        assert sum(arm["slot_seconds"].values()) == pytest.approx(8 * arm["wall_s"])
    own = f"{tmp_path}/mine.py:Mine".replace("/", "_").replace(":", "_")
    pictures = {path.name for path in (tmp_path / "out").glob("*.svg")}
    assert pictures == {"static.svg", "collocated.svg", "model.svg", f"{own}.svg", "model_2.svg"}


def test_layouts_are_written_or_laid_over_those_of_a_recording(tmp_path):
    config = parse(SimulateConfig, ["--cluster.layouts", '["tp=2"]']).config
    written = configured(config)
    assert in_words(layout_for(range(4), written.rules).dims) == "dp_shard 2 · tp 2"
    rules = LayoutRules(asked=AskedLayout(tp=2), listed=("pp=2",))
    record_run(tmp_path, scenario({"actor": "0-1", "rollout": "2-5"}, rules=rules, groups_per_step=4, num_steps=2))
    recording = read_recording(tmp_path)
    assert recorded_scenario(recording).rules == rules
    changed = configured(config, recording)
    assert changed.rules == replace(rules, listed=("tp=2",))


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    config = tmp_path / "sim.toml"
    config.write_text("[cluster]\ncomponent_placement = { actor = 0, rolout = 1 }\n")
    assert main(["@", str(config)]) == 2
    assert "rolout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arms", '["best_static", "rules_policy"]'], "Did you mean rules_policies?"),
        (["--arms", '["best_static", "no_such_module.Policy"]'], "cannot import no_such_module"),
        (
            ["--cluster.component-placement", UNEVEN, "--cluster.slots-per-scorer", "2"],
            "cluster.slots_per_scorer = 2 must divide the number of inference slots, 3",
        ),
        (["--cluster.layouts", '["dp=2"]'], "cluster.layouts: 'dp=2': 'dp' is no axis: write dp_shard"),
        (["--work.lengths.type", "file", "--work.lengths.path", "no/such.txt"], "there is no file no/such.txt"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_anything_is(capsys, words, said):
    assert main(words) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


def test_a_policy_of_one_s_own_that_returns_nothing_is_a_sentence_that_names_its_arm(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("class Mine:\n    def decide(self, state):\n        pass\n")
    words = ["--arms", json.dumps(["static", f"{tmp_path}/mine.py:Mine"]), "--output-dir", str(tmp_path / "out")]
    assert main([*words, "--work.steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "mine.py:Mine: the policy cannot be used: it returned None, and not with a Decision" in said
    assert "Traceback" not in said


def test_causes_are_words_and_those_that_round_to_nothing_are_left_out():
    assert causes({"queue_full": 5.0, "tail": 12.0, "start_up": 0.01}, 100.0) == "tail 12.0%, queue full 5.0%"
    assert causes({}, 100.0) == "none"


@pytest.mark.parametrize("end_s", [0.7, 8.0, 300.0, 12345.0])
def test_an_image_s_ticks_all_differ_and_its_rows_have_names(end_s):
    image = svg([Span(0, 0.0, end_s, "train"), Span(12, 0.0, end_s, "idle", "queue_full")], "a")
    assert len(set(re.findall(r">([\d.]+) s</text>", image))) == 11
    assert ">slot 12</text>" in image
    assert "idle (queue full)" in image


def test_prompts_are_computed_however_fast_caches_travel():
    """Nobody has a cache of a new prompt."""
    still = scenario({"actor": "0-1", "rollout": "2-3"}, num_steps=2)
    costs = replace(still.costs, cache_bytes_per_token=1000.0, cache_bytes_per_s=1e12)
    assert simulate(replace(still, costs=costs), Static()).wall_s == simulate(still, Static()).wall_s
    slower = replace(still, speeds=replace(still.speeds, prefill_tokens_per_s=500.0), costs=costs)
    assert simulate(slower, Static()).wall_s > simulate(still, Static()).wall_s


@pytest.mark.parametrize(("cache_block", "together"), [(1, True), (14, True), (16, False), (0, False)])
def test_siblings_go_together_where_the_simulated_cache_shares_their_prompt(cache_block, together):
    """Of 14 tokens."""
    loads = SimulatedLoads(cache_block)
    for slot in (1, 2):
        loads.open(instance_on("generate", (slot,)))
    loads.add(loads.route("g", 14).instance, "g", 50.0)
    assert loads.route("g", 14).instance == id_on(1 if together else 2)


def test_a_cache_that_shares_nothing_costs_every_sibling_its_prompt():
    longer, shorter = (
        simulate(replace(scenario(prompt_tokens=1024, max_tokens=64, seq_len=1088), cache_block=block), Static())
        for block in (0, 1)
    )
    assert longer.wall_s > shorter.wall_s
