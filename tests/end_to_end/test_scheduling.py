"""Runs whose slots change roles while they are at work."""

import signal
from pathlib import Path

import pytest

from ductile.cli import main
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.messages.control import Unfit
from ductile.orchestrator.control.control import Run as LiveRun
from tests.end_to_end.runs import summary, write_config
from tests.nightly import mostly_nightly

BOTH_RULES = ("--cluster.use-pre-process-policy", "--cluster.use-wait-before-last-iter-policy")
SCORED = ("--trainer.loss.type", "grpo")
"""The scorers' log-probs are learned from."""
EXAMPLES = Path(__file__).parents[2] / "examples"


def write_scheduled(path, model, policy, **changes):
    """Completions of up to 40 tokens, all of which are trained on."""
    config = write_config(path, model, **changes)
    text = config.read_text().replace(
        "sampling.max_tokens = 8", "sampling.max_tokens = 40\ndrop_zero_advantage = false"
    )
    config.write_text(f'cluster.auto_scheduler = true\ncluster.policy = "{policy}"\n{text}')
    return config


def test_slots_go_everywhere_while_they_work_and_nothing_is_lost(tmp_path, model, start):
    config = write_scheduled(tmp_path, model, "tests.end_to_end.moves.EverywhereInTurn", max_steps=9, interval=20)
    # Two at a time: no generator is ever done with its share before the policy hears of the first completion.
    config.write_text(f"inference.max_num_seqs = 2\n{config.read_text()}")
    run = start(config)
    run.until_step(1)
    with pytest.raises(Unfit, match="moved by its scheduler"):
        LiveRun(run.folder).resize(train=[0, 1])
    known = LiveRun(run.folder).status()
    assert all(sum(slot.seconds.values()) > 0 for slot in known.slots)
    assert run.ends(within_s=200) == 0, run.said()
    rows = [row for row in run.metrics() if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, 10))
    # Every sampled token is trained once: a sample that got lost or was trained twice would show.
    assert [row["trained_tokens"] for row in rows] == [row["sampled_tokens"] for row in rows]
    assert rows[-1]["groups_dropped"] == rows[-1]["reward_errors"] == 0
    assert not run.events("policy_failed")
    switched = run.events("switched")
    assert [failure for event in switched for failure in event["failures"]] == []
    decided = " ".join(event["sentence"] for event in run.events("decided"))
    for way in ("0 train → train+generate", "2 generate → train", "2 train → score", "0 train → generate"):
        assert way in decided
    assert sum(event["num_migrations"] for event in switched) > 0
    told = summary(run.folder)
    assert told["num_switches"] == len(switched)
    assert told["idle_share"] == pytest.approx(sum(told["idle_by_cause"].values()))
    assert 0 < told["switch_share"] < 1
    (setting,) = [Setting.from_fields(event) for event in run.events("setting")]
    assert (setting.policy, setting.home.train) == ("tests.end_to_end.moves.EverywhereInTurn", (0,))
    began = [each["id"] for event in switched for each in event["began"]]
    ended = [name for event in switched for name in event["ended"]]
    first = [each.id for each in setting.instances]
    assert first == ["generator-1", "generator-2", "scorer-3"]
    assert len({*first, *began}) == len(first) + len(began), "no id is used again"
    assert {*ended} <= {*first, *began}
    steps = [StepProfile.from_fields(event) for event in run.events("profile")]
    spans = [span for step in steps for span in step.spans]
    assert sum(span.seconds for span in spans) == pytest.approx(4 * steps[-1].end_s, rel=1e-3)
    last = {span.slot: span.activity for span in spans}
    assert "switch" not in last.values()
    assert steps[-1].costs.resize_s != steps[0].costs.resize_s, "measured, and no longer the prior alone"
    assert main(["replay", str(run.folder)]) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "policy",
    mostly_nightly(
        ["model", "rules", "static", "tests.end_to_end.moves.Keen", "tests.end_to_end.moves.OnceAStep"],
        "model",
    ),
)
def test_every_decision_is_made_again_the_same_when_a_run_was_killed_and_resumed_too(
    tmp_path, model, start, policy, capsys
):
    config = write_scheduled(tmp_path, model, policy, max_steps=6)
    run = start(config)
    run.until_step(2)
    run.process.kill()
    assert run.ends(within_s=200) == -signal.SIGKILL
    assert main(["replay", str(run.folder)]) == 0
    resumed = start(config, "--resume")
    assert resumed.ends(within_s=200) == 0, resumed.said()
    assert not resumed.events("policy_failed")
    assert main(["replay", str(run.folder)]) == 0
    said = capsys.readouterr().out
    assert f"by the policy {policy} in 1 start" in said
    assert f"by the policy {policy} in 2 starts" in said


@pytest.mark.slow
def test_the_second_ctrl_c_ends_a_run_whose_policy_never_returns(tmp_path, model, start):
    run = start(write_scheduled(tmp_path, model, "tests.end_to_end.moves.Endless"), module="tests.end_to_end.hasty")
    run.until(lambda: "asked" in run.said().splitlines())
    run.press_twice()
    assert run.ends(within_s=200) == 130
    assert "Stopped at once, as asked" in run.said(), "the policy has a thread of its own"


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("rules", ()),
        pytest.param("model", SCORED, marks=pytest.mark.nightly),
        pytest.param("rules", (*BOTH_RULES, *SCORED), marks=pytest.mark.nightly),
    ],
    ids=["rules", "model", "both rules"],
)
def test_the_policies_end_a_run_with_its_last_evaluation(tmp_path, model, start, policy, flags):
    """After the last step of `rules` all slots train: an evaluation needs generators once more. With both rules the
    trainer waits for half of the rollouts, and in the end for the last one's score."""
    run = start(write_scheduled(tmp_path, model, policy, max_steps=2, interval=10), *flags)
    assert run.ends(within_s=200) == 0, run.said()
    waits = " ".join(event["sentence"] for event in [*run.events("decided"), *run.events("held")])
    assert ("rain slots generate until half" in waits) == (flags[:1] == BOTH_RULES[:1])
    assert not run.events("policy_failed")
    told = summary(run.folder)
    assert told["eval_reward_last"] is not None
    assert told["steps"] == 2
    rows = [row for row in run.metrics() if row["step"]]
    assert [row["trained_tokens"] for row in rows] == [row["sampled_tokens"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "scheduled"),
    mostly_nightly([("disaggregated.yaml", False), ("dynamic.yaml", True)], ("dynamic.yaml", True)),
)
def test_the_seed_s_files_run_over_the_quickstart(tmp_path, start, file, scheduled):
    """With fewer rollouts and steps, and what the quickstart's slots are in its own folder; `cluster` is as it is."""
    config = tmp_path / "rl.toml"
    config.write_text((EXAMPLES / "quickstart/rl.toml").read_text().replace("examples/", f"{EXAMPLES}/"))
    few = (
        "--max-steps", "2", "--trainer.scheduler.warmup-steps", "1", "--trainer.scheduler.decay-steps", "1",
        "--orchestrator.batch-size", "64", "--orchestrator.eval.num-examples", "8",
    )  # fmt: skip
    folder = ("--output-dir", str(tmp_path / "run"), "--cluster.device", "cpu")
    run = start(config, "@", str(EXAMPLES / "scheduling" / file), *few, *folder)
    assert run.ends(within_s=200) == 0, run.said()
    (setting,) = [Setting.from_fields(event) for event in run.events("setting")]
    assert setting.policy == ("model" if scheduled else "static")
    assert setting.home.num_slots == 8
    assert not run.events("policy_failed")
    told = summary(run.folder)
    assert told["steps"] == 2
    # Whether a change pays in two steps is a matter of the machine.
    assert bool(told["deciding_share"]) == scheduled
    assert bool(told["num_switches"]) == bool(run.events("decided")) <= scheduled
