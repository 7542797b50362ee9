"""Runs by a real SLURM, as a user submits them: `make cluster-test`, some minutes on two cores.

`ductile sft`, and `ductile rl` on-policy with a static placement, take the same steps on this machine and as jobs of
two nodes: the same tokens, losses to 1e-5. A server that is a job completes as one here. A job whose time is nearly
over saves, is queued again, and ends as the others; so does one that starts a Ray cluster on its nodes.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.real.same_run import (
    MORE_STEPS,
    NUM_COMPLETIONS,
    ROOT,
    RUN_S,
    Completion,
    Runs,
    Started,
    completions,
    free_port,
    steps,
)
from tests.cluster.real.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.timeout(900)]

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
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory, runs: Runs) -> Iterator[SlurmCluster]:
    runs.write("slurm.toml", SLURM.format(path=os.pathsep.join([str(ROOT / "src"), str(ROOT)])))
    for command, text in NODES.items():
        runs.write(f"nodes.{command}.toml", text)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        print(f"\nSLURM, a controller and two nodes: {cluster.took}")
        yield cluster


def submit(slurm: SlurmCluster, runs: Runs, command: str, overlays: Sequence[str], name: str, *more: str) -> str:
    """Submit the command as a job with the folder `name`; return the job's number."""
    words = [word for overlay in (f"{command}.toml", *overlays, "slurm.toml") for word in ("@", overlay)]
    said = runs.say(command, *words, "--output-dir", name, *more, **slurm.variables)
    assert said.startswith("Submitted job "), said
    return said.split()[2].rstrip(".")


def logs_of(run: Path) -> str:
    """Return the end of every log of a job, for a failure to show."""
    return "\n".join(f"--- {file}\n{file.read_text()[-3000:]}" for file in sorted(run.glob("slurm/**/*.log")))


def assert_completes(slurm: SlurmCluster, job: str, run: Path) -> None:
    state = slurm.wait_until(job, ENDED)
    assert (state, slurm.exit_code(job)) == ("COMPLETED", "0:0"), logs_of(run)


def assert_goes_on_when_its_time_is_over(slurm: SlurmCluster, runs: Runs, job: str, name: str) -> None:
    """A job of `sft` for `MORE_STEPS` steps is interrupted, queued again, and ends as a run that was not."""
    run, until = runs.folder / name, time.monotonic() + RUN_S
    while len(steps(run)) < 2:
        assert time.monotonic() < until, logs_of(run)
        assert slurm.state(job) not in ENDED, logs_of(run)
        time.sleep(0.05)
    slurm.say("scancel", "--signal=USR1", "--batch", job)  # what SLURM does shortly before the time limit
    slurm.wait_until(job, ("PENDING", "COMPLETED", "FAILED"))
    assert 0 < len(steps(run)) < MORE_STEPS, logs_of(run)
    assert "the job is queued again" in next(run.glob("slurm/job_*.log")).read_text(), logs_of(run)
    slurm.wait_until_idle()
    slurm.say("scontrol", "update", f"jobid={job}", "starttime=now")  # SLURM itself waits for some minutes
    assert_completes(slurm, job, run)
    assert (run / "slurm/latest").resolve().name == "attempt_1"
    runs.assert_same("sft", name, MORE_STEPS)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_job_of_two_nodes_is_the_same_run(slurm: SlurmCluster, runs: Runs, command: str) -> None:
    """Its folder's name has characters that sbatch and the shell have to be told of."""
    runs.reference(command)
    name, began_s = f"{command}, job #1 (a & b; 100%j)", time.time()
    job = submit(slurm, runs, command, [f"nodes.{command}.toml"], name)
    assert_completes(slurm, job, runs.folder / name)
    assert (runs.folder / name / f"slurm/job_{job}.log").exists()
    runs.time(command, "a job of SLURM, 2 nodes of 1 slot", name, began_s)
    runs.assert_same(command, name)


def test_a_server_that_is_a_job_completes_as_one_here(slurm: SlurmCluster, runs: Runs) -> None:
    job, began_s, port = "", time.time(), free_port()
    try:
        job = submit(slurm, runs, "inference", [], "server", "--server.port", str(port))
        slurm.wait_until(job, ("RUNNING", *ENDED))
        urls, until = runs.folder / "server/slurm/urls", time.monotonic() + RUN_S
        while not urls.exists() or not urls.read_text():
            assert time.monotonic() < until, logs_of(runs.folder / "server")
            assert slurm.state(job) == "RUNNING", logs_of(runs.folder / "server")
            time.sleep(0.1)
        [url] = urls.read_text().splitlines()
        node = url.removeprefix("http://").partition(":")[0]
        key = (runs.folder / "server/slurm/server_key").read_text().strip()
        there, first_s = completions(url.replace(node, slurm.address(node)), key)
        runs.started.append(Started("inference", "a job of SLURM, 1 node", None, first_s - began_s))
    finally:
        if job:
            slurm.say("scancel", job)
    slurm.wait_until(job, ("CANCELLED", "COMPLETED", "FAILED"))
    here = completions_here(runs)
    assert len(here) == NUM_COMPLETIONS
    assert [(each.text, each.token_ids) for each in there] == [(each.text, each.token_ids) for each in here]
    for each, expected in zip(there, here, strict=True):
        assert len(each.token_ids) == 24
        assert each.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def completions_here(runs: Runs) -> list[Completion]:
    """Return the completions of a server on this machine."""
    began_s, port = time.time(), free_port()
    words = ["-m", "ductile", "inference", "@", "inference.toml", "--server.port", str(port), "--output-dir", "here"]
    process = subprocess.Popen(
        [sys.executable, *words], cwd=runs.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        found, first_s = completions(f"http://127.0.0.1:{port}/v1")
        runs.started.append(Started("inference", "this machine", None, first_s - began_s))
        return found
    finally:
        process.terminate()
        process.wait(60)


def test_a_job_whose_time_is_over_is_queued_again_and_goes_on(slurm: SlurmCluster, runs: Runs) -> None:
    job = submit(slurm, runs, "sft", ["nodes.sft.toml"], "again", "--max-steps", str(MORE_STEPS))
    assert_goes_on_when_its_time_is_over(slurm, runs, job, "again")


@pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "ductile[ray]"')
def test_a_job_starts_a_ray_cluster_runs_on_it_and_ends_it(slurm: SlurmCluster, runs: Runs) -> None:
    """On one node, as `ray symmetric-run` takes every node of this machine for the head."""
    began_s = time.time()
    job = submit(slurm, runs, "sft", ["here.sft.toml"], "by-ray", "--ray", "{}", "--max-steps", str(MORE_STEPS))
    assert_goes_on_when_its_time_is_over(slurm, runs, job, "by-ray")
    runs.time("sft", "a job of SLURM that starts Ray, 1 node of 2 slots", "by-ray", began_s)
    assert "ray symmetric-run" in (runs.folder / "by-ray/sft.sbatch").read_text()


def test_the_run_of_a_job_is_asked_from_the_login_node(slurm: SlurmCluster, runs: Runs) -> None:
    job = submit(slurm, runs, "sft", ["nodes.sft.toml"], "asked", "--max-steps", "100000")
    run, until = runs.folder / "asked", time.monotonic() + RUN_S
    while not steps(run):
        assert time.monotonic() < until, logs_of(run)
        time.sleep(0.05)
    assert "train" in runs.say("status", "asked", **slurm.variables)
    program = "import sys\nfrom pathlib import Path\nfrom ductile.cluster.slurm.login import run_in_job\n"
    program += 'sys.exit(run_in_job(Path("asked"), ["status", "asked"]))'  # as where the login node is another machine
    there = subprocess.run(
        [sys.executable, "-c", program],
        cwd=runs.folder,
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert there.returncode == 0, there.stderr
    assert "train" in there.stdout
    slurm.say("scancel", job)
    slurm.wait_until(job, ("CANCELLED",))


def test_sbatch_accepts_the_scripts_of_the_page(slurm: SlurmCluster) -> None:
    words = ["-m", "pytest", "-k", "sbatch_accepts", "tests/cluster/test_launch_page.py"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=slurm.environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout
    assert "7 passed" in done.stdout
    assert "skipped" not in done.stdout
