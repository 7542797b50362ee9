"""[cluster], [deployment], [slurm]: which slots there are and what each does."""

from typing import Annotated, Literal

from pydantic import Field

from ductile.config.schema.section import FilePath, ImportPath, NotBuilt, Section

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
    drain_deadline_s: float = Field(default=30.0, gt=0)
    """Seconds from SIGTERM to a slot's process until the slot is expected to be gone: it is emptied meanwhile, as by
    `ductile drain`. Kubernetes and SLURM send SIGKILL after 30."""
    max_restarts: int = Field(default=5, ge=0)
    """How often in a row a lost generator or scorer is started again before its slot is given back: at once first, then
    after 1 s, 2 s, 4 s and so on. 0: it is given back at once. Also how often a trainer that loses slots goes back to
    the same checkpoint, on the slots that are left. 0: the run ends."""


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


class MultiNodeDeployment(Section):
    """Whole nodes, those that generate first. Slots are numbered node by node."""

    type: Literal["multi_node"]
    gpus_per_node: int = Field(default=8, ge=1)
    num_train_nodes: int = Field(ge=1)
    num_infer_nodes: int = Field(ge=0)
    """0 where only servers generate (`orchestrator.client.base_url`, `inference.registry`)."""
    num_infer_replicas: int = Field(default=1, ge=1)
    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    """Train nodes over which one copy of the model is sharded; each further group of as many has another copy
    (`trainer.model.dp_replicate`). Absent: one copy over all."""
    orchestrator_on_inference: bool = False
    """The orchestrator, which needs no GPU, runs beside the generators of the first node that generates. False: beside
    the trainer, on the first node that trains. It is the node of a SLURM job that runs the script."""


DeploymentConfig = Annotated[SingleNodeDeployment | MultiNodeDeployment, Field(discriminator="type")]


class TrainDeployment(Section):
    type: Literal["single_node"] = "single_node"
    num_gpus: int = Field(default=1, ge=1)
    """Train slots."""
    gpus_per_node: int = Field(default=8, ge=1)


class MultiNodeTrainDeployment(Section):
    """Whole nodes, all of which train."""

    type: Literal["multi_node"]
    num_nodes: int = Field(default=2, ge=1)
    """Also written `num_train_nodes`."""
    num_infer_nodes: Annotated[int, NotBuilt("evaluation on nodes of its own")] = Field(default=0, ge=0)
    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    """Nodes over which one copy of the model is sharded; each further group of as many has another copy
    (`model.dp_replicate`). Absent: one copy over all."""
    gpus_per_node: int = Field(default=8, ge=1)


TrainDeploymentConfig = Annotated[TrainDeployment | MultiNodeTrainDeployment, Field(discriminator="type")]


RouterPolicy = Literal["consistent_hash", "least_tokens", "round_robin"]
"""How a router chooses: see `VllmRouter.policy`."""


class VllmRouter(Section):
    """Our own router, by the keys of vLLM's."""

    type: Literal["vllm-router"] = "vllm-router"
    port: int | None = Field(default=None, ge=0, le=65535)
    """Default: `server.port`."""
    policy: RouterPolicy = "consistent_hash"
    """Which server gets a request. consistent_hash: a session stays at one, and what has no session goes where the
    fewest tokens are left to sample; least_tokens: so do sessions, unless the server that has theirs has little more
    to do; round_robin: in turn. A session is `X-Session-ID`, `prompt_cache_key` or `user` of a request."""


_SCORERS = NotBuilt("llm-d's scorers", instead="It routes by the fewest tokens that are left to sample.")


class LlmdRouter(Section):
    """Our own router, by the keys of llm-d's. It routes as `vllm-router` does with `policy = "least_tokens"`."""

    type: Literal["llm-d"] = "llm-d"
    port: int | None = Field(default=None, ge=0, le=65535)
    """Default: `server.port`."""
    scorers: Annotated[dict[str, float], _SCORERS] = {}
    prefill_scorer_overrides: Annotated[dict[str, float], _SCORERS] = {}
    decode_scorer_overrides: Annotated[dict[str, float], _SCORERS] = {}
    non_cached_tokens: int = Field(default=16, ge=0)
    """A prompt of fewer tokens, estimated by its length, is not computed apart."""
    decode_sidecar_port: Annotated[int, NotBuilt("llm-d's sidecars")] = Field(default=8300, ge=0, le=65535)


RouterConfig = Annotated[VllmRouter | LlmdRouter, Field(discriminator="type")]


class SingleNodeServing(Section):
    type: Literal["single_node"] = "single_node"
    gpus_per_node: int = Field(default=8, ge=1)
    backend_port: int = Field(default=8100, ge=0, le=65535)
    """Port of the first server behind the router; the others have those after it. 0: free ports."""
    router: RouterConfig | None = None
    """A router at `server.port`, before `parallel.dp` servers. With several servers there is one in any case."""


class MultiNodeServing(Section):
    """A server on each node, which knows of no other. For SLURM."""

    type: Literal["multi_node"]
    num_nodes: int = Field(default=2, ge=1)
    gpus_per_node: int = Field(default=8, ge=1)
    backend_port: Annotated[int, NotBuilt("a router before several servers")] = Field(default=8100, ge=0, le=65535)
    router: Annotated[RouterConfig | None, NotBuilt("a router before several servers")] = None


_MANY = NotBuilt("servers on several nodes", instead="All servers of `ductile inference` are on this machine.")


class DisaggregatedServing(Section):
    """Prefill and decode apart: some servers compute prompts, others take their keys and values over and go on."""

    type: Literal["disaggregated"]
    gpus_per_node: int = Field(default=8, ge=1)
    num_prefill_nodes: Annotated[int, _MANY] = Field(default=1, ge=1)
    num_decode_nodes: Annotated[int, _MANY] = Field(default=1, ge=1)
    num_prefill_replicas: int = Field(default=1, ge=1)
    """Servers that compute prompts, each on a device of its own."""
    num_decode_replicas: int = Field(default=1, ge=1)
    """Servers that go on with them, each on a device of its own."""
    prefill_port: int = Field(default=8100, ge=0, le=65535)
    """Port of the first server that computes prompts; the others have those after it. 0: free ports."""
    decode_port: int = Field(default=8200, ge=0, le=65535)
    """Port of the first server that goes on with them; the others have those after it. 0: free ports."""
    prefill_env_overrides: dict[str, str] = {}
    """Variables of the environment of servers that compute prompts."""
    decode_env_overrides: dict[str, str] = {}
    """Variables of the environment of servers that go on with them."""
    prefill_vllm_overrides: dict[str, object] = {}
    """Keys of `inference` that servers which compute prompts have otherwise, such as
    `{max_num_batched_tokens = 4096}`."""
    decode_vllm_overrides: dict[str, object] = {}
    """Keys of `inference` that servers which go on with them have otherwise."""
    router: RouterConfig | None = None
    """The router at `server.port`; there is one in any case."""


ServingDeploymentConfig = Annotated[
    SingleNodeServing | MultiNodeServing | DisaggregatedServing, Field(discriminator="type")
]


class SlurmConfig(Section):
    """A job of SLURM: the command writes a script for `sbatch`, submits it, and runs there (docs/slurm.md)."""

    job_name: str = Field(default="ductile", min_length=1)
    project_dir: FilePath = "."
    """Folder that the job starts in: relative paths of the config are looked up there. A `.env` in it is read."""
    template_path: FilePath | None = None
    """Jinja2 template of the script, instead of the one that comes with ductile."""
    partition: str | None = "cluster"
    """"None": the partition that SLURM takes by itself."""
    nodelist: str | None = None
    """Nodes that the job must have: "node[1-4]"."""
    exclude: str | None = None
    """Nodes that the job must not have."""
    account: str | None = None
    time: str | None = None
    """Time limit, as `sbatch --time` reads it: "3-12:00:00". Absent: the partition's."""
    pre_run_command: str | None = None
    """Lines of bash that the job runs first, on its first node: `module load cuda`. All nodes have what they export."""
    cleanup_grace_period: int = Field(default=3600, ge=0)
    """The longest, in seconds, that processes of the job are waited for once the run has ended; then they are ended."""
    requeue: bool = True
    """A job that is preempted, or whose time is over, is queued again, and goes on from its last checkpoint."""
    notice_s: int = Field(default=120, ge=1)
    """Seconds before the time limit at which the run is asked to save and to stop (`sbatch --signal`)."""
    shared_fs: Annotated[bool, NotBuilt("jobs without a folder that all nodes share")] = True
