"""What `make gpu` does where there is no GPU: it says what it would do, or does it on the CPU with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu import Part, run_part

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results" / "gpu.json"
PARTS = ("train_0.6b", "train_4b", "generate", "reshard", "resize", "roles", "publish", "tests")


def gpu(*words: object) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)


def on_cpu(tmp_path: Path, *parts: str) -> dict[str, dict[str, Any]]:
    file = tmp_path / "gpu.json"
    done = gpu("--device", "cpu", "--small", "--json", file, "--parts", *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["commit"]
    return found["parts"]


def test_without_a_gpu_each_part_says_what_it_would_do() -> None:
    before = RESULTS.read_bytes() if RESULTS.exists() else None
    done = gpu()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("A dry run: torch ")
    for part in PARTS:
        assert f"  {part} " in done.stdout
    assert (RESULTS.read_bytes() if RESULTS.exists() else None) == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_and_generating_on_the_cpu(tmp_path: Path) -> None:
    parts = on_cpu(tmp_path, "train_0.6b", "generate", "tests")
    assert {name: part["outcome"] for name, part in parts.items()} == {
        "train_0.6b": "done",
        "generate": "done",
        "tests": "skipped",
    }
    train, generate = parts["train_0.6b"]["figures"], parts["generate"]["figures"]
    assert train["peak_source"] == "measured"
    assert train["too_many_tokens_for_the_memory"] == []
    for row in train["rows"].values():
        assert row["mfu"] == pytest.approx(row["flops"] / (row["step_s"] * train["peak_flops_per_s"]))
        assert row["tokens_trained"] > 0
    # Two prompts of 8 with eight answers of 7 each, whose last tokens nobody reads.
    assert train["rows"]["answers"]["tokens_run"] == 2 * 8 + 16 * 6
    assert train["rows"]["documents"]["tokens_run"] == 8 * 15
    assert generate["tokens_per_s_ductile"] > 0
    assert generate["ratio_vs_transformers"] > 0
    assert "CUDA" in parts["tests"]["reason"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_slots_on_the_cpu(tmp_path: Path) -> None:
    parts = on_cpu(tmp_path, "reshard", "resize", "roles", "publish")
    assert {part["outcome"] for part in parts.values()} == {"done"}, parts
    for pair in parts["reshard"]["figures"]["pairs"].values():
        assert pair["moved_bytes"] > 0
        assert pair["carrier"]
    resizes = parts["resize"]["figures"]["resizes"]
    assert [row["in_a_batch"] for row in resizes] == [False] * 3 + [True] * 4
    assert all(row["pause_s"] > 0 and row["moved_bytes"] > 0 for row in resizes)
    assert len(parts["roles"]["figures"]["changes"]) == 4
    assert parts["publish"]["figures"]["num_bytes"] > 0


def test_a_part_that_fails_or_hangs_touches_no_other() -> None:
    late = run_part(Part("train:0.6B", "trains", 0.2), "cpu", small=False)
    assert (late.outcome, late.reason) == ("failed", "it was not done after 0.2 s")
    wrong = run_part(Part("no_such_part", "fails", 60.0), "cpu", small=True)
    assert (wrong.outcome, wrong.reason) == ("failed", "ModuleNotFoundError: No module named 'gpu_parts.no_such_part'")
    assert "Traceback" in wrong.log_tail
