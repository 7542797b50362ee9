"""What a SLURM job asks for and runs: it follows from the config alone.

    job = job_of("rl", config)
    job.num_nodes, job.gpus_per_node, job.first_rank      as the script's template has them
    print("\\n".join(job.table()))                         which node has which slots, and what they do

Nodes have ranks: those that generate come first, as their slots do. The first node of a SLURM job runs its script, and
with it the orchestrator; so that it is the node that `deployment.orchestrator_on_inference` asks for, ranks are counted
from there on, and round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from ductile.config.checks.asked_placement import num_nodes, placement_of, slots_per_node_of
from ductile.config.checks.serving_plan import NodeServers, servers_on_nodes
from ductile.config.schema.cluster import MultiNodeDeployment, SlurmConfig
from ductile.config.schema.run import InferenceRunConfig, RLConfig, SFTConfig
from ductile.core.instances.node_devices import DeviceUse, device_uses, visible_devices
from ductile.core.instances.placement import many, slots_of
from ductile.core.layout.choice.layout_text import compact

SubmittedConfig = RLConfig | SFTConfig | InferenceRunConfig
"""Configs of the commands that a job can run."""
CPUS_PER_GPU = 4
"""Cores that a job asks for with each GPU, where it does not have its nodes for itself."""


@dataclass(frozen=True, slots=True)
class Job:
    command: str
    kind: Literal["single_node", "multi_node", "ray", "servers", "routed_servers"]
    """Which template: everything on one node; a run over several, whose other nodes join it; Ray on each node, whose
    agents join it; a server on each node; servers on all nodes behind one router."""
    num_nodes: int
    gpus_per_node: int
    """GPUs to ask for on each node; 0 where slots are on CPUs."""
    has_whole_nodes: bool
    """Whether nobody else is to be on its nodes."""
    first_rank: int
    """Rank of the node that runs the script, and the orchestrator."""
    uses: Sequence[DeviceUse]
    behind_router: Sequence[NodeServers] = ()
    """Servers of all nodes, where one router is before them."""

    @property
    def cpus_per_task(self) -> int:
        """Return the cores to ask for on a node that is shared with others; 0: all that it has."""
        return 0 if self.has_whole_nodes else CPUS_PER_GPU * self.gpus_per_node

    def table(self) -> Iterator[str]:
        """Yield a line for each role of each group of nodes that do the same."""
        if self.behind_router:
            yield from self._routed()
            return
        by_node = [(node, tuple(uses)) for node, uses in groupby(self.uses, key=lambda use: use.node)]
        for _, group in groupby(by_node, key=lambda each: [(use.device, use.roles) for use in each[1]]):
            nodes = list(group)
            name = f"node{'' if len(nodes) == 1 else 's'} {compact([node for node, _ in nodes])}"
            for roles in dict.fromkeys(use.roles for use in nodes[0][1]):
                yield f"{name:<14}{self._line(roles, [use for _, uses in nodes for use in uses if use.roles == roles])}"
        if self.kind in ("multi_node", "ray"):
            yield f"{'orchestrator':<14}on node {self.first_rank}, the first of the job's"

    def _routed(self) -> Iterator[str]:
        first = 0
        for group in self.behind_router:
            does = {"any": "", "prefill": ", which computes prompts", "decode": ", which goes on with them"}[group.role]
            does = does.replace("computes", "compute").replace("goes", "go") if group.each > 1 else does
            name = f"node{'' if group.num_nodes == 1 else 's'} {compact(range(first, first + group.num_nodes))}"
            on = f" on GPU{'' if group.each == 1 else 's'} {compact(range(group.each))}" if self.gpus_per_node else ""
            yield f"{name:<14}{many(group.each, 'server')} a node{on}, from port {group.port} on{does}"
            first += group.num_nodes
        yield f"{'router':<14}on node 0, the first of the job's"

    def _line(self, roles: Sequence[str], uses: Sequence[DeviceUse]) -> str:
        does = " and ".join(roles)
        devices = list(dict.fromkeys(use.device for use in uses))
        on = f" on GPU{'' if len(devices) == 1 else 's'} {_names(devices)}" if self.gpus_per_node else ""
        if self.kind == "servers":
            return f"{many(len(devices), 'server')} a node{on}"
        slots = slots_of([slot for use in uses for slot in use.slots])
        return f"{slots} {does}{'s' if slots.startswith('slot ') else ''}{on}"


def job_of(command: str, config: SubmittedConfig) -> Job:
    """Return the job that runs a config that has been found good."""
    deployment, on_gpu = config.deployment, config.cluster.device != "cpu"
    placement, each = placement_of(config), config.cluster.slots_per_device
    nodes, is_whole = num_nodes(config), True
    by_ray = not isinstance(config, InferenceRunConfig) and config.ray is not None
    if isinstance(config, InferenceRunConfig):
        kind = "routed_servers" if servers_on_nodes(config) else "servers"
        num_gpus = deployment.gpus_per_node if nodes > 1 else _num_servers(config)
        devices = visible_devices(_num_servers(config))
        uses = [DeviceUse(node, device, (), ("generate",)) for node in range(nodes) for device in devices]
    else:
        kind = "ray" if by_ray else "single_node" if nodes == 1 else "multi_node"
        # An agent on Ray reserves all of these.
        num_gpus = deployment.gpus_per_node if nodes > 1 or by_ray else -(-placement.num_slots // each)
        per_node = slots_per_node_of(config, placement)
        devices = visible_devices(per_node.on_gpus // each if on_gpu or nodes == 1 else per_node.on_cpus)
        uses = device_uses(placement, devices, nodes, each if on_gpu else 1)
    if on_gpu and nodes == 1:
        is_whole = num_gpus >= deployment.gpus_per_node
    first_rank = 0  # on Ray, too, where the machine of the command comes first
    if isinstance(deployment, MultiNodeDeployment) and not deployment.orchestrator_on_inference and not by_ray:
        first_rank = deployment.num_infer_nodes
    behind = servers_on_nodes(config) if isinstance(config, InferenceRunConfig) else ()
    return Job(command, kind, nodes, num_gpus if on_gpu else 0, is_whole, first_rank, uses, behind)


def job_report(command: str, config: SubmittedConfig) -> str:
    """Return what `ductile check` says of the job, after all else."""
    assert config.slurm is not None
    job = job_of(command, config)
    return "\n".join(
        ["", f"  It is submitted to SLURM, as {in_words(job, config.slurm)}:", *(f"    {line}" for line in job.table())]
    )


def _num_servers(config: InferenceRunConfig) -> int:
    """Return the servers of a node, each of which has a GPU of its own."""
    return config.parallel.dp or 1


def in_words(job: Job, slurm: SlurmConfig) -> str:
    """Return what the job asks for: "my-run: 3 nodes of 8 GPUs, partition cluster"."""
    of = f" of {many(job.gpus_per_node, 'GPU')}" if job.gpus_per_node else ", without GPUs"
    limits = [f"partition {slurm.partition}"] if slurm.partition else []
    limits += [f"at most {slurm.time}"] if slurm.time else []
    return ", ".join([f"{slurm.job_name}: {many(job.num_nodes, 'node')}{of}", *limits])


def _names(devices: Sequence[str]) -> str:
    return compact(list(map(int, devices))) if all(map(str.isdecimal, devices)) else ", ".join(devices)
