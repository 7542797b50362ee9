"""Runs by a real SLURM, as a user submits them: `make cluster-test`, some minutes on two cores.

`ductile sft`, and `ductile rl` on-policy with a static placement, take the same steps on this machine and as jobs of
two nodes: the same tokens, losses to 1e-5. A job whose time is nearly over saves, is queued again, and ends as the
others.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ductile.observe import read_jsonl
from tests.cluster.slurm_cluster import SlurmCluster
from tests.tiny import make_model_folder

STEPS = 10
RUN_S = 300.0
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.timeout(900)]

RL = """
model.name = "{model}"
seq_len = 64
max_steps = {steps}
cluster.device = "cpu"
trainer.optim.lr = 1e-3
trainer.model.compute_dtype = "float32"
ckpt.interval = 5

[orchestrator]
batch_size = 32
rollouts_per_example = 8
max_async_level = 0
max_off_policy_steps = 0
num_samples_kept = 32
task = {{ type = "import", import_path = "tests.end_to_end.letters.Letters" }}
sampling.max_tokens = 8
eval.enabled = false
"""
SFT = """
model.name = "{model}"
data = {{ path = "{data}", batch_size = 48, seq_len = 64 }}
max_steps = {steps}
cluster.device = "cpu"
optim.lr = 1e-3
ckpt.interval = 5
"""
SLURM = """
[slurm]
partition = "main"
pre_run_command = "export PYTHONPATH='{path}'"
cleanup_grace_period = 60
"""
NODES = {
    "rl": '[deployment]\ntype = "multi_node"\nnum_train_nodes = 1\nnum_infer_nodes = 1\ngpus_per_node = 1\n',
    "sft": '[deployment]\ntype = "multi_node"\nnum_nodes = 2\ngpus_per_node = 1\n',
}
HERE = {
    "rl": "[deployment]\nnum_train_gpus = 1\nnum_infer_gpus = 1\n",
    "sft": "[deployment]\nnum_gpus = 2\n",
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def base(tmp_path: Path, model: Path) -> Path:
    """A folder with a config for each command, and overlays: `here.rl.toml`, `nodes.rl.toml`, `slurm.toml`."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1) * (1 + n % 6)} for n in range(96)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {
        "rl.toml": RL.format(model=model, steps=STEPS),
        "sft.toml": SFT.format(model=model, data=data, steps=STEPS),
    }
    texts["slurm.toml"] = SLURM.format(path=os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    texts |= {f"nodes.{command}.toml": text for command, text in NODES.items()}
    texts |= {f"here.{command}.toml": text for command, text in HERE.items()}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def ductile(slurm: SlurmCluster, folder: Path, *words: str) -> str:
    """Run a command to its end; returns what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "ductile", *words],
        cwd=folder,
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(slurm: SlurmCluster, folder: Path, command: str, name: str, *more: str) -> str:
    """Submit the command as a job of two nodes; returns the job's number."""
    overlays = [f"{command}.toml", f"nodes.{command}.toml", "slurm.toml"]
    words = [word for overlay in overlays for word in ("@", overlay)]
    said = ductile(slurm, folder, command, *words, "--output-dir", name, *more)
    assert said.startswith("Submitted job "), said
    return said.split()[2].rstrip(".")


def logs_of(run: Path) -> str:
    """Return the end of every log of a job, for a failure to show."""
    return "\n".join(f"--- {file}\n{file.read_text()[-3000:]}" for file in sorted(run.glob("slurm/**/*.log")))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(run / "metrics.jsonl") if row["step"] > 0]


def tokens(run: Path) -> list[int]:
    return [row["tokens"] for row in read_jsonl(run / "metrics.jsonl") if row["step"] > 0]


def texts(run: Path) -> list[tuple[int, str, str]]:
    """Return step, prompt and completion of every rollout, in an order of their own."""
    return sorted((row["step"], row["prompt"], row["completion"]) for row in read_jsonl(run / "samples.jsonl"))


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_job_of_two_nodes_is_the_same_run(slurm: SlurmCluster, base: Path, command: str) -> None:
    ductile(slurm, base, command, "@", f"{command}.toml", "@", f"here.{command}.toml", "--output-dir", "here")
    began = time.monotonic()
    job = submit(slurm, base, command, "job")
    metrics = base / "job/metrics.jsonl"
    while not metrics.exists() and slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"):
        assert time.monotonic() < began + RUN_S, logs_of(base / "job")
        time.sleep(0.1)
    print(f"{command}: {time.monotonic() - began:.1f} s from the command to the first metrics of a job of two nodes")
    state = slurm.wait_until(job, ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"))
    assert (state, slurm.exit_code(job)) == ("COMPLETED", "0:0"), logs_of(base / "job")
    assert len(losses(base / "job")) == STEPS
    assert tokens(base / "job") == tokens(base / "here")
    assert losses(base / "job") == pytest.approx(losses(base / "here"), abs=1e-5)
    if command == "rl":
        assert len(texts(base / "job")) >= STEPS
        assert texts(base / "job") == texts(base / "here")


def test_a_job_whose_time_is_over_is_queued_again_and_goes_on(slurm: SlurmCluster, base: Path) -> None:
    ductile(slurm, base, "sft", "@", "sft.toml", "@", "here.sft.toml", "--output-dir", "here", "--max-steps", "60")
    job = submit(slurm, base, "sft", "job", "--max-steps", "60")
    run, until = base / "job", time.monotonic() + RUN_S
    while len(losses(run)) < 2 if (run / "metrics.jsonl").exists() else True:
        assert time.monotonic() < until, logs_of(run)
        time.sleep(0.05)
    slurm.say("scancel", "--signal=USR1", "--batch", job)  # what SLURM does shortly before the time limit
    slurm.wait_until(job, ("PENDING",))
    done = len(losses(run))
    assert 0 < done < 60
    assert "the job is queued again" in next(run.glob("slurm/job_*.log")).read_text()
    slurm.say("scontrol", "update", f"jobid={job}", "starttime=now")  # SLURM itself waits for some minutes
    assert slurm.wait_until(job, ("COMPLETED", "FAILED")) == "COMPLETED", logs_of(run)
    assert (run / "slurm/latest").resolve().name == "attempt_1"
    assert losses(run) == pytest.approx(losses(base / "here"), abs=1e-5)


def test_the_run_of_a_job_is_asked_from_the_login_node(slurm: SlurmCluster, base: Path) -> None:
    job = submit(slurm, base, "sft", "job", "--max-steps", "100000")
    run, until = base / "job", time.monotonic() + RUN_S
    while not (run / "metrics.jsonl").exists() or not losses(run):
        assert time.monotonic() < until, logs_of(run)
        time.sleep(0.05)
    assert "train" in ductile(slurm, base, "status", "job")
    program = "import sys\nfrom pathlib import Path\nfrom ductile.cluster.slurm.login import run_in_job\n"
    program += 'sys.exit(run_in_job(Path("job"), ["status", "job"]))'  # as where the login node is another machine
    words = [sys.executable, "-c", program]
    there = subprocess.run(words, cwd=base, env=slurm.environment, capture_output=True, text=True, timeout=RUN_S)
    assert there.returncode == 0, there.stderr
    assert "train" in there.stdout
    slurm.say("scancel", job)
    slurm.wait_until(job, ("CANCELLED",))


def test_sbatch_accepts_the_scripts_of_the_page(slurm: SlurmCluster) -> None:
    words = ["-m", "pytest", "-q", "-k", "sbatch_accepts", "tests/cluster/test_launch_page.py"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=slurm.environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
    assert "skipped" not in done.stdout
