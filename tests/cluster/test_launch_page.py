"""What the scaling page has of SLURM and of deployments is accepted as it stands, and its dry run writes what
`tests/cluster/golden` has: what the command says, and the script.

After a change of the templates, `REWRITE_GOLDEN=1 pytest tests/cluster/test_launch_page.py` writes the files anew; read
what `git diff` shows of them.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ductile.cli import main
from tests.config.stories import furnish
from tests.config.test_scaling_page import BLOCKS, FILES

GOLDEN = Path(__file__).with_name("golden")
EXAMPLES = Path(__file__).parents[2] / "examples/multinode"
ACTIVATION, OF_RL, OF_SFT = (
    BLOCKS[name] for name in ("Activation 0", "`[deployment]` Block 0", "`[deployment]` Block 1")
)
MORE_FILES = {
    "my_slurm.toml": ACTIVATION,
    "rl_nodes.toml": OF_RL,
    "sft_nodes.toml": OF_SFT,
    "servers.toml": '[slurm]\n[deployment]\ntype = "multi_node"\n',
    "routed.toml": (
        '[slurm]\n[deployment]\ntype = "multi_node"\n[deployment.router]\ntype = "vllm-router"\nport = 9000\n'
    ),
    "apart.toml": (
        '[slurm]\n[deployment]\ntype = "disaggregated"\nnum_decode_nodes = 2\nnum_decode_replicas = 4\n'
        'prefill_vllm_overrides = {max_num_batched_tokens = 4096}\ndecode_env_overrides = {OMP_NUM_THREADS = "2"}\n'
    ),
    "path/to/my_template.sbatch.j2": (
        '#!/bin/bash\n{% include "_directives.j2" %}\n#SBATCH --constraint=h100\n\n{% include "_begin.j2" %}\n\n'
        '"${ductile[@]}" {{ command }} @ "$config"\n'
    ),
    "128_nodes.toml": '[deployment]\ntype = "multi_node"\nnum_train_nodes = 64\nnum_infer_nodes = 64\n',
}
LINES = {
    "single_node": "rl @ base_rl.toml @ my_slurm.toml --dry-run",
    "six_and_two_gpus": (
        "rl @ rl.toml --deployment.num-infer-gpus 6 --deployment.num-train-gpus 2 --inference.parallel.dp 6 "
        "@ my_slurm.toml --dry-run"
    ),
    "rl_nodes": "rl @ base_rl.toml @ my_slurm.toml @ rl_nodes.toml --dry-run",
    "orchestrator_on_inference": (
        "rl @ base_rl.toml @ my_slurm.toml @ rl_nodes.toml --deployment.orchestrator-on-inference --dry-run"
    ),
    "sft_nodes": "sft @ sft.toml @ my_slurm.toml @ sft_nodes.toml --dry-run",
    "all_keys": (
        "sft @ sft.toml @ my_slurm.toml @ sft_nodes.toml --slurm.partition None --slurm.nodelist 'node[1-2]' "
        "--slurm.exclude node7 --slurm.account physics --slurm.time 1-12:00:00 --slurm.notice-s 300 "
        "--slurm.pre-run-command 'module load cuda' --slurm.cleanup-grace-period 60 --no-slurm.requeue "
        "--slurm.job-name 'my run' --clean --cluster.device cpu --dry-run"
    ),
    "own_template": "rl @ my_config.toml --slurm.template-path path/to/my_template.sbatch.j2 --dry-run",
    "servers": "inference @ infer.toml @ servers.toml --dry-run",
    "routed_servers": "inference @ infer.toml @ routed.toml --parallel.dp 2 --dry-run",
    "disaggregated": "inference @ infer.toml @ apart.toml --dry-run",
    "one_server": "inference @ infer.toml --slurm --dry-run",
    "example_rl": f"rl @ {EXAMPLES / 'rl.toml'} @ {EXAMPLES / 'slurm.toml'} --model.name model --dry-run",
    "example_sft": (
        f"sft @ {EXAMPLES / 'sft.toml'} @ {EXAMPLES / 'slurm.toml'} --model.name model --data.path data.jsonl --dry-run"
    ),
    "ray_nodes": "sft @ sft.toml @ my_slurm.toml @ sft_nodes.toml --ray '{}' --dry-run",
    "128_nodes": "rl @ base_rl.toml @ my_slurm.toml @ 128_nodes.toml --dry-run",
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    for name, text in {**FILES, **MORE_FILES}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


def words_of(name: str) -> list[str]:
    """Return the words of a line, which writes to a folder of the test's own."""
    return [*shlex.split(LINES[name]), "--output-dir", "out"]


def script_of(name: str) -> Path:
    return Path("out") / f"{LINES[name].split()[0]}.sbatch"


@pytest.mark.parametrize("name", LINES)
def test_a_dry_run_is_what_its_golden_file_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(name)) == 0
    script = script_of(name).read_text()
    found = f"$ ductile {LINES[name]}\n{capsys.readouterr().out}\n--- {script_of(name)}\n{script}"
    for here, shown in {
        str(tmp_path): "<here>",
        sys.executable: "<python>",
        str(EXAMPLES.parents[1]): "<source>",
    }.items():
        found = found.replace(here, shown)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("REWRITE_GOLDEN"):
        golden.write_text(found)
    assert found == golden.read_text()


def test_every_golden_file_is_compared() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == LINES.keys()


@pytest.mark.parametrize("name", LINES)
def test_bash_reads_the_script(name: str) -> None:
    assert main(words_of(name)) == 0
    done = subprocess.run(["bash", "-n", str(script_of(name))], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [name for name in LINES if not name.startswith("example")])
def test_the_config_of_the_job_runs_where_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It submits nothing, and means what the submitted one meant."""
    assert main(words_of(name)) == 0
    command = LINES[name].split()[0]
    capsys.readouterr()
    monkeypatch.setenv("DUCTILE_SERVER_KEY", "a key of the job's own")
    assert main(["check", command, "@", f"out/configs/{command}.toml"]) == 0
    said = capsys.readouterr()
    assert "SLURM" not in said.out
    assert "slurm" not in Path(f"out/configs/{command}.toml").read_text()
    if command == "rl" and "nodes" in name:
        assert "num_nodes" in said.out


def partition_of_the_page() -> str | None:
    """Return why `sbatch --test-only` cannot be asked here; None where it can."""
    if shutil.which("sbatch") is None:
        return "there is no sbatch here"
    words = ["scontrol", "show", "partition", "cluster"]
    known = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return f"no controller has a partition `cluster`: {known.stderr.strip()}" if known.returncode else None


@pytest.mark.parametrize(
    "name",
    ["single_node", "six_and_two_gpus", "rl_nodes", "sft_nodes", "servers", "disaggregated", "ray_nodes", "128_nodes"],
)
def test_sbatch_accepts_the_script(name: str) -> None:
    if why := partition_of_the_page():
        pytest.skip(why)
    assert main(words_of(name)) == 0
    done = subprocess.run(["sbatch", "--test-only", str(script_of(name))], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_job_of_128_nodes_is_written_without_torch() -> None:
    """Its 1024 slots are placed, its trainer's layout is planned, and all is written, within the deadline of a test."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ductile", *words_of("128_nodes")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "nodes 0-63" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ductile.cluster.slurm.submit" in imported
    assert imported & {"torch", "transformers", "numpy", "zmq"} == set()
