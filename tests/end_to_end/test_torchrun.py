"""`ductile sft` as torchrun starts it, a process for each rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ductile.observe import read_jsonl
from tests.end_to_end.runs import write_sft

NUM_STEPS = 3
LIMIT_S = 300.0


def torchrun(*words: object, num_ranks: int = 2) -> "subprocess.CompletedProcess[str]":
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", num_ranks, "--local-ranks-filter", 0]
    launcher += [
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        0,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    line = [sys.executable, *map(str, [*launcher, "-m", "ductile", *words])]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sft_under_torchrun_learns_what_it_learns_on_two_slots(tmp_path: Path, model: Path, start) -> None:
    """Rank 0's console has the run; the other rank's words are in its files alone."""
    changes = {"max_steps": NUM_STEPS, "train": '"0-1"', "interval": NUM_STEPS}
    config = write_sft(tmp_path / "torchrun", model, **changes)
    done = torchrun("sft", "@", config)
    folder = config.parent / "run"
    assert done.returncode == 0, done.stdout + done.stderr
    plain = start(write_sft(tmp_path / "plain", model, **changes), command="sft")
    assert plain.ends(within_s=300) == 0, plain.said()
    rows, expected = read_jsonl(folder / "metrics.jsonl"), plain.metrics()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    assert f"step {NUM_STEPS}" in done.stdout
    assert "This machine is node 1" not in done.stdout + done.stderr
    first, second = (next(folder.glob(f"logs/trainer/torchrun/*/attempt_0/{rank}")) for rank in (0, 1))
    assert f"step {NUM_STEPS}" in (first / "stdout.log").read_text()
    assert "This machine is node 1" in (second / "stderr.log").read_text()
    assert (second / "slot.log").resolve() == (folder / "logs/slot_1.log").resolve()
    assert not (folder / "cluster.key").exists()
