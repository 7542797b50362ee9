"""Meaning of the counts of a run's checkpoints: settings that change what is trained, and fingerprints of files.

Whatever key of the config is not listed here as one that changes nothing belongs to it: a new key is compared unless
somebody says that it need not be.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ductile.config.checks.on_disk import read_spec
from ductile.config.reading.imports import source_of
from ductile.config.reading.key_tree import keys
from ductile.config.schema.fleet import FleetConfig
from ductile.config.schema.run import JsonlData, RLConfig, SFTConfig
from ductile.config.schema.section import Section
from ductile.orchestrator.commands.reference import fingerprint
from ductile.orchestrator.ending.meaning import Meaning
from ductile.roles import Task
from ductile.tasks.jsonl import JsonlDataset
from ductile.tasks.task import messages_of
from ductile.tasks.tokenizer import Tokenizer

NUM_ASKED = 64
"""Examples whose prompts are compared of a task that makes each when it is asked for, which may take long."""

_RUN = (
    "model", "seq_len", "max_steps", "output_dir", "clean", "resume", "dry_run", "bench", "trace", "scorer", "cluster",
    "resize", "deployment", "slurm", "ray", "ckpt", "tokenizer", "log", "wandb", "tensorboard", "dist_timeout_seconds",
    "loss_impl",
)  # fmt: skip
"""Keys that say where a run is, on what, and what it writes. `model` and `max_steps` are compared as facts."""
_LAYOUT = (
    "name", "vlm", "seq_len", "impl", "attn", "reduce_every", "dp_replicate", "reshard_after_forward", "tp", "pp",
    "pp_schedule", "vpp", "cp", "cp_style", "ep", "ep_comm_backend", "deepep_num_sms", "deepep_token_chunk_size",
    "fsdp_cpu_offload", "optim_cpu_offload", "full_offload", "moe_use_grouped_mm", "moe_fused_kernel", "ac",
    "ac_offloading", "compile", "fused_lm_head_token_chunk_size",
)  # fmt: skip
"""How a model is spread and packed: the same numbers, but for rounding."""
_TRAINER = (
    "data", "max_steps", "seed", "dist_timeout_seconds", "resize", "weight_broadcast", "rollout_transport", "gc",
    "memory_profiler_path", "heartbeat", "metrics_server", "enable_router_replay", "enable_token_export",
    "max_concurrent_runs", "optim.max_skipped_steps",
)  # fmt: skip
_ORCHESTRATOR = (
    "task.path", "eval.task.path", "eval.interval", "num_samples_kept", "canaries", "graders",
    "client", "max_steps", "oversampling_factor",
)  # fmt: skip
_INFERENCE = (
    "model.name", "model.vlm", "model.chat_template", "server", "parallel", "engine", "max_num_seqs", "block_size",
    "max_num_batched_tokens", "num_blocks", "cache_memory_gib", "gpu_memory_utilization", "enable_prefix_caching",
    *FleetConfig.model_fields,
)  # fmt: skip
CHANGES_NOTHING = {
    RLConfig: (
        *_RUN, "seed", *(f"trainer.model.{name}" for name in _LAYOUT), *(f"trainer.{name}" for name in _TRAINER),
        *(f"orchestrator.{name}" for name in _ORCHESTRATOR), *(f"inference.{name}" for name in _INFERENCE),
    ),
    SFTConfig: (
        *(name for name in _RUN if name != "model"), *(f"model.{name}" for name in _LAYOUT), "optim.max_skipped_steps",
        "model.chat_template", "data.path", "data.pack_function", "data.micro_batch_size",
    ),
}  # fmt: skip
"""Keys, and tables, of which another value is the same run. What a file of theirs has is compared as a fact."""


def rl_meaning(
    config: RLConfig,
    tokenizer: Tokenizer,
    tasks: Mapping[str, Task],
    examples: Sequence[int],
    held_out: tuple[str, Sequence[int]],
) -> Meaning:
    """tasks: as `Prepared.tasks`. held_out: name of a task, and its examples that are held out. Raises TaskError."""
    train, (name, evaluated) = tasks["train"], held_out
    settings = dict(_settings(config))
    if not config.orchestrator.shuffle:
        del settings["orchestrator.seed"]
    if not config.orchestrator.eval.enabled:
        del settings["orchestrator.eval.num_examples"]
    return {
        "examples": len(examples),
        "prompts": prompts_fingerprint(train, examples),
        **({"rows": rows_fingerprint(train, examples)} if isinstance(train, JsonlDataset) else {}),
        **({"held_out": _held_out(tasks[name], evaluated)} if evaluated else {}),
        **_of_model(config.trainer.model.name, tokenizer),
        **settings,
    }


def sft_meaning(config: SFTConfig, tokenizer: Tokenizer | None, rows: Iterable[object], num_samples: int) -> Meaning:
    """tokenizer: None where data are made up, and so are no rows."""
    settings = dict(_settings(config))
    of_data: dict[str, Any] = {}
    if isinstance(config.data, JsonlData):
        of_data = {"samples": num_samples, "conversations": _digest(rows)}
        if not config.data.shuffle:
            del settings["seed"]
    else:
        del settings["seed"]
    return {**of_data, **_of_model(config.model.name, tokenizer), **settings}


def prompts_fingerprint(task: Task, examples: Sequence[int]) -> str:
    """Return the fingerprint of what the examples ask, in their order, without system prompts. Of a task without rows
    it is taken of `NUM_ASKED` examples. Raises TaskError."""
    if not isinstance(task, JsonlDataset) and len(examples) > NUM_ASKED:
        examples = [examples[number * (len(examples) - 1) // (NUM_ASKED - 1)] for number in range(NUM_ASKED)]
    asked = ([each for each in messages_of(task, example) if each["role"] != "system"] for example in examples)
    return _digest(asked)


def rows_fingerprint(task: JsonlDataset, examples: Sequence[int]) -> str:
    return _digest(task.rows[example] for example in examples)


def _held_out(task: Task, examples: Sequence[int]) -> str:
    rows = rows_fingerprint(task, examples) if isinstance(task, JsonlDataset) else ""
    return f"{len(examples)} examples {prompts_fingerprint(task, examples)} {rows}".rstrip()


def _of_model(name: str | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    spec = read_spec(name)
    # Adapters are none of the folder's: they are among the settings.
    fields = {} if spec is None else {field: value for field, value in asdict(spec).items() if field != "lora"}
    facts = {f"config.json {field}": value for field, value in fields.items()}
    return facts | {"weights": fingerprint(Path(str(name)))} | (tokenizer.fingerprints() if tokenizer else {})


def _settings(config: RLConfig | SFTConfig) -> Iterator[tuple[str, Any]]:
    changes_nothing = frozenset(CHANGES_NOTHING[type(config)])
    for key, value in _values(config):
        parts = key.split(".")
        if not any(".".join(parts[:length]) in changes_nothing for length in range(1, len(parts) + 1)):
            yield key, _code(value) if parts[-1] in ("reward", "import_path") else value


def _values(section: Section, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below the section, dotted, with its value."""
    for name in keys(type(section)):
        value: Any = getattr(section, name)
        if isinstance(value, Section):
            yield from _values(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _code(value: Any) -> Any:
    """Functions of the user's with the fingerprints of their files, wherever these lie."""
    if isinstance(value, list):
        return _code(value[0]) if len(value) == 1 else [_code(each) for each in value]
    if not isinstance(value, str) or (source := source_of(value)) is None:
        return value
    name = f"{source.name}:{value.rpartition(':')[2]}" if value.partition(":")[0].endswith(".py") else value
    return f"{name} ({blake2b(source.read_bytes(), digest_size=8).hexdigest()})"


def _digest(values: Iterable[object]) -> str:
    digest = blake2b(digest_size=8)
    for value in values:
        digest.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
