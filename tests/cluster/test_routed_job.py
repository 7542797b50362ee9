"""The script of a job whose servers are behind one router, run by bash. `srun` and `scontrol` are stand-ins, and the
program that the script starts is one, or, in the nightly test, `ductile` itself.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from ductile.cli import main
from tests.cluster.test_job_script import SCONTROL
from tests.config.stories import furnish
from tests.config.test_scaling_page import FILES

SRUN = """#!/bin/bash
# A task on each of the nodes that are asked for.
output= first=0
while [[ $1 == --* ]]; do
    case $1 in
    --output=*) output=${1#--output=};;
    --ntasks=*) count=${1#--ntasks=};;
    --relative=*) first=${1#--relative=};;
    esac
    shift
done
trap 'for task in "${tasks[@]}"; do kill -- "-$task" 2>/dev/null; done' TERM
for ((node = 0; node < count; node++)); do
    export SLURM_NODEID=$node NODE=$((first + node))
    if [ -n "$output" ]; then setsid "$@" > "${output//%n/$node}" 2>&1 & else "$@" & fi
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2>/dev/null; do wait "$task" || code=1; done
done
exit $code
"""
PROGRAM = """#!/bin/bash
# Stands for `python -P -m ductile`: says how it was called, and serves until it is ended, or ends at once.
shift 3
echo "${NODE-} ${CUDA_VISIBLE_DEVICES-} ${OMP_NUM_THREADS-} $*" >> "$CALLS"
trap 'echo "ended $1 ${NODE-}" >> "$CALLS"; exit 0' TERM
[ "$1 $BEHAVIOUR" = "inference ends" ] && exit 1
while true; do sleep 0.05; done
"""
APART = """[slurm]
[cluster]
max_restarts = 1
[deployment]
type = "disaggregated"
num_decode_nodes = 2
num_decode_replicas = 4
decode_env_overrides = {OMP_NUM_THREADS = "2"}
prefill_vllm_overrides = {max_num_batched_tokens = 4096}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    for name, text in {**FILES, "apart.toml": APART}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "program": PROGRAM}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)


@contextmanager
def job(behaviour: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    here = Path.cwd()
    own = {
        "PATH": f"{here / 'bin'}:{os.environ['PATH']}",
        "DUCTILE_PYTHON": str(here / "bin/program"),
        "CALLS": str(here / "calls"),
        "BEHAVIOUR": behaviour,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURMD_NODENAME": "node1",
        **environment,
    }
    words = ["bash", "out/inference.sbatch"]
    process = subprocess.Popen(words, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def calls(of: str) -> list[str]:
    path = Path("calls")
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted(line.replace(str(Path.cwd()), "<here>") for line in lines if f" {of}" in line)


def wait_for(number: int, of: str, process: subprocess.Popen[str]) -> list[str]:
    deadline = time.monotonic() + 60
    while len(found := calls(of)) < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def free_ports(number: int) -> list[int]:
    with ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in taken]


def write(*words: str) -> None:
    assert main(["inference", "@", "infer.toml", *words, "--output-dir", "out", "--dry-run"]) == 0


def test_servers_start_on_their_nodes_and_a_router_before_them() -> None:
    write("@", "apart.toml")
    with job("works", CUDA_VISIBLE_DEVICES="4,5,6,7") as process:
        started = wait_for(5, "inference @", process)
        (router,) = wait_for(1, "router", process)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    decode = "inference @ <here>/out/configs/inference.toml --server.port"
    assert started == [
        "0 4  inference @ <here>/out/configs/prefill.toml --server.port 8100",
        f"1 4 2 {decode} 8200",
        f"1 5 2 {decode} 8201",
        f"2 4 2 {decode} 8200",
        f"2 5 2 {decode} 8201",
    ]
    assert router.split("router ")[1] == (
        "@ <here>/out/configs/router.toml --urls http://node2:8200 http://node2:8201 http://node3:8200 "
        "http://node3:8201 --prefill-urls http://node1:8100"
    )
    assert Path("out/slurm/urls").read_text() == "http://node1:8000/v1\n"
    assert len(Path("out/slurm/servers").read_text().splitlines()) == 5
    assert calls("inference @") == started, "a server that is told to end is not started again"
    assert len(calls("inference 0") + calls("inference 1") + calls("inference 2")) == 5
    assert "inference ended with exit status" in said


def test_a_server_that_ends_is_started_again_and_without_any_the_job_ends() -> None:
    write("@", "apart.toml")
    with job("ends") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(calls("inference @")) == 10, said
    assert "no server is left" in said


def test_what_is_written_for_them_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    write("@", "apart.toml", "--deployment.router.type", "llm-d", "--deployment.router.port", "9000")
    monkeypatch.setenv("DUCTILE_SERVER_KEY", "a key of the job's own")
    for name in ("prefill", "inference"):
        assert main(["check", "inference", "@", f"out/configs/{name}.toml"]) == 0
    assert main(["check", "router", "@", "out/configs/router.toml", "--urls", "http://node2:8200"]) == 0
    router = Path("out/configs/router.toml").read_text()
    assert "port = 9000" in router
    assert 'policy = "least_tokens"' in router
    assert "non_cached_tokens = 16" in router
    assert "max_num_batched_tokens = 4096" in Path("out/configs/prefill.toml").read_text()
    assert "max_num_batched_tokens = 4096" not in Path("out/configs/inference.toml").read_text()


@pytest.mark.nightly
def test_a_job_completes_prompts_that_another_node_has_computed(tmp_path: Path) -> None:
    router, prefill, decode = free_ports(3)
    words = [f"--deployment.prefill-port={prefill}", f"--deployment.decode-port={decode}"]
    write("@", "apart.toml", "--cluster.device", "cpu", "--deployment.num-decode-nodes", "1", *words,
          "--deployment.num-decode-replicas", "1", "--server.port", str(router))  # fmt: skip
    (tmp_path / "bin/scontrol").write_text("#!/bin/bash\nprintf 'localhost\\nlocalhost\\n'\n")
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "HOME") if name in os.environ}
    with job("", SLURM_JOB_NUM_NODES="2", DUCTILE_PYTHON=sys.executable, **environment) as process:
        key = {"Authorization": f"Bearer {Path('out/slurm/server_key').read_text().strip()}"}
        url, deadline = f"http://127.0.0.1:{router}", time.monotonic() + 300
        while True:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, [log.read_text() for log in Path("out/slurm/latest/").glob("*.log")]
            try:
                servers = httpx.get(f"{url}/health", headers=key, timeout=10).text
                if servers.count('"ready"') == 2:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        body = {"model": "model", "prompt": "1 + 2 = ", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=120)
        assert reply.status_code == 200, reply.text
        counted = httpx.get(f"{url}/metrics", headers=key, timeout=10).text
        assert f'ductile_router_prefills_total{{outcome="done",replica="http://localhost:{prefill}"}} 1.0' in counted
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
