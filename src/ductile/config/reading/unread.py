"""Keys that a command's tree has and that the command does not read.

One rule: such a key is refused as soon as it has another value than its default. Where one file often serves several
commands, it is accepted with a note instead. A test finds what each command reads in the source and compares.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ductile.config.finding import Finding
from ductile.config.reading.errors import listed
from ductile.config.reading.key_tree import find, value_at
from ductile.config.schema.fleet import FleetConfig, HealthCheckConfig
from ductile.config.schema.inference import ServerConfig
from ductile.config.schema.run import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RouterRunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from ductile.config.schema.section import Section


@dataclass(frozen=True, slots=True)
class Unread:
    keys: tuple[str, ...]
    """Dotted keys; a table stands for everything below it."""
    why: str
    """Why the keys have no effect. The sentence goes on after "it has no effect here:"."""
    noted: bool = False
    """Whether the keys are accepted with a note, instead of refused."""
    but_in_jobs: bool = False
    """Whether the keys are read where the command is submitted to SLURM."""

    def given(self, config: Section) -> list[str]:
        """The keys that have another value than their default."""
        if self.but_in_jobs and value_at(config, ("slurm",)) is not None:
            return []
        return [key for key in self.keys if _differs(config, key)]


def _unscheduled(command: str, *read: str) -> Unread:
    keys = ("auto_scheduler", "policy", "use_pre_process_policy", "use_wait_before_last_iter_policy", "share_devices",
            "enable_offload", "max_restarts", "progress_timeout_s", "group_timeout_s",
            "patience_timeout_s")  # fmt: skip
    why = f"it is for `ductile rl`, and the slots of `ductile {command}` have one role"
    return Unread(tuple(f"cluster.{key}" for key in keys if key not in read), why)


_ONE_PROCESS = Unread(
    ("cluster.component_placement", "cluster.cpu_slot_fraction", "cluster.slots_per_device",
     "cluster.device_memory_gib", "cluster.node_gb_per_s", "cluster.network_gb_per_s",
     "cluster.heartbeat_timeout_s", "cluster.command_timeout_s",
     "cluster.start_timeout_s", "cluster.num_nodes", "cluster.max_nodes", "cluster.head_is_node", "cluster.interface",
     "cluster.port", "cluster.node_groups", "cluster.drain_deadline_s"),
    "each server of `ductile inference` is one process on one device, without slots",
)  # fmt: skip

UNREAD: dict[type[Section], tuple[Unread, ...]] = {
    RLConfig: (
        Unread(
            tuple(f"inference.server.{name}" for name in ServerConfig.model_fields if name != "port"),
            "it is for `ductile inference`, and `ductile rl` opens no HTTP port",
            noted=True,
        ),
        Unread(
            ("trainer.weight_broadcast.save_sharded", "trainer.weight_broadcast.save_format"),
            "each rank writes its own part of the weights, in buckets",
            noted=True,
        ),
        Unread(
            tuple(f"trainer.weight_broadcast.{name}" for name in ("port", "timeout", "inference_world_size")),
            "connections are made for each version, by those that are there, at free ports; "
            "inference.update_total_timeout_seconds limits it",
            noted=True,
        ),
        Unread(
            ("deployment.num_infer_replicas",),
            "each slot that generates is a replica of its own, and a request goes to any of them",
            noted=True,
        ),
        Unread(("trainer.data.fake",), "it is for `ductile trainer`, and here the generators make the data"),
    ),
    SFTConfig: (_unscheduled("sft", "max_restarts"),),
    TrainerRunConfig: (
        _unscheduled("trainer"),
        Unread(("weight_broadcast",), "it is for servers that generate, and `ductile trainer` has none"),
    ),
    OrchestratorRunConfig: (
        Unread(
            (
                *("n_minibatches", "max_async_level", "max_off_policy_steps", "on_stale", "canaries"),
                *("eval", "advantage", "drop_zero_advantage"),
            ),
            "`ductile orchestrator` scores completions, and trains nothing",
            noted=True,
        ),
        Unread(("num_samples_kept",), "`ductile orchestrator` keeps every rollout, in rollouts.jsonl", noted=True),
    ),
    InferenceRunConfig: (
        _unscheduled("inference", "max_restarts"),
        _ONE_PROCESS,
        Unread(
            tuple(
                name for name in FleetConfig.model_fields if name not in {"registry", *HealthCheckConfig.model_fields}
            ),
            "it is for `ductile rl`, which rules the fleet that this server is in",
            noted=True,
        ),
        Unread(
            ("registry.urls", "registry.import_path", "registry.kwargs", "registry.serve"),
            "it says where `ductile rl` looks for servers; one announces itself in a registry of type file or http",
            noted=True,
        ),
        Unread(
            ("output_dir",),
            "`ductile inference` writes nothing but what --dry-run writes",
            noted=True,
            but_in_jobs=True,
        ),
    ),
    RouterRunConfig: (
        Unread(("output_dir",), "`ductile router` writes nothing but what --dry-run writes", noted=True),
    ),
}


def unread_findings(config: Section) -> Iterator[Finding]:
    """Keys that were set, that the command does not read, and that are refused."""
    for unread in UNREAD.get(type(config), ()):
        if not unread.noted:
            for key in unread.given(config):
                yield Finding((key,), f"has no effect here: {unread.why}. Leave it out")


def unread_notes(config: Section) -> Iterator[str]:
    """A sentence for the keys that were set, that the command does not read, and that are accepted all the same."""
    for unread in UNREAD.get(type(config), ()):
        if unread.noted and (given := unread.given(config)):
            yield f"{listed(given)} {'has' if len(given) == 1 else 'have'} no effect here: {unread.why}"


def _differs(config: Section, key: str) -> bool:
    path = tuple(key.split("."))
    value = value_at(config, path)  # None where the key is one of another variant, or the table is left out
    return value is not None and value != find(type(config), path)[0].default
