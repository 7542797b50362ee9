"""Runs over several nodes: agents with loopback addresses of their own (`tests.cluster.joining`), as `ductile join`
starts them. They share no memory and no control groups with each other."""

from pathlib import Path

import pytest

from tests.cluster.joining import HEAD, join, stderr_of
from tests.end_to_end.runs import Run, write_config, write_sft

NUM_STEPS = 6
SEVERAL = ["--cluster.num-nodes", "2", "--cluster.interface", HEAD, "--cluster.start-timeout-s", "250"]


def end_with(run: Run, *agents) -> None:
    assert run.ends(within_s=300) == 0, run.said()
    for agent in agents:
        assert "The run is over." in stderr_of(agent)
        assert agent.returncode == 0


@pytest.mark.nightly
def test_sft_over_two_nodes_learns_what_it_learns_on_one(tmp_path: Path, model: Path, start):
    """Node 0 is the orchestrator's own machine, and slot 1 is on node 1."""
    changes = {"max_steps": NUM_STEPS, "train": '"0-1"', "interval": NUM_STEPS}
    plain = start(write_sft(tmp_path / "plain", model, **changes), command="sft")
    assert plain.ends(within_s=300) == 0, plain.said()
    run = start(write_sft(tmp_path / "nodes", model, **changes), *SEVERAL, command="sft")
    end_with(run, join(run.folder, 1, "--wait-s", "250"))
    assert [(event["node"], event["slots"]) for event in run.events("node_joined")] == [(1, [1])]
    assert [row["step"] for row in run.metrics()] == list(range(1, NUM_STEPS + 1))
    for expected, row in zip(plain.metrics(), run.metrics(), strict=True):
        assert row["tokens"] == expected["tokens"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert not (run.folder / "cluster.json").exists()
    assert not (run.folder / "cluster.key").exists()


@pytest.mark.slow
def test_rl_gives_generators_of_another_node_the_weights(tmp_path: Path, model: Path, start):
    """Slots 0 (train) and 1 (generate) are on node 0; 2 (generate) and 3 (score) on node 1, none with the orchestrator.
    Without the weights, rollouts of slot 2 would soon be too old to train on."""
    config = write_config(tmp_path / "rl", model, max_steps=3)
    run = start(config, *SEVERAL, "--cluster.head-is-node", "false")
    agents = [join(run.folder, node, "--node-rank", str(node), "--wait-s", "250") for node in (0, 1)]
    end_with(run, *agents)
    assert {event["node"] for event in run.events("node_joined")} == {0, 1}
    assert [row["step"] for row in run.metrics()] == [0, 1, 2, 3]
    assert run.events("slot_lost") == []


@pytest.mark.slow
@pytest.mark.nightly
def test_a_node_that_is_killed_costs_its_slots_alone(tmp_path: Path, model: Path, start):
    """Its generator's requests go to the other one, and the run ends as it should."""
    config = write_config(tmp_path / "rl", model, max_steps=6, train=0, generate="1-2", score=3)
    run = start(config, "--cluster.num-nodes", "4", *SEVERAL[2:], "--cluster.max-restarts", "0")
    agents = [join(run.folder, node, "--node-rank", str(node), "--wait-s", "250") for node in (1, 2, 3)]
    run.until_step(2)
    agents[1].kill()
    end_with(run, agents[0], agents[2])
    [lost] = run.events("node_lost")
    assert lost["node"] == 2
    assert lost["sentence"].endswith("is gone: its connection has ended.")
    [slot] = run.events("slot_lost")
    assert "was lost with node 2 (" in slot["sentence"]
    agents[1].wait(30)
