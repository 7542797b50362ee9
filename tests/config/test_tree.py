"""The tree says what there is: every key of the seeds, nothing that is ignored, and help and docs that have it all."""

import ast
import shlex
from pathlib import Path

import pytest

import ductile
from ductile.config.docs import ROOTS, fill_in
from ductile.config.errors import dotted, flag
from ductile.config.help import help_text, lines
from ductile.config.parse import parse
from ductile.config.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema import keys, walk
from ductile.config.section import Section
from tests.config.stories import furnish

SOURCE = Path(ductile.__file__).parent
PAGE = SOURCE.parents[1] / "docs/config.md"

CONSUMED_BY_CONFIG = {
    "seq_len": "shared",
    "resume": "is ckpt.resume_step",
    "dry_run": "the command line's",
    "component_placement": "placement",
    "num_train_gpus": "placement",
    "num_infer_gpus": "placement",
    "num_gpus": "placement",
    "gpus_per_node": "bounds the placement",
    "auto_scheduler": "config.policy_of",
    "policy": "config.policy_of",
    "use_pre_process_policy": "config.policy_of",
    "use_wait_before_last_iter_policy": "config.policy_of",
    "dp": "checked against the placement",
    "impl": "both values that are built mean the same",
    "attn": "both values that are built mean the same",
    "engine": "there is one",
    "loss_impl": "there is one",
    "pack_function": "there is one",
    "type": "chooses a variant",
}
"""Keys that no other package reads, and why that is right."""


def _names_read() -> set[str]:
    """Every attribute that code outside of `config` reads: a key that is used appears there."""
    files = [file for file in SOURCE.rglob("*.py") if "config" not in file.relative_to(SOURCE).parts]
    trees = [ast.parse(file.read_text()) for file in files]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _built_leaves(section: type[Section], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Keys that hold values and that are not refused."""
    found: list[tuple[str, ...]] = []
    for name, key in keys(section).items():
        if key.not_built and not key.not_built.only:
            continue
        for variant in key.variants:
            tag = keys(variant).get("type")
            if not (tag and tag.not_built):
                found += _built_leaves(variant, (*path, name))
        if not key.variants:
            found.append((*path, name))
    return found


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])
def test_every_key_is_read_by_code_or_refused(command: str, root: type[Section]) -> None:
    read = _names_read() | CONSUMED_BY_CONFIG.keys()
    ignored = {dotted(path) for path in _built_leaves(root) if path[-1] not in read}
    assert ignored == set()


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])
def test_help_has_every_key(command: str, root: type[Section]) -> None:
    said = help_text(command, "", root)
    missing = [flag(path) for path, key in walk(root) if not key.variants and f"  {flag(path)}  " not in said]
    assert missing == []


def test_docs_are_up_to_date() -> None:
    text = PAGE.read_text()
    assert fill_in(text) == text, "run: python -m ductile.config.docs docs/config.md"


def test_docs_have_every_key_that_help_has() -> None:
    text = PAGE.read_text()
    for _, root, branch in ROOTS:
        for line in lines(root):
            in_branch = dotted((branch, *line.path))
            assert f"`{dotted(line.path)}`" in text or f"`{in_branch}`" in text


def test_every_default_is_a_value_that_the_key_accepts() -> None:
    """`validate_default` is off, for speed; so the defaults are validated here."""
    for _, root, _ in ROOTS:
        dumped = root().model_dump()
        assert root.model_validate(dumped).model_dump() == dumped


# Every knob that the four seed documents name, on the command that they name it for.
NAMED: list[tuple[type[Section], str]] = [
    *((RLConfig, f"trainer.model.{name}") for name in (
        "impl", "attn", "dp_replicate", "reshard_after_forward", "fsdp_cpu_offload", "optim_cpu_offload", "ep",
        "ep_comm_backend", "deepep_num_sms", "deepep_token_chunk_size", "cp", "cp_style", "ac", "ac.mode", "ac.freq",
        "ac.targets", "ac_offloading", "ac_offloading.max_inflight_activations", "compile",
        "fused_lm_head_token_chunk_size",
    )),
    *((RLConfig, name) for name in (
        "trainer.optim.type", "trainer.max_concurrent_runs", "deployment.type", "deployment.num_infer_gpus",
        "deployment.num_train_gpus", "deployment.num_train_nodes", "deployment.num_infer_nodes",
        "deployment.gpus_per_node", "deployment.nodes_per_fsdp_group", "inference.parallel.dp", "inference.parallel.tp",
        "inference.server.port", "orchestrator.client.base_url", "output_dir", "slurm.job_name", "slurm.template_path",
        "dry_run", "bench", "bench.output_json", "cluster.num_nodes", "cluster.component_placement",
        "cluster.auto_scheduler", "cluster.use_pre_process_policy", "cluster.use_wait_before_last_iter_policy",
        "inference.enable_health_monitor", "inference.health_check_interval_seconds",
        "inference.health_check_failure_threshold", "inference.topology_change_cooldown_seconds",
        "inference.enable_topology_discovery",
    )),
    *((SFTConfig, name) for name in (
        "bench", "data.type", "data.length", "deployment.num_gpus", "deployment.num_nodes", "deployment.gpus_per_node",
        "slurm.partition", "dry_run",
    )),
    (TrainerRunConfig, "data.fake"), (TrainerRunConfig, "bench"),
    (InferenceRunConfig, "deployment.num_nodes"), (InferenceRunConfig, "slurm.job_name"),
]  # fmt: skip


@pytest.mark.parametrize(("root", "name"), NAMED, ids=[f"{root.__name__}.{name}" for root, name in NAMED])
def test_every_knob_of_the_seeds_is_there(root: type[Section], name: str) -> None:
    assert tuple(name.split(".")) in {path for path, _ in walk(root)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return tmp_path


def test_the_seed_s_two_runs_side_by_side(here: Path) -> None:
    """`CUDA_VISIBLE_DEVICES=2,3 rl @ rl.toml` with a port and an output folder of its own."""
    flags = "--inference.server.port 8001 --orchestrator.client.base-url http://localhost:8001/v1 --output-dir out/exp2"
    parsed = parse(RLConfig, ["@", "good.toml", *flags.split()])
    assert parsed.config.output_dir == "out/exp2"
    why = "has no effect here: `ductile rl` talks to its own generators, and opens no HTTP port"
    assert parsed.notices == (f"inference.server {why}", f"orchestrator.client {why}")


@pytest.mark.parametrize(("loss", "told"), [("default", 1), ("ipo", 1), ("grpo", 0)])
def test_a_scorer_that_nobody_asks_is_told_of(here: Path, loss: str, told: int) -> None:
    placement = '--cluster.component-placement \'{"actor": 0, "rollout": 1, "inference": 2}\''
    notices = parse(RLConfig, ["@", "good.toml", *shlex.split(placement), "--trainer.loss.type", loss]).notices
    assert len(notices) == told
    assert all(f'loss "{loss}" compares with what the generators say' in notice for notice in notices)
