"""`ductile rl` from the outside: what a run leaves in its folder."""

import json
from pathlib import Path

import pytest
import torch

from ductile.model.checkpoint import load_model
from ductile.observe import read_jsonl
from tests.end_to_end.runs import checkpointed_steps, summary, write_config


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
def test_a_run_from_start_to_end(tmp_path: Path, model: Path, start):
    config = write_config(tmp_path, model)
    run = start(config)
    assert run.ends(within_s=200) == 0, run.said()
    folder = tmp_path / "run"

    metrics = run.metrics()
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[0]["eval_reward"] is not None
    assert all(row["reward_mean"] >= 0 and row["grad_norm"] > 0 and row["sampled_tokens"] > 0 for row in metrics[1:])
    assert all(row["off_policy_max"] <= 1 for row in metrics[1:])

    kinds = {row["kind"] for row in read_jsonl(folder / "events.jsonl")}
    assert {"slot_started", "evaluated", "saved", "exported"} <= kinds
    assert checkpointed_steps(folder) == [2, 3]
    assert {path.name for path in (folder / "logs").iterdir()} >= {f"slot_{n}.log" for n in range(4)}

    written = summary(folder)
    assert written["steps"] == 3
    assert written["slots"] == {"train": [0], "generate": [1, 2], "score": [3]}
    assert {"eval_reward_first", "eval_reward_last", "wall_s", "tokens_per_s_generate", "tokens_per_s_train"} <= set(
        written
    )
    before, after = load_model(model), load_model(folder / "model")
    assert not torch.equal(before.state_dict()["norm.weight"], after.state_dict()["norm.weight"])

    again = start(config)
    assert again.ends() == 2
    assert "holds a run already: --resume goes on with it, --clean replaces it, another --output-dir" in again.said()
    assert f"(there is {folder / 'metrics.jsonl'})" in again.said()


@pytest.mark.slow
def test_a_resolved_config_runs_again_on_other_slots(tmp_path: Path, model: Path, start):
    first = start(write_config(tmp_path, model, max_steps=1))
    assert first.ends(within_s=200) == 0, first.said()
    config = (tmp_path / "run" / "config.toml").rename(tmp_path / "again.toml")
    placements = (
        {"train": [0, 1, 2], "generate": [1], "score": [1, 2]},
        {"train": [0], "generate": [0], "score": [0]},
    )
    for max_steps, slots in enumerate(placements, 2):
        actor, rollout, inference = (",".join(map(str, each)) for each in slots.values())
        placement = json.dumps({"actor": actor, "rollout": rollout, "inference": inference})
        flags = ("--resume", "--max-steps", str(max_steps), "--cluster.component-placement", placement)
        again = start(config, *flags)
        assert again.ends(within_s=200) == 0, again.said()
        assert [row["step"] for row in again.metrics()] == list(range(max_steps + 1))
        assert summary(tmp_path / "run")["slots"] == slots
