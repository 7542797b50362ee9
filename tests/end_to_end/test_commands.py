"""The other commands, from outside: each starts, works, and leaves what it should."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ductile.cluster.cpu_cap import CapNotPermitted, CpuCap
from ductile.observe import read_jsonl
from tests.end_to_end.runs import summary, write_config


def ductile(*words: object, timeout_s: float = 200.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ductile", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
def test_sft_lowers_the_loss_and_resumes(tmp_path: Path, model: Path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(8)))
    words = ["sft", "--model.name", model, "--data.path", data, "--data.batch-size", 8, "--data.seq-len", 64]
    words += ["--output-dir", tmp_path / "run", "--cluster.device", "cpu", "--deployment.num-gpus", 2]
    words += ["--optim.lr", "1e-2", "--ckpt.interval", 5, "--tensorboard"]
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|pad|>{% endfor %}")
    words += ["--model.chat-template", template]
    first = ductile(*words, "--max-steps", 5)
    assert first.returncode == 0, first.stderr
    config = tmp_path / "run" / "config.toml"
    trained_with = config.read_text()
    unfit = ductile(*words, "--max-steps", 10, "--resume", "--optim.type", "sgd")
    assert unfit.returncode == 2
    assert 'optim.type was "adamw" up to step 5 and is "sgd" now' in unfit.stderr
    assert config.read_text() == trained_with, "what is said to go on with is what the checkpoint was made with"
    second = ductile(*words, "--max-steps", 10, "--resume")
    assert second.returncode == 0, second.stderr
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert (tmp_path / "run" / "model" / "chat_template.jinja").read_text() == template.read_text()
    assert list((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.slow
def test_slots_that_share_a_gpu_train_together(tmp_path: Path, model: Path):
    words = ["trainer", "--model.name", model, "--model.seq-len", 64, "--data.fake", "--max-steps", 3]
    words += ["--output-dir", tmp_path / "run", "--cluster.device", "cuda", "--cluster.slots-per-device", 2]
    done = ductile(*words, "--deployment.num-gpus", 2)
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    said = (tmp_path / "run" / "logs" / "slot_0.log").read_text()
    assert "ranks 0 and 1 share a GPU" in said


@pytest.mark.slow
def test_orchestrator_asks_an_inference_server(tmp_path: Path, model: Path):
    words = ["--model.name", model, "--model.max-model-len", 128, "--server.port", 0, "--cluster.device", "cpu"]
    command = [sys.executable, "-m", "ductile", "inference", *map(str, words)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        words = ["--model.name", model, "--client.base-url", f"{url}/v1", "--output-dir", tmp_path / "run"]
        words += ["--task.type", "import", "--task.import-path", "tests.end_to_end.letters.Letters"]
        words += ["--batch-size", 8, "--rollouts-per-example", 4, "--max-steps", 2, "--sampling.max-tokens", 8]
        done = ductile("orchestrator", *words)
        assert done.returncode == 0, done.stderr
        completions = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
        assert len(completions) == 16
        assert all(len(row["token_ids"]) == len(row["logprobs"]) > 0 for row in completions)
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
        gone = ductile("orchestrator", *words, "--clean")
        assert gone.returncode == 1
        assert "cannot be reached" in gone.stderr
        assert (
            read_jsonl(tmp_path / "run" / "rollouts.jsonl") == completions
        )  # it never began, so it has deleted nothing
    finally:
        server.kill()
        server.wait(10)
        assert server.stdout is not None
        server.stdout.close()


@pytest.mark.slow
def test_inference_benches_a_server_of_its_own(tmp_path: Path, model: Path):
    """Whatever listens on the server's usual port."""
    figures = tmp_path / "figures.json"
    words = ["--model.name", model, "--cluster.device", "cpu", "--bench.num-requests", 6, "--bench.prompt-tokens", 20]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words += ["--server.port", taken.getsockname()[1], "--bench.max-tokens", 8, "--bench.steps", 3]
        done = ductile("inference", *words, "--bench.output-json", figures)
    assert done.returncode == 0, done.stderr
    assert "server.port has no effect here: --bench asks a server of its own" in done.stderr
    assert "Round 3 of 3: " in done.stdout
    assert "Latency" in done.stdout
    found = json.loads(figures.read_text())
    assert found["steps"] == 2
    assert found["load"] == {"num_requests": 6, "prompt_tokens": 20, "max_tokens": 8}
    assert found["throughput"]["mean"] > 0
    assert 0 < found["time_to_first_token"]["min"] <= found["latency"]["max"]
    assert found["peak_memory"]["gib"] > 0.01


@pytest.mark.slow
def test_the_server_of_a_benchmark_ends_with_it(model: Path):
    words = ["inference", "--model.name", model, "--cluster.device", "cpu", "--bench.steps", 1000]
    bench = subprocess.Popen([sys.executable, "-m", "ductile", *map(str, words)], stdout=subprocess.PIPE, text=True)
    try:
        assert bench.stdout is not None
        assert bench.stdout.readline().startswith("Round 1 of 1000: ")
        (server,) = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        assert b"ductile.generator.server.serve" in Path(f"/proc/{server}/cmdline").read_bytes()
        bench.kill()
        bench.wait(10)
        deadline = time.monotonic() + 100
        while _lives(int(server)):
            assert time.monotonic() < deadline, "the server has outlived who started it"
            time.sleep(0.05)
    finally:
        bench.kill()
        bench.wait(10)
        assert bench.stdout is not None
        bench.stdout.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_capped_slots_train_too(tmp_path: Path, model: Path, start):
    try:
        groups = CpuCap(0.5)._parent
    except CapNotPermitted as reason:
        pytest.skip(str(reason))
    run = start(write_config(tmp_path, model, max_steps=2), "--cluster.cpu-slot-fraction", "0.5")
    mine = f"ductile-{run.process.pid}-*"
    run.until(lambda: len(list(groups.glob(mine))) == 4)
    assert run.ends(within_s=200) == 0, run.said()
    assert summary(tmp_path / "run")["steps"] == 2
    assert not list(groups.glob(mine))
