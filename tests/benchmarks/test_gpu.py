"""What `make gpu` does where there is no GPU: it says what it would do, or does it on the CPU with tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import gpu as gpu_script
from ductile.core.layout.peak import Peak
from ductile.core.layout.spec import ModelSpec
from gpu import DRIVER, PARTS, RESULTS, Part, Result, results_file, run_part, unusable
from gpu_parts import tests as tests_part
from gpu_parts import train as train_part
from gpu_parts.part import Setting, Skipped

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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


@pytest.mark.skipif(DRIVER.exists(), reason="there is a GPU: that torch does not see it is no dry run")
def test_without_a_gpu_each_part_says_what_it_would_do() -> None:
    before = RESULTS.read_bytes() if RESULTS.exists() else None
    done = gpu()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("A dry run: torch ")
    for part in PARTS:
        assert f"  {part} " in done.stdout
    assert (RESULTS.read_bytes() if RESULTS.exists() else None) == before


@pytest.mark.parametrize(
    ("outcome", "asked", "has_driver", "wrong"),
    [
        ("skipped", "auto", False, ""),
        ("skipped", "auto", True, "There is a GPU (/dev/nvidiactl), but torch is a CPU build. Another Python with "),
        ("failed", "auto", True, "There is a GPU (/dev/nvidiactl), but torch is a CPU build. Another Python with "),
        ("failed", "auto", False, "Whether there is a GPU is not known: torch is a CPU build. "),
        ("skipped", "cuda", False, "--device cuda: torch is a CPU build."),
    ],
)
def test_only_where_there_is_no_gpu_nothing_is_wrong_without_one(
    outcome: Literal["skipped", "failed"], asked: str, has_driver: bool, wrong: str
) -> None:
    said = unusable(Result("says what the GPU is", outcome, "torch is a CPU build"), asked, has_driver)
    assert said.startswith(wrong)
    assert bool(said) == bool(wrong)


def test_a_gpu_that_torch_cannot_use_is_no_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_script, "DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match=f"There is a GPU .{tmp_path}.,? but torch .* CUDA"):
        gpu_script.find_device("auto")


def test_some_parts_do_not_replace_the_figures_of_all() -> None:
    device = {"type": "cuda"}
    assert results_file(device, list(PARTS), small=False) == RESULTS
    assert results_file(device, ["train_4b"], small=False) is None
    assert results_file(device, list(PARTS), small=True) is None
    assert results_file({"type": "cpu"}, list(PARTS), small=False) is None
    assert results_file({}, list(PARTS), small=False) is None


def test_a_part_whose_turn_never_came_has_failed() -> None:
    done = gpu("--device", "cpu", "--small", "--parts", "tests", "--budget-s", 1)
    assert done.returncode == 1
    assert "tests        failed       0 s  the 1 s of all parts were over (--budget-s)" in done.stdout


def test_without_pytest_the_tests_are_skipped_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests_part, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match="the tests need pytest and hypothesis, not installed for "):
        tests_part.run(Setting("cuda", small=False))


def test_a_try_that_the_memory_did_not_hold_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is forgotten once the memory of the try is free, and before the next one."""
    did: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("free"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: did.append("forget"))

    def measure(num_tokens: int) -> train_part.TrainFigures:
        did.append(str(num_tokens))
        if num_tokens > fitting:
            raise torch.OutOfMemoryError
        return train_part.TrainFigures(num_tokens, {}, spec, Peak(1e12, "known"), "")

    spec, fitting = ModelSpec("qwen3", 11, 32, 48, 2, 4, 2, 8), 5_000
    found, too_many = train_part.that_fits(measure, 16_384)
    assert (found.num_tokens, too_many) == (4096, [16_384, 8192])
    assert did == ["16384", "free", "forget", "8192", "free", "forget", "4096"]
    fitting = 10
    with pytest.raises(torch.OutOfMemoryError):
        train_part.that_fits(measure, 16_384)


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
    assert train["attention"] == "tiles, on a CPU"
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
