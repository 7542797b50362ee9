"""The benchmarks of the scaling page, each on the quickstart's model; what each writes down."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL = f'[model]\nname = "{QUICKSTART}/model"\n'
CPU = '[cluster]\ndevice = "cpu"\n'
FILES = {
    "sft.toml": f'{MODEL}{CPU}[data]\npath = "few.jsonl"\nbatch_size = 4\nseq_len = 64\n',
    "train.toml": f"max_steps = 9\n{CPU}{MODEL}",
    "infer.toml": f"{MODEL}max_model_len = 128\n[server]\nport = 0\n{CPU}",
    "orch.toml": (
        f"batch_size = 4\nrollouts_per_example = 2\n{MODEL}"
        '[task]\ntype = "builtin"\nname = "addition"\n[sampling]\nmax_tokens = 4\n'
    ),
    "rl.toml": (
        f"seq_len = 64\n{MODEL}{CPU}[cluster.component_placement]\nactor = 0\nrollout = 1\n"
        "[orchestrator]\nbatch_size = 4\nrollouts_per_example = 2\nsampling.max_tokens = 4\n"
        'task = { type = "builtin", name = "addition" }\n'
    ),
}

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """`bench("sft", "@", "sft.toml")` runs the line in a folder with `FILES`, and returns what it has written down."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    for name, text in FILES.items():
        Path(name).write_text(text)
    with (QUICKSTART / "sft.jsonl").open() as rows:
        Path("few.jsonl").write_text("".join(islice(rows, 100)))

    def run(*words: str) -> dict[str, Any]:
        done = ductile(*words, "--bench", "--bench.output-json", "figures.json", "--bench.steps", "3")
        assert done.returncode == 0, done.stderr
        assert "Throughput" in done.stdout
        assert list(Path("tmp").glob("ductile-bench-*")) == [], "nothing is left of a benchmark that is done"
        figures = json.loads(Path("figures.json").read_text())
        assert (figures["steps"], figures["warm_up_steps"]) == (2, 1)
        assert figures["throughput"]["min"] > 0
        assert figures["config"]["bench"]["steps"] == 3
        assert figures["machine"]["cores"] >= 1
        return figures

    return run


def ductile(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ductile", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def assert_trained(figures: dict[str, Any], num_slots: int, num_training: int) -> None:
    """What a benchmark of slots that train on a CPU says."""
    (device,) = figures["devices"]
    assert (device["name"], device["slots"], device["source"]) == ("cpu", num_slots, "measured")
    assert 0 < figures["mfu"]["mean"] < 1
    assert 0.05 < figures["peak_memory"]["gib"] < 8
    assert figures["peak_memory"]["of"] == "resident memory of the slots' processes"
    assert {"forward_backward", "optim_step"} <= figures["phases"].keys()
    assert figures["communication"]["slots"] == num_training


@pytest.mark.slow
def test_sft_on_two_slots_spends_time_on_communication(bench: Bench) -> None:
    figures = bench("sft", "@", "sft.toml", "--deployment.num-gpus", "2")
    assert_trained(figures, num_slots=2, num_training=2)
    assert 0 < figures["communication"]["share"] < 1


@pytest.mark.nightly
def test_sft_on_made_up_data_of_different_lengths(bench: Bench) -> None:
    words = ("--data.type", "fake", "--data.length", "variable", "--data.batch-size", "4", "--data.seq-len", "64")
    figures = bench("sft", "--model.name", f"{QUICKSTART}/model", "--cluster.device", "cpu", *words)
    assert_trained(figures, num_slots=1, num_training=1)
    assert figures["config"]["data"]["length"] == "variable"
    assert figures["communication"]["share"] < 0.1, "groups of one slot"


@pytest.mark.slow
def test_the_trainer_alone_touches_no_run(bench: Bench) -> None:
    """Even where `clean` is set, and where it fails."""
    run = Path("run")
    for folder in (run / "state/step_2", run / "model"):
        folder.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 2}\n')
    before = sorted(run.rglob("*"))
    words = ("trainer", "@", "train.toml", "--data.fake", "--output-dir", "run", "--clean", "--model.seq-len", "64")
    assert_trained(bench(*words), num_slots=1, num_training=1)
    assert sorted(run.rglob("*")) == before
    failed = ductile(*words, "--bench", "--cluster.start-timeout-s", "0.01")
    assert failed.returncode == 2, failed.stderr
    assert sorted(run.rglob("*")) == before


@pytest.mark.nightly
def test_an_orchestrator_benches_a_server_that_is_there(bench: Bench) -> None:
    command = [sys.executable, "-m", "ductile", "inference", "@", "infer.toml"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        with server.stdout as said:
            url = said.readline().split()[-1]
        figures = bench("orchestrator", "@", "orch.toml", "--client.base-url", f"{url}/v1")
        for key in ("mfu_reason", "communication", "peak_memory"):
            said = figures[key] if isinstance(figures[key], str) else figures[key]["reason"]
            assert "the server's devices and their memory are its own" in said
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.wait(10)


@pytest.mark.slow
def test_rl_generates_and_trains(bench: Bench) -> None:
    figures = bench("rl", "@", "rl.toml")
    assert_trained(figures, num_slots=2, num_training=1)
    assert figures["phases"].keys() >= {"publish"}
