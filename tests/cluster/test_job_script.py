"""The script of a job, run by bash: its attempts, signals and ends. `srun` and `scontrol` are stand-ins that do on this
machine what SLURM does on a cluster (`make cluster-test` has a real one), and so is the program that the script starts.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ductile.cli import main
from tests.config.stories import furnish
from tests.config.test_scaling_page import FILES

SRUN = """#!/bin/bash
# A task on each of the job's nodes, as `srun --ntasks-per-node=1` starts them.
output=
while [[ $1 == --* ]]; do case $1 in --output=*) output=${1#--output=};; esac; shift; done
trap 'kill $(jobs -p) 2>/dev/null' TERM
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    if [ -n "$output" ]; then SLURM_NODEID=$node "$@" > "${output//%n/$node}" 2>&1 &
    else SLURM_NODEID=$node "$@" & fi
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do
    wait "$task"
    own=$?
    [ $own -le $code ] || code=$own
done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
if [ "$1 $2" = "show hostnames" ]; then printf 'node1\\nnode2\\nnode3\\n'; fi
"""
RAY = """#!/bin/bash
# `ray symmetric-run`: it runs the command on the first node, and waits for its end on the others.
[ "$BEHAVIOUR" = no_ray ] && exit 0
if [ "$SLURM_NODEID" != 0 ]; then
    while [ ! -e "$CALLS.over" ]; do sleep 0.05; done
    exit 0
fi
echo "${*:1:6}" >> "$CALLS"
shift 6
"$@"
"""
PROGRAM = """#!/bin/bash
# Stands for `python -P -m ductile`: says how it was called, and behaves as $BEHAVIOUR says.
if [ "$2" = -c ]; then echo 10.0.0.1; exit; fi # asked for this machine's address
shift 3
echo "$*" >> "$CALLS"
if [ "$1" = join ]; then
    while [ ! -e "$CALLS.over" ]; do sleep 0.05; done
    exit 0
fi
trap 'echo saved; : > "$CALLS.over"; exit 130' USR1
case $BEHAVIOUR in
fails) echo "broken"; exit 2;;
esac
echo '{"address": "here"}' > out/cluster.json
: > "$CALLS.up"
while [ "$BEHAVIOUR" = works ] && [ "$(grep -c join "$CALLS")" -lt 3 ]; do sleep 0.05; done
echo '{}' > out/metrics.jsonl
if [ "$BEHAVIOUR" = stays ]; then while true; do sleep 0.05; done; fi
: > "$CALLS.over"
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    nodes = '[slurm]\n[deployment]\ntype = "multi_node"\n'
    three = f"{nodes}num_train_nodes = 2\nnum_infer_nodes = 1\n"
    files = {**FILES, "nodes.toml": three, "one.toml": "[slurm]\n", "ray.toml": f"{three}[ray]\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "program": PROGRAM, "ray": RAY}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)


def write(*words: str) -> None:
    assert main(["rl", "@", "base_rl.toml", *words, "--output-dir", "out", "--dry-run"]) == 0


@contextmanager
def job(behaviour: str = "works") -> Iterator[subprocess.Popen[str]]:
    """The job's script, as SLURM starts it on the first of three nodes."""
    here = Path.cwd()
    environment = {
        "PATH": f"{here / 'bin'}:{os.environ['PATH']}",
        "DUCTILE_PYTHON": str(here / "bin/program"),
        "CALLS": str(here / "calls"),
        "BEHAVIOUR": behaviour,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURMD_NODENAME": "node1",
    }
    process = subprocess.Popen(
        ["bash", "out/rl.sbatch"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(behaviour: str = "works") -> tuple[int, str]:
    with job(behaviour) as process:
        said, _ = process.communicate(timeout=60)
        return process.returncode, said


def calls() -> list[str]:
    return [line.replace(str(Path.cwd()), "<here>") for line in Path("calls").read_text().splitlines()]


def wait_for(name: str, process: subprocess.Popen[str]) -> None:
    while not Path(name).exists():
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


def test_the_orchestrator_runs_on_the_first_node_and_each_node_joins() -> None:
    write("@", "nodes.toml")
    code, said = run()
    assert code == 0, said
    assert calls()[0] == "rl @ <here>/out/configs/rl.toml"
    # The first node of the job has rank 1: the first of those that train.
    assert sorted(calls()[1:]) == [f"join <here>/out --node-rank {rank}" for rank in (0, 1, 2)]
    assert "attempt 0: every node sees" in said
    assert "attempt 0: rl ended with exit status 0" in said
    assert sorted(path.name for path in Path("out/slurm/latest").iterdir()) == [
        *("canary", "job", "node_0.log", "node_1.log", "node_2.log", "orchestrator.log"),
    ]


def test_an_earlier_attempt_s_address_is_not_dialled() -> None:
    write("@", "nodes.toml")
    Path("out/cluster.json").write_text('{"address": "of an attempt that was killed"}')
    code, said = run("fails")
    assert code == 2
    assert "broken" in said
    assert [call for call in calls() if "join" in call] == []


def test_attempts_are_numbered_and_go_on_from_the_last_checkpoint() -> None:
    write("@", "nodes.toml", "--clean")
    assert run("fails")[0] == 2
    code, said = run()
    assert (code, "attempt 1: " in said) == (0, True)
    Path("calls.over").unlink()
    os.utime("out/rl.sbatch", (0, 0))  # metrics of this launch's run are newer than its script
    assert run()[0] == 0
    config = "rl @ <here>/out/configs/rl.toml"
    assert [call for call in calls() if call.startswith("rl")] == [f"{config} --clean"] * 2 + [f"{config} --resume"]
    assert sorted(path.name for path in Path("out/slurm").iterdir()) == [
        "attempt_0",
        "attempt_1",
        "attempt_2",
        "latest",
    ]
    assert Path("out/slurm/latest").resolve().name == "attempt_2"


@pytest.mark.parametrize(("words", "flags"), [
    ((), ""),
    (("--resume",), " --resume"),
    (("--ckpt.resume-step", "4"), " --ckpt.resume-step 4"),
])  # fmt: skip
def test_what_is_asked_once_is_handed_on(words: Sequence[str], flags: str) -> None:
    write("@", "one.toml", *words)
    assert run("fails")[0] == 2
    assert calls() == [f"rl @ <here>/out/configs/rl.toml{flags}"]


@pytest.mark.parametrize("config", ["nodes.toml", "one.toml", "ray.toml"])
@pytest.mark.parametrize(
    ("signum", "words", "requeued"),
    [
        (signal.SIGUSR1, (), True),
        (signal.SIGUSR1, ("--no-slurm.requeue",), False),
        (signal.SIGTERM, (), False),
    ],
)
def test_a_notice_has_the_run_save_and_the_job_queued_again(
    config: str, signum: signal.Signals, words: Sequence[str], requeued: bool
) -> None:
    """A job that is cancelled, or preempted, is not: SLURM itself does that where it is due."""
    write("@", config, *words)
    with job("stays") as process:
        wait_for("calls.up", process)
        process.send_signal(signum)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "saved" in said
    assert ("scontrol requeue 7" in calls()) == requeued


def test_ray_starts_on_every_node_and_runs_the_orchestrator_on_the_first() -> None:
    write("@", "ray.toml")
    code, said = run("alone")
    assert code == 0, said
    assert calls() == ["symmetric-run --address 10.0.0.1:6386 --min-nodes 3 --", "rl @ <here>/out/configs/rl.toml"]
    assert 'address = "auto"' in Path("out/configs/rl.toml").read_text()
    token = Path("out/slurm/latest/ray_token")
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    assert token.read_text() not in said


def test_a_job_whose_ray_does_not_start_fails() -> None:
    write("@", "ray.toml")
    code, said = run("no_ray")
    assert code == 1
    assert "Ray did not start; the logs of the nodes are" in said
    assert not Path("calls").exists()


def test_a_node_that_does_not_see_the_folder_ends_the_job() -> None:
    write("@", "nodes.toml")
    script = Path("out/rl.sbatch").read_text()
    assert "tries < 600" in script
    # A node that sees another folder under the name, and has less patience.
    Path("out/rl.sbatch").write_text(script.replace("tries < 600", "tries < 1").replace('canary "$logs', 'canary "/no'))
    code, said = run()
    assert code == 1
    assert "output_dir must be in a folder that all nodes share" in said
    assert not Path("calls").exists()


def test_a_script_of_the_user_s_own_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/rl.sbatch").write_text("#!/bin/bash\necho mine\n")
    assert main(["rl", "@", "base_rl.toml", "@", "one.toml", "--output-dir", "out", "--dry-run"]) == 2
    assert "out/rl.sbatch would be replaced, and was not written by ductile" in capsys.readouterr().err
    assert Path("out/rl.sbatch").read_text() == "#!/bin/bash\necho mine\n"


def test_without_sbatch_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(["sft", "@", "sft.toml", "@", "one.toml", "--output-dir", "out"]) == 2
    assert "there is no sbatch here: submit from a login node" in capsys.readouterr().err


def test_a_run_on_another_machine_is_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"version": 1, "machine": "node1", "pid": 1, "started": "", "host": "127.0.0.1", "port": 1, "token": "t"}
    Path("out/slurm/latest").mkdir(parents=True)
    Path("out/control.json").write_text(json.dumps(known))
    Path("bin/srun").write_text('#!/bin/bash\necho "$*" > asked\nexit 7\n')
    monkeypatch.setenv("PATH", f"{Path.cwd() / 'bin'}:{os.environ['PATH']}")
    assert main(["status", "out"]) == 2  # it is in no job
    Path("out/slurm/latest/job").write_text("71 node1\n")
    assert main(["resize", "out", "--train", "0-1"]) == 7
    said = Path("asked").read_text()
    assert said.startswith("--jobid=71 --nodelist=node1 --overlap --nodes=1 --ntasks=1 ")
    assert said.endswith(" -m ductile resize out --train 0-1\n")


SBATCH = """#!/bin/bash
echo "$*" > called
if [ -e refuse ]; then echo "sbatch: error: invalid partition specified: cluster" >&2; exit 1; fi
echo "71;main"
"""


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bin/sbatch").write_text(SBATCH)
    Path("bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd() / 'bin'}:{os.environ['PATH']}")


@pytest.mark.usefixtures("sbatch")
def test_the_command_submits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "@", "sft.toml", "@", "one.toml", "--output-dir", "out"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Submitted job 71. ductile: 1 node of 1 GPU, partition cluster.\n")
    assert "out/slurm/job_71.log" in said
    assert Path("called").read_text() == "--parsable out/sft.sbatch\n"


@pytest.mark.usefixtures("sbatch")
def test_what_sbatch_refuses_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("refuse").touch()
    assert main(["sft", "@", "sft.toml", "@", "one.toml", "--output-dir", "out"]) == 2
    assert "sbatch refuses out/sft.sbatch: sbatch: error: invalid partition" in capsys.readouterr().err


def test_the_servers_key_is_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    servers = ["inference", "@", "infer.toml", "--slurm", "--output-dir", "out", "--dry-run"]
    assert main(servers) == 0
    key = Path("out/slurm/server_key")
    assert key.stat().st_mode & 0o777 == 0o600
    text = key.read_text()
    assert len(text) > 32
    assert text.strip() not in Path("out/inference.sbatch").read_text() + capsys.readouterr().out
    assert main(servers) == 0
    assert key.read_text() == text  # clients that have it go on
