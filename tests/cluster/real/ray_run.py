"""Runs on a real Ray cluster of several nodes on this machine: `make cluster-test` installs Ray and runs them.

`ductile sft`, and `ductile rl` on-policy with a static placement, take the same steps on this machine and on two nodes
of Ray. `ductile inference` is not run on Ray: it has no `[ray]` (docs/ray.md).
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.real.ray_nodes import WORKER, RayAutoscaler, RayNodes
from tests.cluster.real.same_run import RAY, RUN_S, Runs
from tests.end_to_end.runs import Run, write_sft

pytest.importorskip("ray", reason='Ray is not installed: pip install "ductile[ray]"')

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    began_s = time.monotonic()
    made = RayNodes()
    try:
        made.add()
        print(f"\nRay, a head and another node: up in {time.monotonic() - began_s:.1f} s")
        yield made
    finally:
        made.cluster.shutdown()


@pytest.fixture
def start() -> Iterator[Any]:
    lives: list[Run] = []

    def begin(config: Path, *flags: str, **how: Any) -> Run:
        lives.append(Run(config, *flags, **how))
        return lives[-1]

    yield begin
    for life in lives:
        life.close()


def on(address: str, num_nodes: int, **ray: Any) -> list[str]:
    return ["--ray", json.dumps({"address": address, "num_nodes": num_nodes, **ray})]


def nodes_of(run: Path) -> list[int]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return sorted(row["node"] for row in rows if row["kind"] == "node_joined")


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_two_nodes_of_ray_are_the_same_run(nodes: RayNodes, runs: Runs, command: str) -> None:
    runs.reference(command)
    run = runs.run(command, "a Ray cluster, 2 nodes of 1 slot", f"ray-{command}", *on(nodes.address, 2))
    assert nodes_of(run) == [0, 1]
    runs.assert_same(command, run.name)


def test_nodes_of_ray_join_drain_and_die(nodes: RayNodes, tmp_path: Path, runs: Runs, start: Any) -> None:
    """It begins on two nodes, and trains on the first; the third joins, is drained, and is lost."""
    model = runs.folder / "tiny"
    config = write_sft(tmp_path / "ray", model, max_steps=100_000, train='"0-1"', interval=100_000)
    more = ["--cluster.max-nodes", "3", "--cluster.start-timeout-s", "250"]
    run = start(config, *on(nodes.address, 2), *more, command="sft")
    run.until(lambda: len(run.metrics()) >= 1, RUN_S)
    assert sorted(event["node"] for event in run.events("node_joined")) == [0, 1]
    added = nodes.add()
    run.until(lambda: len(run.events("node_joined")) == 3, RUN_S)
    run.until(lambda: len(run.events("slot_started")) == 3, RUN_S)
    nodes.drain(added, 300)
    run.until(lambda: bool(run.events("node_noticed")), RUN_S)
    [noticed] = run.events("node_noticed")
    assert (noticed["node"], noticed["slots"]) == (2, [2])
    assert 0 < noticed["within_s"] <= 300
    nodes.remove(added)
    run.until(lambda: bool(run.events("node_lost")), RUN_S)
    [lost] = run.events("node_lost")
    assert (lost["node"], lost["preempted"]) == (2, True)
    assert lost["sentence"].endswith(", which Ray has taken away.")
    step = len(run.metrics())
    run.until(lambda: len(run.metrics()) > step, RUN_S)


def test_the_autoscaler_brings_the_nodes_that_a_run_asks_for(tmp_path: Path, runs: Runs, start: Any) -> None:
    """Only the head is there when the run begins, and has no room for an agent. At its end nothing is asked for."""
    config = write_sft(tmp_path / "scaled", runs.folder / "tiny", max_steps=100_000, train='"0-1"', interval=100_000)
    with RayAutoscaler(tmp_path, max_workers=2) as cluster:
        asked = on(cluster.address, 2, resources={WORKER: 1})
        run = start(config, *asked, "--cluster.start-timeout-s", "250", command="sft", **RAY)
        run.until(lambda: len(run.metrics()) >= 1, RUN_S)
        assert sorted(event["node"] for event in run.events("node_joined")) == [0, 1]
        request, *_ = run.events("nodes_requested")
        each = "2 nodes with 1 CPU and 1 worker_node each"
        assert request["sentence"] == f"The run asks Ray's autoscaler for {each}: the run begins with 2 nodes."
        assert cluster.requested() == [{"CPU": 1.0, WORKER: 1.0}] * 2
        run.press_twice()
        run.ends(within_s=RUN_S)
        assert cluster.requested() == []
