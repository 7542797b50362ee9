"""A run over three machines, as far as network namespaces are machines (`tests.cluster.namespaces`)."""

import os
from pathlib import Path

import pytest

from ductile.observe import read_jsonl
from tests.cluster.namespaces import nodes
from tests.end_to_end.runs import write_config

ENDS_S = 240.0


@pytest.mark.slow
@pytest.mark.nightly
def test_rl_over_three_machines(tmp_path: Path, model: Path):
    """The orchestrator and a train slot on node 0, another train slot and a generator on node 1, a generator and the
    scorer on node 2."""
    config = write_config(tmp_path / "rl", model, max_steps=4, train='"0,2"', generate="1,3,4", score=5)
    folder = tmp_path / "rl" / "run"
    with nodes(3) as network:
        words = ["ductile", "rl", "@", str(config), "--cluster.num-nodes", "3"]
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        output = (tmp_path / "output").open("w+")
        run = network.begin(0, *words, stdout=output, stderr=output, env=environment)
        joined = [network.begin(node, "ductile", "join", str(folder), stdout=output, stderr=output) for node in (1, 2)]
        try:
            code = run.wait(ENDS_S)
            codes = [agent.wait(30) for agent in joined]
        finally:
            for process in (run, *joined):
                process.kill()
                process.wait(10)
            output.close()
    said = (tmp_path / "output").read_text()
    assert (code, codes) == (0, [0, 0]), said
    events = read_jsonl(folder / "events.jsonl")
    joins = {row["node"]: row["address"] for row in events if row["kind"] == "node_joined"}
    assert joins == {node: network.address(node) for node in (1, 2)}
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert not [row for row in events if row["kind"] in ("slot_lost", "node_lost")]
