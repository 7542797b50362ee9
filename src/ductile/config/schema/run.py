"""The roots: one class a command. `RLConfig` is the tree of which the others are branches."""

from typing import Annotated, Literal

from pydantic import Field

from ductile.config.schema.bench import BenchConfig, InferenceBenchConfig
from ductile.config.schema.cluster import (
    ClusterConfig,
    DeploymentConfig,
    RayConfig,
    RouterPolicy,
    ServingDeploymentConfig,
    SingleNodeDeployment,
    SingleNodeServing,
    SlurmConfig,
    TrainDeployment,
    TrainDeploymentConfig,
)
from ductile.config.schema.fleet import HealthCheckConfig
from ductile.config.schema.http_server import HttpServerConfig
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.model import ChatModelConfig, SFTModelConfig
from ductile.config.schema.orchestrator import OrchestratorConfig
from ductile.config.schema.section import FilePath, NotBuilt, Section
from ductile.config.schema.trace import TraceConfig
from ductile.config.schema.trainer import (
    AdamWConfig,
    CheckpointConfig,
    ConstantSchedule,
    OptimConfig,
    ResizeConfig,
    SchedulerConfig,
    TrainerConfig,
)


class LogConfig(Section):
    level: Annotated[Literal["debug", "info", "warning", "error"], NotBuilt("choosing how much is logged")] = "info"
    json_logging: Annotated[bool, NotBuilt("JSON logs")] = False
    ranks_filter: Annotated[list[int], NotBuilt("choosing whose log lines are shown")] = [0]


class TokenizerConfig(Section):
    """The tokenizer is the model folder's own."""

    name: Annotated[str | None, NotBuilt("a tokenizer from elsewhere than the model's folder")] = None
    trust_remote_code: Annotated[bool, NotBuilt("running code from model folders")] = False


class ScorerConfig(Section):
    """The scorers. In all else they are as the trainer: they load its model, and compute in its precision."""

    tp: int = Field(default=1, ge=1)
    """Slots over which each weight matrix of a scorer is cut, that of the reference too. Score slots are taken so many
    at a time, in the order of their numbers; their number must be a multiple."""


class WandbConfig(Section):
    """A table for W&B; keys that are left out are as its own environment variables say."""

    project: str | None = None
    """Default: `WANDB_PROJECT` of the environment, else "ductile"."""
    name: str | None = None
    """Default: `WANDB_NAME`, else a name that W&B makes up."""
    offline: bool | None = None
    """Write to the run's folder only; `wandb sync` sends it later. Default: as `WANDB_MODE` says, else false."""


class TensorboardConfig(Section):
    dir: FilePath | None = None
    """Default: `<output_dir>/tensorboard`."""


class RLConfig(Section):
    """`ductile rl`: the whole RL loop."""

    model: ChatModelConfig = ChatModelConfig()
    """Shared: goes to trainer, inference and orchestrator."""
    seq_len: int | None = Field(default=None, ge=2)
    """Shared: `trainer.model.seq_len` and `inference.model.max_model_len`."""
    max_steps: int | None = Field(default=None, ge=1)
    """Shared: batches to train on. Default: one pass over the task's examples."""
    output_dir: FilePath = "runs/rl"
    """Everything the run writes. `runs/<name>` is the convention."""
    clean: bool = False
    """Delete the run in `output_dir` once the new one has told of its first step. Also written `clean_output_dir`."""
    resume: bool = False
    """Go on from the latest complete checkpoint in `output_dir` (`ckpt.resume_step = -1`)."""
    seed: int = 0
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    scorer: ScorerConfig = ScorerConfig()
    cluster: ClusterConfig = ClusterConfig()
    deployment: DeploymentConfig = SingleNodeDeployment()
    slurm: SlurmConfig | None = None
    ray: RayConfig | None = None
    ckpt: CheckpointConfig = CheckpointConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    log: LogConfig = LogConfig()
    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
    bench: BenchConfig | None = None
    """A few steps and a table of figures; nothing in `output_dir` is touched."""
    trace: TraceConfig | None = None
    """Write down what slots do in a few steps, operator by operator (docs/bench.md)."""
    dry_run: bool = False
    """Write the resolved config to `output_dir` and exit."""


_STACK = NotBuilt("micro-batches of padded rows", only=("stack",), instead="Documents are packed one after the other.")
_MICRO = NotBuilt("a fixed number of samples in a micro-batch", instead="`seq_len` says how many tokens it holds.")


class JsonlData(Section):
    type: Literal["sft"] = "sft"
    path: FilePath | None = None
    """JSONL: a conversation a line, in OpenAI's, TRL's, ShareGPT's or Alpaca's form (docs/sft.md)."""
    batch_size: int = Field(default=128, ge=1)
    """Samples an optimizer step."""
    seq_len: int = Field(default=128, ge=2)
    """Tokens of a micro-batch; longer samples are cut, and counted, as are those beyond the model's
    max_position_embeddings."""
    pack_function: Annotated[Literal["cat", "stack"], _STACK] = "cat"
    micro_batch_size: Annotated[int, _MICRO] = Field(default=1, ge=1)
    shuffle: bool = True
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are trained: the assistant's turns (or the completion), or everything."""


class FakeData(Section):
    type: Literal["fake"] = "fake"
    batch_size: int = Field(default=128, ge=1)
    seq_len: int = Field(default=128, ge=2)
    length: Literal["fixed", "variable"] = "fixed"
    input_ids: Literal["increasing", "random"] = "increasing"
    pack_function: Annotated[Literal["cat", "stack"], _STACK] = "cat"
    micro_batch_size: Annotated[int, _MICRO] = Field(default=1, ge=1)


SFTData = Annotated[JsonlData | FakeData, Field(discriminator="type")]


class SFTConfig(Section):
    """`ductile sft`: supervised fine-tuning, with the same trainer."""

    model: SFTModelConfig = SFTModelConfig()
    data: SFTData = JsonlData()
    optim: OptimConfig = AdamWConfig(lr=1e-5)
    scheduler: SchedulerConfig = ConstantSchedule()
    max_steps: int | None = Field(default=None, ge=1)
    """Default: one pass over the data."""
    output_dir: FilePath = "runs/sft"
    clean: bool = False
    resume: bool = False
    seed: int = 0
    loss_impl: Annotated[
        Literal["torch", "liger", "liger_fused", "quack_fused"],
        NotBuilt("loss kernels of other packages", only=("liger", "liger_fused", "quack_fused")),
    ] = "torch"
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    dist_timeout_seconds: int = Field(default=600, ge=1)
    resize: ResizeConfig = ResizeConfig()
    cluster: ClusterConfig = ClusterConfig()
    deployment: TrainDeploymentConfig = TrainDeployment()
    slurm: SlurmConfig | None = None
    ray: RayConfig | None = None
    ckpt: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    wandb: WandbConfig | None = None
    tensorboard: TensorboardConfig | None = None
    bench: BenchConfig | None = None
    trace: TraceConfig | None = None
    dry_run: bool = False


class TrainerRunConfig(TrainerConfig):
    """`ductile trainer`: the trainer alone, on fake data."""

    output_dir: FilePath = "runs/trainer"
    clean: bool = False
    cluster: ClusterConfig = ClusterConfig()
    deployment: TrainDeploymentConfig = TrainDeployment()
    ray: RayConfig | None = None
    bench: BenchConfig | None = None
    trace: TraceConfig | None = None
    log: LogConfig = LogConfig()
    dry_run: bool = False


class OrchestratorRunConfig(OrchestratorConfig):
    """`ductile orchestrator`: rollouts and rewards against a running server, without training."""

    model: ChatModelConfig = ChatModelConfig()
    """The model that the server has: its tokenizer and chat template."""
    output_dir: FilePath = "runs/orchestrator"
    clean: bool = False
    bench: BenchConfig | None = None
    log: LogConfig = LogConfig()
    dry_run: bool = False


class InferenceRunConfig(InferenceConfig):
    """`ductile inference`: an OpenAI-compatible server, or several behind a router."""

    output_dir: FilePath = "runs/inference"
    cluster: ClusterConfig = ClusterConfig()
    deployment: ServingDeploymentConfig = SingleNodeServing()
    slurm: SlurmConfig | None = None
    bench: InferenceBenchConfig | None = None
    log: LogConfig = LogConfig()
    dry_run: bool = False


class RouterRunConfig(HealthCheckConfig):
    """`ductile router`: one address before servers that are there already."""

    urls: list[str] = []
    """The servers, such as "http://10.0.0.7:8000"; `ductile inference` prints its own."""
    prefill_urls: list[str] = []
    """Servers that compute prompts, whose keys and values those of `urls` take over."""
    policy: RouterPolicy = "consistent_hash"
    """Which server gets a request: see `deployment.router.policy` of `ductile inference`."""
    non_cached_tokens: int = Field(default=0, ge=0)
    """A prompt of fewer tokens, estimated by its length, is not computed by one of `prefill_urls`."""
    server: HttpServerConfig = HttpServerConfig()
    """The router's own address and limits. Its API key is that of the servers, too."""
    output_dir: FilePath = "runs/router"
    log: LogConfig = LogConfig()
    dry_run: bool = False


RunConfig = RLConfig | SFTConfig | TrainerRunConfig | OrchestratorRunConfig | InferenceRunConfig
"""Configs of the commands that have a model."""
CommandConfig = RunConfig | RouterRunConfig
