"""Findings on the nodes of a deployment, and on what is written for SLURM."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from ductile.config.checks.asked_placement import lacks_generators, num_nodes
from ductile.config.checks.serving_plan import NodeServers, servers_on_nodes
from ductile.config.checks.written import named_files
from ductile.config.finding import Finding
from ductile.config.schema.cluster import (
    DisaggregatedServing,
    MultiNodeDeployment,
    MultiNodeServing,
    MultiNodeTrainDeployment,
    SlurmConfig,
)
from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.secrets import SECRETS
from ductile.config.schema.section import Section
from ductile.core.instances.placement import many

TIME = re.compile(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}|(?i:infinite|unlimited))")
"""Time limits as `sbatch --time` reads them."""
DIRECTIVES = ("job_name", "partition", "nodelist", "exclude", "account")
"""Keys of `[slurm]` whose text becomes a line of the script that sbatch itself reads."""
SBATCH_S_OWN = "quotes, backslashes and line ends"
"""Characters that no value in an `#SBATCH` line may have."""


def deployment_findings(config: Section) -> Iterator[Finding]:
    """Yield what is wrong with the numbers of nodes, and with `[slurm]`."""
    if isinstance(config, RLConfig | SFTConfig | TrainerRunConfig):
        yield from _nodes(config)
    elif isinstance(config, InferenceRunConfig):
        yield from _servers(config)
    if isinstance(config, RLConfig | SFTConfig | InferenceRunConfig) and config.slurm is not None:
        yield from _slurm(config, config.slurm)


def fits_directive(text: str) -> bool:
    """Return whether sbatch reads a text in an `#SBATCH` line as it stands, or between double quotes."""
    return text.isprintable() and set(text).isdisjoint("'\"\\")


def _nodes(config: RLConfig | SFTConfig | TrainerRunConfig) -> Iterator[Finding]:
    deployment, cluster = config.deployment, config.cluster
    if not isinstance(deployment, MultiNodeDeployment | MultiNodeTrainDeployment):
        return
    if cluster.num_nodes != num_nodes(config):
        what = f"contradicts the deployment, which has {many(num_nodes(config), 'node')}. Leave it out"
        yield Finding(("cluster.num_nodes", "deployment"), what)
    if isinstance(config, RLConfig) and isinstance(deployment, MultiNodeDeployment):
        yield from _generating(config, deployment)
        num_train = deployment.num_train_nodes
    else:
        num_train = num_nodes(config)
    per_group = deployment.nodes_per_fsdp_group
    model, root = (config.trainer.model, "trainer.") if isinstance(config, RLConfig) else (config.model, "")
    if per_group is not None and num_train % per_group:
        sizes = [str(size) for size in range(1, num_train + 1) if num_train % size == 0]
        what = f"must divide the {many(num_train, 'node')} that train: write {_either(sizes)}"
        yield Finding(("deployment.nodes_per_fsdp_group",), what)
    elif per_group is not None and model.dp_replicate != num_train // per_group:
        what = (
            f"contradicts deployment.nodes_per_fsdp_group = {per_group}, with which {many(num_train, 'node')} have "
            f"{num_train // per_group} copies of the model. Leave one of them out"
        )
        yield Finding((f"{root}model.dp_replicate", "deployment.nodes_per_fsdp_group"), what)


def _generating(config: RLConfig, deployment: MultiNodeDeployment) -> Iterator[Finding]:
    num_infer = deployment.num_infer_nodes
    if lacks_generators(config):
        what = "is 0, and no server generates either: write 1, or orchestrator.client.base_url or inference.registry"
        yield Finding(("deployment.num_infer_nodes",), what)
    if num_infer and num_infer % deployment.num_infer_replicas:
        what = f"must divide deployment.num_infer_nodes ({num_infer})"
        yield Finding(("deployment.num_infer_replicas", "deployment.num_infer_nodes"), what)
    if deployment.orchestrator_on_inference and not num_infer:
        what = "has no node that generates to run on: deployment.num_infer_nodes is 0. Leave it out"
        yield Finding(("deployment.orchestrator_on_inference", "deployment.num_infer_nodes"), what)


def _servers(config: InferenceRunConfig) -> Iterator[Finding]:
    deployment, parallel = config.deployment, config.parallel
    what = (
        "starts servers on several nodes, which needs a [slurm] table. Without SLURM, start `ductile inference` on "
        "each node, and `ductile router` before them"
    )
    if isinstance(deployment, DisaggregatedServing):
        names = [name for name in ("num_prefill_nodes", "num_decode_nodes") if getattr(deployment, name) > 1]
        if names and config.slurm is None:
            yield Finding((f"deployment.{names[0]}", "slurm"), what)
    elif isinstance(deployment, MultiNodeServing) and config.slurm is None:
        yield Finding(("deployment.type", "slurm"), what)
    if on_nodes := servers_on_nodes(config):
        yield from _behind_one_router(config, on_nodes)
    if not isinstance(deployment, MultiNodeServing):
        return
    needed = parallel.tp * (parallel.dp or 1)
    if needed > deployment.gpus_per_node:
        what = f"must be at least {needed}: a server's tp x dp slots are on one node"
        yield Finding(("deployment.gpus_per_node", "parallel.tp", "parallel.dp"), what)
    if config.server.port == 0:
        yield Finding(("server.port",), "must be a port, the same on each node, as the job tells their addresses")
    if config.bench is not None:
        yield Finding(("bench", "deployment.type"), 'measures one server: write deployment.type = "single_node"')


def _behind_one_router(config: InferenceRunConfig, on_nodes: Sequence[NodeServers]) -> Iterator[Finding]:
    deployment, port_of = config.deployment, {"any": "backend_port"}
    for group in on_nodes:
        port_key = port_of.get(group.role, f"{group.role}_port")
        if group.port == 0:
            yield Finding(
                (f"deployment.{port_key}",),
                "must be a port, the same on each node: the router is told the servers' addresses",
            )
        if group.role == "any":
            continue
        key = f"num_{group.role}_replicas"
        if key in deployment.model_fields_set and getattr(deployment, key) != group.num_nodes * group.each:
            what = (
                f"must be a multiple of deployment.num_{group.role}_nodes ({group.num_nodes}): a server is on one "
                f"device, and nodes have equally many"
            )
            yield Finding((f"deployment.{key}", f"deployment.num_{group.role}_nodes"), what)
        if config.cluster.device != "cpu" and group.each > deployment.gpus_per_node:
            what = f"must be at least {group.each}: each server of a node has a device of its own"
            yield Finding(("deployment.gpus_per_node", f"deployment.{key}"), what)
    if isinstance(deployment, DisaggregatedServing) and config.server.port == 0:
        yield Finding(("server.port",), "must be a port, as the job tells the router's address")
    if isinstance(deployment, DisaggregatedServing) and config.bench is not None:
        yield Finding(("bench", "deployment.type"), 'measures one server: write deployment.type = "single_node"')


def _slurm(config: RLConfig | SFTConfig | InferenceRunConfig, slurm: SlurmConfig) -> Iterator[Finding]:
    for name in DIRECTIVES:
        text = getattr(slurm, name)
        if text is not None and not fits_directive(text):
            what = f"has a character that sbatch takes for its own: leave out {SBATCH_S_OWN}"
            yield Finding((f"slurm.{name}",), what)
    folder = str(Path(config.output_dir).absolute())
    if not fits_directive(folder):
        what = (
            f"is the folder of the job's log, {folder!r}, which has a character that sbatch takes for its own: write a "
            f"path without {SBATCH_S_OWN}"
        )
        yield Finding(("output_dir", "slurm"), what)
    if not isinstance(config, InferenceRunConfig) and config.ray is not None and config.ray.address is not None:
        what = (
            "names a Ray cluster that is there, and [slurm] has the command run as a job. Leave out [slurm] to run on "
            "that cluster, or ray.address to have the job start a Ray cluster on its own nodes"
        )
        yield Finding(("ray.address", "slurm"), what)
    if slurm.time is not None and not TIME.fullmatch(slurm.time):
        what = 'is no time limit: write minutes ("90"), "hours:minutes:seconds" or "days-hours:minutes:seconds"'
        yield Finding(("slurm.time",), what)
    if slurm.template_path is not None and not Path(slurm.template_path).is_file():
        yield Finding(("slurm.template_path",), "is not there: write the path of a Jinja2 template")
    for key in _secrets(config):
        what = (
            f"would have to be written into the job's files. Write {key}_var, which names an environment variable; "
            "sbatch hands the environment on"
        )
        yield Finding((key, "slurm"), what)
    project = Path(slurm.project_dir)
    if not project.is_dir():
        yield Finding(("slurm.project_dir",), "is no folder: write the one that the job is to start in")
    elif project.resolve() != Path.cwd():
        for key, file in named_files(config):
            if not file.is_absolute() and file.exists() and not (project / file).exists():
                what = (
                    f"is a relative path, and the job starts in slurm.project_dir ({project}), which has none of that "
                    "name: write an absolute one"
                )
                yield Finding((key, "slurm.project_dir"), what)


def _secrets(section: Section, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield each key whose value is a secret, and given."""
    for name in type(section).model_fields:
        value = cast(object, getattr(section, name))
        if isinstance(value, Section):
            yield from _secrets(value, (*path, name))
        elif name in SECRETS and value is not None:
            yield ".".join((*path, name))


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
