"""[cluster], [deployment], [slurm]: which slots there are and what each does."""

from typing import Annotated, Literal

from pydantic import Field

from ductile.config.section import NotBuilt, Section


class ClusterConfig(Section):
    num_nodes: Annotated[int, NotBuilt("several nodes")] = Field(default=1, ge=1)
    component_placement: dict[str, str | int] | None = None
    """Roles to slots: `{actor: 0, rollout: 1-2, inference: 3}`. Lists, ranges, `all`, comma-joined roles. The roles'
    names are `actor` (train), `rollout` (generate), `inference` (score)."""
    auto_scheduler: Annotated[bool, NotBuilt("dynamic scheduling")] = False
    use_pre_process_policy: Annotated[bool, NotBuilt("dynamic scheduling")] = False
    use_wait_before_last_iter_policy: Annotated[bool, NotBuilt("dynamic scheduling")] = False
    policy: Annotated[str, NotBuilt("dynamic scheduling")] = "static"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_slot_fraction: float | None = Field(default=None, gt=0, le=1)
    """Cap each slot's process to this share of one core (cgroup v1 or v2 `cpu` controller; needs permission)."""
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    """A slot whose side thread is silent for longer counts as lost."""
    command_timeout_s: float = Field(default=600.0, gt=0)
    """The longest that one command to a slot may take."""
    start_timeout_s: float = Field(default=120.0, gt=0)


class SingleNodeDeployment(Section):
    type: Literal["single_node"] = "single_node"
    gpus_per_node: int = Field(default=8, ge=1)
    num_train_gpus: int = Field(default=1, ge=1)
    num_infer_gpus: int = Field(default=1, ge=1)
    """Generate slots come first, train slots next. `cluster.component_placement` says it slot by slot instead."""


class MultiNodeDeployment(Section):
    type: Literal["multi_node"]
    gpus_per_node: int = Field(default=8, ge=1)
    num_train_nodes: int = Field(default=1, ge=1)
    num_infer_nodes: int = Field(default=1, ge=0)
    nodes_per_fsdp_group: int | None = Field(default=None, ge=1)
    num_nodes: int | None = Field(default=None, ge=1)


DeploymentConfig = Annotated[SingleNodeDeployment | MultiNodeDeployment, Field(discriminator="type")]


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
