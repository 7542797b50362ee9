"""Runs on a real Ray cluster of several nodes on this machine: `make cluster-test` installs Ray and runs them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Run, write_sft
from tests.tiny import make_model_folder

pytest.importorskip("ray", reason='Ray is not installed: pip install "ductile[ray]"')

STEPS = 10
RUN_S = 300.0
pytestmark = pytest.mark.timeout(900)


class RayNodes:
    """A Ray cluster whose nodes are raylets on this machine, one CPU each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.cluster = Cluster(initialize_head=True, connect=False, head_node_args=self._arguments())
        self.address: str = self.cluster.address

    def _arguments(self) -> dict[str, Any]:
        return {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}

    def add(self) -> Any:
        return self.cluster.add_node(**self._arguments())

    def remove(self, node: Any) -> None:
        """Kill the node's processes, as a machine that is switched off."""
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, within_s: float) -> None:
        words = ["drain-node", "--address", self.address, "--node-id", node.node_id]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        words += ["--deadline-remaining-seconds", f"{within_s:.0f}"]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words], check=True, timeout=60)


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    made = RayNodes()
    try:
        yield made
    finally:
        made.cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start() -> Iterator[Any]:
    lives: list[Run] = []

    def begin(config: Path, *flags: str, **how: Any) -> Run:
        lives.append(Run(config, *flags, **how))
        return lives[-1]

    yield begin
    for life in lives:
        life.process.kill()
        life.process.wait()


def on(nodes: RayNodes, *flags: str, num_nodes: int = 2) -> list[str]:
    ray = json.dumps({"address": nodes.address, "num_nodes": num_nodes})
    return ["--ray", ray, "--cluster.start-timeout-s", "250", *flags]


def test_sft_on_ray_learns_what_it_learns_here(nodes: RayNodes, tmp_path: Path, model: Path, start: Any) -> None:
    changes = {"max_steps": STEPS, "train": '"0-1"', "interval": STEPS}
    nodes.add()
    began_s = time.monotonic()
    run = start(write_sft(tmp_path / "ray", model, **changes), *on(nodes), command="sft")
    run.until(lambda: len(run.events("slot_started")) == 2, RUN_S)
    print(f"\n2 slots on 2 Ray nodes started in {time.monotonic() - began_s:.1f} s")
    assert run.ends(within_s=RUN_S) == 0, run.said()
    began_s = time.monotonic()
    plain = start(write_sft(tmp_path / "plain", model, **changes), command="sft")
    plain.until(lambda: len(plain.events("slot_started")) == 2, RUN_S)
    print(f"2 slots on this machine started in {time.monotonic() - began_s:.1f} s")
    assert plain.ends(within_s=RUN_S) == 0, plain.said()
    assert sorted(event["node"] for event in run.events("node_joined")) == [0, 1]
    rows, expected = run.metrics(), plain.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def test_nodes_of_ray_join_drain_and_die(nodes: RayNodes, tmp_path: Path, model: Path, start: Any) -> None:
    config = write_sft(tmp_path / "ray", model, max_steps=100_000, train=0, interval=100_000)
    run = start(config, *on(nodes, "--cluster.max-nodes", "2", num_nodes=1), command="sft")
    run.until(lambda: len(run.metrics()) >= 1, RUN_S)
    assert [event["node"] for event in run.events("node_joined")] == [0]
    added = nodes.add()
    run.until(lambda: len(run.events("node_joined")) == 2, RUN_S)
    run.until(lambda: len(run.events("slot_started")) == 2, RUN_S)
    nodes.drain(added, 300)
    run.until(lambda: bool(run.events("node_noticed")), RUN_S)
    [noticed] = run.events("node_noticed")
    assert (noticed["node"], noticed["slots"]) == (1, [1])
    assert 0 < noticed["within_s"] <= 300
    nodes.remove(added)
    run.until(lambda: bool(run.events("node_lost")), RUN_S)
    [lost] = run.events("node_lost")
    assert lost["node"] == 1
    assert "preempted" in lost["sentence"] or "is gone" in lost["sentence"]
    step = len(run.metrics())
    run.until(lambda: len(run.metrics()) > step, RUN_S)
