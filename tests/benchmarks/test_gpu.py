"""What `make gpu` does where there is no GPU: it says what it would do, or does it on the CPU with tiny models."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import gpu as gpu_script
from ductile.core.layout.model.peak import Peak
from ductile.core.layout.model.spec import ModelSpec
from gpu import BUDGET_S, DRIVER, KILL_S, PARTS, Part, Result, ends_in_time, file_of, run_part, unusable
from gpu_parts import generate as generate_part
from gpu_parts import tests as tests_part
from gpu_parts import train as train_part
from gpu_parts.part import Failed, Setting, Skipped
from provenance import RESULTS
from tests.tiny import make_model_folder

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
    before = {file: file.read_bytes() for file in (RESULTS / "gpu").iterdir()}
    done = gpu()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("A dry run: torch ")
    lines = done.stdout.splitlines()[1:]
    for (name, part), said in zip(PARTS.items(), lines, strict=False):
        assert said == f"  {name:12} {part.does}", "what it would do, and no package is missing for it here"
    assert {file: file.read_bytes() for file in (RESULTS / "gpu").iterdir()} == before


def test_the_dry_run_says_what_would_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_script, "find_spec", lambda name: None if name == "hypothesis" else object())
    said = gpu_script.line("tests", Result("runs the tests marked gpu", "skipped", "no GPU"), dry=True)
    assert said.startswith("  tests        runs the tests marked gpu; skipped, as hypothesis are missing for ")
    said = gpu_script.line("publish", Result("publishes", "skipped", "no GPU"), dry=True)
    assert said == "  publish      publishes"


def test_all_parts_have_their_time_in_less_than_nine_minutes() -> None:
    assert sum(part.deadline_s for part in PARTS.values()) == BUDGET_S
    assert BUDGET_S + KILL_S < 9 * 60


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
    device = {"type": "cuda", "name": "NVIDIA H200", "count": 1}
    assert file_of(device, list(PARTS), small=False) == RESULTS / "gpu" / "nvidia-h200-1.json"
    assert file_of(device, ["train_4b"], small=False) is None
    assert file_of(device, list(PARTS), small=True) is None
    assert file_of({"type": "cpu"}, list(PARTS), small=False) is None
    assert file_of({}, list(PARTS), small=False) is None


def test_a_part_whose_turn_never_came_has_failed() -> None:
    done = gpu("--device", "cpu", "--small", "--parts", "tests", "--budget-s", 1)
    assert done.returncode == 1
    assert "tests        failed       0 s  the 1 s of all parts were over (--budget-s)" in done.stdout


def test_an_end_before_the_last_part_costs_the_figures_of_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_part(part: Part, *setting: Any) -> Result:
        if part.runs == "roles":
            raise KeyboardInterrupt
        return Result(part.does, "done", figures={"sentence": "fine"})

    file = tmp_path / "results" / "gpu.json"
    words = ["gpu.py", "--device", "cpu", "--json", str(file), "--parts", "publish", "resize", "roles", "reshard"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(gpu_script, "run_part", a_part)
    with pytest.raises(KeyboardInterrupt):
        gpu_script.main()
    parts = json.loads(file.read_text())["parts"]
    assert {name: part["outcome"] for name, part in parts.items()} == {
        "publish": "done",
        "resize": "done",
        "roles": "failed",
        "reshard": "failed",
    }
    assert parts["reshard"]["reason"] == "its turn had not come"
    assert [path.name for path in file.parent.iterdir()] == ["gpu.json"]


def test_a_process_that_hangs_in_the_driver_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging:
        pid = 12345678

        def wait(self, timeout_s: float) -> int:
            raise subprocess.TimeoutExpired("python", timeout_s)

    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(pid))
    hanging: Any = Hanging()
    assert not ends_in_time(hanging, 1.0)
    assert killed == [12345678]


def test_without_pytest_the_tests_are_skipped_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests_part, "find_spec", lambda name: None)
    with pytest.raises(Skipped, match="the tests need pytest and hypothesis, not installed for "):
        tests_part.run(Setting("cuda", small=False))


GPU_TESTS = """
import os, signal
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_first(wrong):
    assert not wrong

@pytest.mark.gpu
def test_skipped():
    pytest.importorskip("no_such_package")

def test_of_a_cpu():
    raise AssertionError

@pytest.mark.gpu
def test_stuck():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.gpu
def test_last():
    pass
"""


@pytest.fixture
def gpu_tests(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "test_some.py").write_text(GPU_TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_package\n")
    return tmp_path


def test_what_has_run_is_known_however_the_tests_end(gpu_tests: Path) -> None:
    found = tests_part.outcomes(gpu_tests, ["test_broken.py", "test_some.py"], 100.0)
    assert found == {
        "test_broken.py": "failed",
        "test_some.py::test_first[False]": "passed",
        "test_some.py::test_first[True]": "failed",
        "test_some.py::test_skipped": "skipped",
        "test_some.py::test_stuck": "unfinished",
        "test_some.py::test_last": "unfinished",
    }
    with pytest.raises(Failed) as caught:
        tests_part.figures_of(found)
    assert caught.value.figures["outcomes"] == found
    assert str(caught.value) == (
        "1 of 6 passed; failed: test_broken.py, test_some.py::test_first[True]; "
        "unfinished: test_some.py::test_stuck, test_some.py::test_last; 1 skipped"
    )


@pytest.mark.nightly
def test_tests_whose_time_is_over_are_ended(gpu_tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu_tests / "test_some.py").write_text(GPU_TESTS.replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()"))
    found = tests_part.outcomes(gpu_tests, ["test_some.py"], 3.0)
    # A slow machine may not have collected them by then.
    assert {found.get(f"test_some.py::test_{name}", "unfinished") for name in ("stuck", "last")} == {"unfinished"}


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"a": "passed", "b": "skipped"}, "1 of 2 passed; 1 skipped"),
        ({"a": "passed", "b": "unfinished"}, None),
        ({"a": "skipped"}, None),
        ({}, None),
    ],
)
def test_the_tests_have_passed_when_some_have_and_none_has_not(
    found: dict[str, tests_part.Outcome], sentence: str | None
) -> None:
    if sentence is None:
        with pytest.raises(Failed):
            tests_part.figures_of(found)
    else:
        assert tests_part.figures_of(found)["sentence"] == sentence


def test_half_a_line_of_a_process_that_died_is_left_out() -> None:
    said = '{"collected": ["a", "b"]}\n{"id": "a", "outcome": "passed"}\n{"id": "b", "outco'
    assert tests_part.read(said) == {"a": "passed", "b": "unfinished"}


@pytest.mark.nightly
def test_without_transformers_the_tests_for_a_gpu_are_found(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text('raise ModuleNotFoundError("it is not there", name="transformers")\n')
    root = BENCHMARKS.parent
    files = [str(path) for path in sorted((root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root / "src")])}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/test_gpu.py::test_the_device_is_known_or_measured" in done.stdout


def test_without_transformers_a_test_that_needs_a_model_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(pytest.skip.Exception, match="transformers"):
        make_model_folder(tmp_path / "m")


LOAD = generate_part.Load(requests=2, shortest_prompt=1, longest_prompt=2, median=4, longest=4, batches=(2, 1))


@pytest.mark.parametrize("fails", ["at once", "in the second batch size"])
def test_whatever_the_peer_fails_with_costs_its_own_figures_alone(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_peer(model: object, prompts: object, lengths: object, batch: int, device: str) -> None:
        if fails == "at once" or batch == 1:
            raise KeyError("cache")

    monkeypatch.setattr(generate_part, "make_peer", lambda *arguments: None)
    monkeypatch.setattr(generate_part, "run_peer", run_peer)
    found = generate_part.peer_figures(LOAD, {}, [[1], [2]], [4, 4], "cpu", torch.float32)
    if fails == "at once":
        assert found == {"no_peer": "transformers failed: KeyError: 'cache'"}
    else:
        assert found["by_batch_size"].keys() == {"2"}
        assert found["tokens_per_s_transformers"] > 0
        assert found["peer_failed"] == "transformers failed: KeyError: 'cache'"


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


@pytest.mark.nightly
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
    assert train["attention"] == "torch's fused kernel, on a CPU"
    for row in train["rows"].values():
        assert row["mfu"] == pytest.approx(row["flops"] / (row["step_s"] * train["peak_flops_per_s"]))
        assert row["tokens_trained"] > 0
    # Two prompts of 8 with eight answers of 7 each, whose last tokens nobody reads.
    assert train["rows"]["answers"]["tokens_run"] == 2 * 8 + 16 * 6
    assert train["rows"]["documents"]["tokens_run"] == 8 * 15
    assert generate["tokens_per_s_ductile"] > 0
    assert generate["ratio_vs_transformers"] > 0
    assert "CUDA" in parts["tests"]["reason"]


@pytest.mark.nightly
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
