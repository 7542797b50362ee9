"""[cluster], [deployment], [slurm]: which slots there are and what each does."""

from typing import Annotated, Literal

from pydantic import Field

from ductile.config.schema.section import ImportPath, NotBuilt, Section

_OF_GROUPS = NotBuilt("settings of their own for the nodes of a group")


class NodeGroup(Section):
    """Nodes with a label, for `cluster.component_placement`."""

    label: str
    node_ranks: str | int | list[str | int]
    """Numbers of the nodes: `0-7`, `8`, `[0, "2-3"]`."""
    env_configs: Annotated[list[dict[str, object]] | None, _OF_GROUPS] = None
    hardware: Annotated[dict[str, object] | None, _OF_GROUPS] = None
    ignore_hardware: Annotated[bool, _OF_GROUPS] = False


class GroupPlacement(Section):
    """An entry of `cluster.component_placement` that counts the slots of node groups alone."""

    node_group: str | list[str]
    """Label of the group; several, as a list or with commas, are counted through in this order. `cluster` is all
    nodes."""
    placement: str | int | list[str | int] = "all"
    """Slots, from 0 at the first one of the group: `0-3`, `all`."""


class ClusterConfig(Section):
    num_nodes: int = Field(default=1, ge=1)
    """Machines that the run begins with. With more than one it waits for `start_timeout_s` until `ductile join` has
    been run on the others (docs/cluster.md). Slots are numbered node by node."""
    max_nodes: int | None = Field(default=None, ge=1)
    """Most machines that the run may come to have: more join it while it is at work. Absent: `num_nodes`."""
    head_is_node: bool = True
    """The machine of the command is node 0, and has slots. False where it only has the orchestrator, as on a login
    node, or where each node of a job runs `ductile join`, its own too."""
    interface: str | None = None
    """Name of this machine's network interface, or its address, that other nodes reach: our sockets and torch's are
    there alone. Absent: loopback for one node, else the interface that leads to other machines."""
    port: int = Field(default=0, ge=0, le=65535)
    """TCP port at which nodes join. 0: one that is free; `cluster.json` in the run's folder says which."""
    component_placement: dict[str, str | int | list[str | int] | GroupPlacement] | None = None
    """Roles to slots: `{actor: 0, rollout: 1-2, inference: 3}`. Lists, ranges, `all`, comma-joined roles. The roles'
    names are `actor` (train), `rollout` (generate), `inference` (score). With `node_groups` also
    `{actor: {node_group: a, placement: 0-7}}`."""
    node_groups: list[NodeGroup] | None = None
    """Labels for nodes: `[{label: a, node_ranks: 0-1}, {label: b, node_ranks: 2}]`."""
    auto_scheduler: bool = False
    """Slots change roles while the run is at work, as `policy` decides."""
    use_pre_process_policy: bool | None = None
    """Train slots may generate at a step's start, while training waits: `model` does so where it pays (false forbids
    it), `rules` do so until half of the step's rollouts are finished (only if true)."""
    use_wait_before_last_iter_policy: bool | None = None
    """The last optimizer step of a batch may wait for generation and scoring, to be taken on all slots: `model` does so
    where it pays (false forbids it), `rules` always do (only if true)."""
    share_devices: bool | None = None
    """A device has memory for the trainer's state and a generator at once. Absent: a slot on a CPU has; a GPU
    where `component_placement` has `actor` and `rollout` share slots."""
    enable_offload: bool | None = None
    """Train slots may lend devices that have no memory for two roles to generators, with the trainer's state in
    host memory meanwhile; with `auto_scheduler`. Absent: they may. False: a slot that is to generate leaves the trainer
    for that, which is resized."""
    policy: ImportPath | None = None
    """Who decides: "model" (the default with `auto_scheduler`: moves what pays, as measured), "rules" (rules of
    thumb), "static" (no slot changes roles), "in_turns" (all generate, then all train: for `actor,rollout: all`), or
    your own class as `package.module.Class` or `file.py:Class`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    slots_per_device: int = Field(default=1, ge=1)
    """Slots on each GPU: with 2, slots 0 and 1 are on the first one. They share its memory and its time, so it is for
    trying out on few GPUs what is meant for more. Refused beside `device = "cpu"`; not used where "auto" finds no
    GPU."""
    device_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of a device, of the smallest where they differ. With it "auto" sizes of `trainer.model` are such that a
    slot has room, by a prediction, the trainer is given no number of slots on which it would have too little, and a
    config is refused that has room in no layout. Absent: memory is not looked at."""
    cpu_slot_fraction: float | None = Field(default=None, gt=0, le=1)
    """Cap each slot's process to this share of one core (cgroup v1 or v2 `cpu` controller; needs permission)."""
    heartbeat_timeout_s: float = Field(default=30.0, ge=2)
    """A slot whose side thread is silent for longer counts as lost. It says something every second."""
    command_timeout_s: float = Field(default=600.0, gt=0)
    """The longest that one command to a slot may take. Of training that is one micro-batch; with `pp` it is a whole
    message of them, which takes as long as five to seven on one slot with all layers."""
    progress_timeout_s: float | None = Field(default=None, gt=0)
    """The longest that a generator with requests may go without a new token; then it is killed, and counts as lost.
    Absent: as `command_timeout_s`."""
    group_timeout_s: float | None = Field(default=None, gt=0)
    """The longest that the trainer waits for a prompt group to train on: at least as long as a whole group takes to
    generate and to grade, and longer than `command_timeout_s` and `progress_timeout_s`, after which a generator that
    hangs is replaced. Absent: twice the longer of these."""
    patience_timeout_s: float | None = Field(default=None, gt=0)
    """The longest that requests wait for a generator, or samples for a scorer, when there is none; that one that leaves
    waits for its last work; and that a policy may hold training. Absent: as `command_timeout_s`."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """The longest that slots, or one that is started again, may take to say that they are there; and before that, that
    `num_nodes` machines may take to join."""
    max_restarts: int = Field(default=5, ge=0)
    """How often in a row a lost generator or scorer is started again before its slot is given back: at once first, then
    after 1 s, 2 s, 4 s and so on. 0: it is given back at once."""


class RayConfig(Section):
    """Ray as the launcher: the nodes of the run are those of a Ray cluster (docs/ray.md)."""

    address: str | None = None
    """host:port of the Ray cluster's head, or "auto": the cluster that this machine is part of. Absent: one is started
    on this machine, for the run alone."""
    num_nodes: int | None = Field(default=None, ge=1)
    """Shared: `cluster.num_nodes`."""
    num_cpus: float = Field(default=1.0, ge=0)
    """CPUs of which the agent of a node makes sure, as `num_cpus` of a Ray actor: Ray gives them to nobody else. GPUs
    are `deployment.gpus_per_node`."""
    resources: dict[str, float] = {}
    """The same for custom resources: `{worker_node = 1}` takes only nodes that were started with it."""


class SingleNodeDeployment(Section):
    type: Literal["single_node"] = "single_node"
    gpus_per_node: int = Field(default=8, ge=1)
    num_train_gpus: int = Field(default=1, ge=1)
    num_infer_gpus: int = Field(default=1, ge=0)
    """Generate slots come first, train slots next. `cluster.component_placement` says it slot by slot instead. 0 where
    only servers generate (`orchestrator.client.base_url`, `inference.registry`)."""


_MULTI_NODE = NotBuilt("multi-node deployments", instead='Write "single_node".')


class MultiNodeDeployment(Section):
    type: Annotated[Literal["multi_node"], _MULTI_NODE]
    gpus_per_node: int = Field(default=8, ge=1)
    num_train_nodes: int = Field(default=1, ge=1)
    num_infer_nodes: int = Field(default=1, ge=0)
    num_infer_replicas: int = Field(default=1, ge=1)
    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    num_nodes: int | None = Field(default=None, ge=1)
    orchestrator_on_inference: bool = False


DeploymentConfig = Annotated[SingleNodeDeployment | MultiNodeDeployment, Field(discriminator="type")]


class TrainDeployment(Section):
    type: Literal["single_node"] = "single_node"
    num_gpus: int = Field(default=1, ge=1)
    """Train slots."""
    gpus_per_node: int = Field(default=8, ge=1)


class MultiNodeTrainDeployment(Section):
    type: Annotated[Literal["multi_node"], _MULTI_NODE]
    num_nodes: int = Field(default=2, ge=1)
    """Also written `num_train_nodes`."""
    num_infer_nodes: int = Field(default=0, ge=0)
    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    gpus_per_node: int = Field(default=8, ge=1)


TrainDeploymentConfig = Annotated[TrainDeployment | MultiNodeTrainDeployment, Field(discriminator="type")]


class VllmRouter(Section):
    type: Literal["vllm-router"] = "vllm-router"
    port: int = Field(default=8000, ge=0, le=65535)
    policy: str = "consistent_hash"


class LlmdRouter(Section):
    type: Literal["llm-d"] = "llm-d"
    port: int = Field(default=8000, ge=0, le=65535)
    scorers: dict[str, float] = {}
    prefill_scorer_overrides: dict[str, float] = {}
    decode_scorer_overrides: dict[str, float] = {}
    non_cached_tokens: int = Field(default=16, ge=0)
    decode_sidecar_port: int = Field(default=8300, ge=0, le=65535)


RouterConfig = Annotated[VllmRouter | LlmdRouter, Field(discriminator="type")]


class SingleNodeServing(Section):
    type: Literal["single_node"] = "single_node"
    gpus_per_node: int = Field(default=8, ge=1)
    backend_port: Annotated[int, NotBuilt("a router before several servers")] = Field(default=8100, ge=0, le=65535)
    router: Annotated[RouterConfig | None, NotBuilt("a router before several servers")] = None


class MultiNodeServing(Section):
    type: Annotated[Literal["multi_node"], _MULTI_NODE]
    num_nodes: int = Field(default=2, ge=1)
    gpus_per_node: int = Field(default=8, ge=1)
    backend_port: int = Field(default=8100, ge=0, le=65535)
    router: RouterConfig | None = None


class DisaggregatedServing(Section):
    type: Annotated[Literal["disaggregated"], NotBuilt("prefill and decode apart", instead='Write "single_node".')]
    gpus_per_node: int = Field(default=8, ge=1)
    num_prefill_nodes: int = Field(default=1, ge=1)
    num_decode_nodes: int = Field(default=1, ge=1)
    num_prefill_replicas: int = Field(default=1, ge=1)
    num_decode_replicas: int = Field(default=1, ge=1)
    prefill_port: int = Field(default=8100, ge=0, le=65535)
    decode_port: int = Field(default=8200, ge=0, le=65535)
    prefill_env_overrides: dict[str, str] = {}
    decode_env_overrides: dict[str, str] = {}
    prefill_vllm_overrides: dict[str, object] = {}
    decode_vllm_overrides: dict[str, object] = {}
    router: RouterConfig | None = None


ServingDeploymentConfig = Annotated[
    SingleNodeServing | MultiNodeServing | DisaggregatedServing, Field(discriminator="type")
]


class SlurmConfig(Section):
    job_name: str = "ductile"
    project_dir: str = "."
    template_path: str | None = None
    partition: str = "cluster"
    nodelist: str | None = None
    exclude: str | None = None
    account: str | None = None
    time: str | None = None
    pre_run_command: str | None = None
    cleanup_grace_period: int = Field(default=3600, ge=0)
    shared_fs: bool = True
