"""The tree says what there is: every key of the seeds, nothing that is ignored, and help and docs that have it all."""

import shlex
from pathlib import Path

import pytest

import ductile
from ductile.config.reading.docs import ROOTS, fill_in
from ductile.config.reading.errors import ConfigError, dotted, flag
from ductile.config.reading.fit import fit
from ductile.config.reading.help import help_text, lines
from ductile.config.reading.key_tree import keys, walk
from ductile.config.reading.parse import parse
from ductile.config.reading.provenance import COMMAND_LINE, Draft, leaves
from ductile.config.reading.unread import UNREAD
from ductile.config.schema.orchestrator import SamplingConfig
from ductile.config.schema.run import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RouterRunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from ductile.config.schema.section import Section
from ductile.config.schema.trainer import SGDConfig
from tests.config.reading import attributes_read
from tests.config.stories import furnish

SOURCE = Path(ductile.__file__).parent
PAGE = SOURCE.parents[1] / "docs/config.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return tmp_path


MEANS_ONE_THING = {
    "impl": "both values that are built mean the same",
    "engine": "there is one",
    "loss_impl": "there is one",
    "pack_function": "there is one",
    "dp": "must be what the placement says",
    "gpus_per_node": "only a check compares it",
    "dry_run": "the command line's own",
    "nodes_per_fsdp_group": "trainer.model.dp_replicate follows from it",
}
"""Keys that no command reads, whose every value that is accepted is true of what it does."""


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
def test_every_key_is_read_by_the_command_or_said_to_be_unread(command: str, root: type[Section]) -> None:
    read = attributes_read("ductile.orchestrator.commands.run", f"run_{command}") | MEANS_ONE_THING.keys()
    if ("slurm",) in {path for path, _ in walk(root)}:
        read |= attributes_read("ductile.cluster.slurm.submit", "submit")
    said = [tuple(key.split(".")) for unread in UNREAD.get(root, ()) for key in unread.keys]
    ignored = {
        dotted(path)
        for path in _built_leaves(root)
        if path[-1] not in read and not any(path[: len(key)] == key for key in said)
    }
    assert ignored == set()


def test_the_guard_sees_the_command() -> None:
    """`heartbeat_timeout_s` is read where slots are started, and the server starts none."""
    assert "heartbeat_timeout_s" in attributes_read("ductile.orchestrator.commands.run", "run_sft")
    assert "heartbeat_timeout_s" not in attributes_read("ductile.orchestrator.commands.run", "run_inference")


OTHER_VALUES = {
    "cluster.auto_scheduler": "true",
    "cluster.policy": "static",
    "cluster.use_pre_process_policy": "true",
    "cluster.use_wait_before_last_iter_policy": "true",
    "cluster.share_devices": "false",
    "cluster.enable_offload": "true",
    "cluster.component_placement": '{"rollout": "0-3"}',
    "cluster.cpu_slot_fraction": "0.5",
    "cluster.slots_per_device": "2",
    "cluster.device_memory_gib": "80",
    "cluster.node_gb_per_s": "100",
    "cluster.network_gb_per_s": "10",
    "cluster.heartbeat_timeout_s": "5",
    "cluster.command_timeout_s": "5",
    "cluster.progress_timeout_s": "5",
    "cluster.group_timeout_s": "5",
    "cluster.patience_timeout_s": "5",
    "cluster.max_restarts": "0",
    "cluster.start_timeout_s": "5",
    "trainer.data.fake": "{}",
    "inference.server.host": "::1",
    "inference.server.api_key": "12345678",
    "inference.server.api_key_var": "PATH",
    "inference.server.ssl_certfile": "cert.pem",
    "inference.server.ssl_keyfile": "key.pem",
    "inference.server.served_model_name": "mine",
    "inference.server.generation_config": "ignore",
    "inference.server.max_connections": "7",
    "inference.server.max_sequences": "7",
    "inference.server.max_body_bytes": "2048",
    "inference.server.timeout_s": "7",
    "inference.server.stage_weights": "false",
    "trainer.weight_broadcast.save_sharded": "false",
    "trainer.weight_broadcast.save_format": "torch",
    "trainer.weight_broadcast.host": "elsewhere",
    "trainer.weight_broadcast.port": "7",
    "trainer.weight_broadcast.timeout": "7",
    "trainer.weight_broadcast.inference_world_size": "7",
    "weight_broadcast": '{"type": "nccl"}',
    "n_minibatches": "2",
    "max_async_level": "0",
    "max_off_policy_steps": "3",
    "on_stale": "wait",
    "canaries": "0",
    "eval": '{"num_examples": 3}',
    "advantage": '{"type": "grpo"}',
    "drop_zero_advantage": "false",
    "num_samples_kept": "3",
    "output_dir": "elsewhere",
    "deployment.gpus_per_node": "4",
    "deployment.num_infer_replicas": "2",
    "enable_health_monitor": "false",
    "health_check_interval_seconds": "9",
    "probe_timeout_seconds": "1",
    "health_check_failure_threshold": "9",
    "progress_timeout_seconds": "9",
    "enable_topology_discovery": "false",
    "topology_change_cooldown_seconds": "9",
    "join_transport": "disk",
    "min_healthy_servers": "9",
    "drain_timeout_seconds": "9",
    "max_rejoins": "9",
    "flap_window_seconds": "99",
    "flap_limit": "9",
    "flap_backoff_seconds": "9",
    "update_bucket_timeout_seconds": "9",
    "update_total_timeout_seconds": "99",
    "update_max_attempts": "9",
    "pipeline_slots": "9",
    "bucket_bytes": "9",
    "verify": "none",
    "pause_mode": "abort",
    "cluster.num_nodes": "2",
    "cluster.max_nodes": "2",
    "cluster.drain_deadline_s": "9",
    "cluster.head_is_node": "false",
    "cluster.interface": "lo",
    "cluster.port": "9",
    "cluster.node_groups": '[{"label": "a", "node_ranks": 0}]',
    "registry.urls": '["http://127.0.0.1:8000"]',
    "registry.import_path": "json.loads",
    "registry.kwargs": '{"a": 1}',
    "registry.serve": "true",
}
_FILES, _GROUP = ["--trainer.weight-broadcast.type", "filesystem"], ["--trainer.weight-broadcast.type", "nccl"]
OF_VARIANT = {
    **dict.fromkeys(("trainer.weight_broadcast.save_sharded", "trainer.weight_broadcast.save_format"), _FILES),
    **{f"trainer.weight_broadcast.{key}": _GROUP for key in ("host", "port", "timeout", "inference_world_size")},
    "deployment.num_infer_replicas": [
        *("--deployment.type", "multi_node", "--deployment.num-train-nodes", "1", "--deployment.num-infer-nodes", "2"),
        *("--deployment.gpus-per-node", "1"),
    ],
    "registry.urls": ["--registry.type", "static"],
    "registry.import_path": ["--registry.type", "custom"],
    "registry.kwargs": ["--registry.type", "custom", "--registry.import-path", "json.loads"],
    "registry.serve": ["--registry.type", "http", "--registry.url", "http://127.0.0.1:8500"],
}
"""What makes the table have the key."""
GOOD_FLAGS = {
    RLConfig: ["@", "good.toml"],
    SFTConfig: ["@", "sft.toml"],
    TrainerRunConfig: ["--model.name", "model", "--data.fake", "--max-steps", "2"],
    OrchestratorRunConfig: [
        *("--model.name", "model", "--client.base-url", "http://localhost:8000/v1"),
        *("--task.type", "builtin", "--task.name", "addition"),
    ],
    InferenceRunConfig: ["--model.name", "model"],
    RouterRunConfig: ["--urls", "http://127.0.0.1:8001"],
}


@pytest.mark.parametrize(
    ("root", "key", "noted"),
    [(root, key, unread.noted) for root, all_ in UNREAD.items() for unread in all_ for key in unread.keys],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_an_unread_key_is_refused_or_noted(here: Path, root: type[Section], key: str, noted: bool) -> None:
    path = flag(tuple(key.split(".")))
    flags = [*GOOD_FLAGS[root], *OF_VARIANT.get(key, ()), path, OTHER_VALUES[key]]
    if noted:
        assert any(key in notice and "no effect here" in notice for notice in parse(root, flags).notices)
        return
    with pytest.raises(ConfigError) as caught:
        parse(root, flags)
    assert [problem.key for problem in caught.value.problems] == [path]
    assert "has no effect here: " in str(caught.value)


@pytest.mark.parametrize("root", [SFTConfig, TrainerRunConfig])
def test_roles_that_the_command_does_not_have_get_no_slots(here: Path, root: type[Section]) -> None:
    placement = '{"actor": 0, "rollout": 1, "inference": 2}'
    with pytest.raises(ConfigError, match="gives slots to other roles than actor"):
        parse(root, [*GOOD_FLAGS[root], "--cluster.component-placement", placement])


def test_two_numbers_of_steps_that_differ_are_a_contradiction(here: Path) -> None:
    task = ["--orchestrator.task.type", "builtin", "--orchestrator.task.name", "addition", "--model.name", "model"]
    with pytest.raises(ConfigError, match=r"contradicts orchestrator.max_steps \(3\): write max_steps"):
        parse(RLConfig, [*task, "--trainer.max-steps", "2", "--orchestrator.max-steps", "3"])


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])
def test_help_has_every_key(command: str, root: type[Section]) -> None:
    said = help_text(command, "", root, unbuilt=True)
    missing = [flag(path) for path, key in walk(root) if not key.variants and f"  {flag(path)}  " not in said]
    assert missing == []


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])
def test_help_leaves_out_what_is_not_built(command: str, root: type[Section]) -> None:
    said = help_text(command, "", root)
    shown = {path for path, key in walk(root) if not key.variants and f"  {flag(path)}  " in said}
    assert {path for path in shown if path[-1] != "type"} == {p for p in _built_leaves(root) if p[-1] != "type"}
    assert "--help-all shows them" in " ".join(said.split())


def test_help_for_a_word_finds_variants_other_systems_names_and_what_is_not_built() -> None:
    assert "--orchestrator.task.path" in help_text("rl", "", RLConfig, "jsonl")
    assert "--max-steps" in help_text("rl", "", RLConfig, "num_epochs")
    assert "Not built yet: expert parallelism" in help_text("rl", "", RLConfig, "deepep")


def test_docs_are_up_to_date() -> None:
    text = PAGE.read_text()
    assert fill_in(text) == text, "run: python -m ductile.config.reading.docs docs/config.md"


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
    (InferenceRunConfig, "bench"), (InferenceRunConfig, "bench.output_json"),
    *((InferenceRunConfig, f"deployment.{name}") for name in (
        "type", "backend_port", "router", "router.type", "router.port", "router.policy", "num_prefill_replicas",
        "num_decode_replicas", "prefill_port", "decode_port", "prefill_env_overrides", "decode_vllm_overrides",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("root", "name"), NAMED, ids=[f"{root.__name__}.{name}" for root, name in NAMED])
def test_every_knob_of_the_seeds_is_there(root: type[Section], name: str) -> None:
    assert tuple(name.split(".")) in {path for path, _ in walk(root)}


def test_the_seed_s_two_runs_side_by_side(here: Path) -> None:
    """`CUDA_VISIBLE_DEVICES=2,3 rl @ rl.toml` with a port and an output folder of its own."""
    flags = "--inference.server.port 8001 --orchestrator.client.base-url http://localhost:8001/v1 --output-dir out/exp2"
    parsed = parse(RLConfig, ["@", "good.toml", *flags.split()])
    assert parsed.config.output_dir == "out/exp2"
    (notice,) = parsed.notices
    assert "is taken for this run's own generate slots, as it has their port (inference.server.port 8001)" in notice


@pytest.mark.parametrize(("loss", "told"), [("default", 1), ("ipo", 1), ("grpo", 0)])
def test_a_scorer_that_nobody_asks_is_told_of(here: Path, loss: str, told: int) -> None:
    placement = '--cluster.component-placement \'{"actor": 0, "rollout": 1, "inference": 2}\''
    notices = parse(RLConfig, ["@", "good.toml", *shlex.split(placement), "--trainer.loss.type", loss]).notices
    assert len(notices) == told
    assert all(f'loss "{loss}" compares with what the generators say' in notice for notice in notices)


@pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])
def test_one_key_of_a_table_never_changes_another_s_default(command: str, root: type[Section]) -> None:
    for path, value in leaves(root().model_dump()):
        draft = Draft()
        draft.put(path, value, COMMAND_LINE)
        assert root.model_validate(fit(root, draft).values) == root(), dotted(path)


def test_another_variant_has_defaults_of_its_own() -> None:
    assert SFTConfig.model_validate({"optim": {"type": "sgd"}}).optim == SGDConfig()


def test_help_says_the_default_of_the_table_where_it_stands() -> None:
    said = {dotted(line.path): line.default for line in lines(RLConfig)}
    assert said["orchestrator.sampling.temperature"] == "1.0"
    assert said["orchestrator.eval.sampling.temperature"] == "0.0"


@pytest.mark.parametrize(
    ("given", "max_tokens", "stop", "stop_token_ids"),
    [
        ("", 128, [], []),
        ("--orchestrator.sampling.max-tokens 1500 --orchestrator.sampling.stop END", 1500, ["END"], []),
        ("--orchestrator.sampling.stop-token-ids 3 --orchestrator.eval.sampling.max-tokens 9", 9, [], [3]),
        ("--orchestrator.sampling.stop END --orchestrator.eval.sampling.stop '[]'", 128, [], []),
    ],
)
def test_evaluation_is_greedy_and_has_the_limits_of_training(
    here: Path, given: str, max_tokens: int, stop: list[str], stop_token_ids: list[int]
) -> None:
    config = parse(RLConfig, ["@", "good.toml", *shlex.split(given)]).config
    assert config.orchestrator.eval.sampling == SamplingConfig(
        temperature=0.0, max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--orchestrator.sampling.top-p 0.7", "top_p"),
        ("--orchestrator.sampling.top-k 20", "top_k"),
        ("--orchestrator.sampling.min-p 0.1", "min_p"),
        ("--orchestrator.sampling.top-k 0 --orchestrator.eval.sampling.top-p 0.7", None),
    ],
)
def test_training_on_a_part_of_the_vocabulary_is_told_of(here: Path, given: str, named: str | None) -> None:
    notices = parse(RLConfig, ["@", "good.toml", *given.split()]).notices
    assert [notice.partition(":")[0] for notice in notices] == ([f"orchestrator.sampling.{named}"] if named else [])
