"""[trainer]: everything the train slots need to know. It is also the whole config of `ductile trainer`."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import Field

from ductile.config.schema.model import TrainerModelConfig
from ductile.config.schema.section import FilePath, ImportPath, NotBuilt, Section
from ductile.core.batch.aggregation import LossAggregation


class OptimizerSection(Section):
    lr: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    decay_norms_and_biases: bool = True
    """Weight decay goes to norms and biases too, as torch's optimizers do by themselves; false: to matrices alone."""
    max_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; "None" turns clipping off."""
    max_skipped_steps: int | None = Field(default=10, ge=1)
    """The run ends, saved, when so many steps in a row were thrown away because their gradients were not finite."""


class AdamWConfig(OptimizerSection):
    type: Literal["adamw"] = "adamw"
    betas1: float = Field(default=0.9, ge=0, lt=1)
    betas2: float = Field(default=0.999, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    moments: Literal["full", "8bit"] = "full"
    """full: both moments have the parameter's dtype; 8bit: those of matrices have 8 bits a number and a scale for each
    block of a row."""


class SGDConfig(OptimizerSection):
    type: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = True


class MuonConfig(OptimizerSection):
    """Muon for the matrices of layers, adapters among them; AdamW, with the same learning rate, for embeddings, head,
    norms and biases."""

    type: Literal["muon"]
    mu: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of the matrices."""
    nesterov: bool = True
    betas1: float = Field(default=0.9, ge=0, lt=1)
    betas2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)


class SignSGDConfig(OptimizerSection):
    type: Literal["sign_sgd"]


OptimConfig = Annotated[AdamWConfig | SGDConfig | MuonConfig | SignSGDConfig, Field(discriminator="type")]


StepsOrShare = Annotated[int, Ge(0)] | Annotated[float, Gt(0), Lt(1)]
"""Optimizer steps, or a share of them all, which a run that is made shorter keeps."""


class ConstantSchedule(Section):
    type: Literal["constant"] = "constant"
    warmup_steps: StepsOrShare = 0
    """Optimizer steps, or a share of the run's: 0.1."""


class LinearSchedule(Section):
    type: Literal["linear"] = "linear"
    warmup_steps: StepsOrShare = 10
    """Optimizer steps, or a share of the run's: 0.1."""
    decay_steps: StepsOrShare | None = None
    """The last n of `max_steps`, or a share of them, go down to `min_lr`. Default: all after the warm-up."""
    min_lr: float = Field(default=0.0, ge=0)


class CosineSchedule(Section):
    type: Literal["cosine"] = "cosine"
    warmup_steps: StepsOrShare = 10
    """Optimizer steps, or a share of the run's: 0.1."""
    min_lr: float = Field(default=0.0, ge=0)


SchedulerConfig = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="type")]


def in_steps(length: int | float, num_steps: int) -> int:
    """Steps, of which a share is rounded down: shares that add up to 1 never take more than the run has."""
    return length if isinstance(length, int) else int(length * num_steps + 1e-9)


class DefaultLoss(Section):
    """DPPO mask with a quadratic KL term: `-A*r` over kept tokens plus `kl_tau * (log r)^2` over all."""

    type: Literal["default"] = "default"
    dppo_mask_low: float = Field(default=0.2, ge=0)
    dppo_mask_high: float = Field(default=0.2, ge=0)
    adv_tau: float = Field(default=1.0, ge=0)
    kl_tau: float = Field(default=1e-3, ge=0)
    clip_ratio_c: float | None = Field(default=10.0, gt=1)
    """A token with A < 0 that has become more than this many times likelier has no gradient; "None" has no limit."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL estimate to the reference model. Above 0 needs a `score` slot."""
    aggregation: LossAggregation = "token_mean"
    """token_mean: each trained token counts alike; seq_mean_token_mean: each sequence counts alike;
    seq_mean_token_sum: token sums, divided by the number of sequences."""


class IPOLoss(Section):
    """The `default` loss, but it drops a token when the absolute change of its probability exceeds `ipo_threshold`."""

    type: Literal["ipo"] = "ipo"
    ipo_threshold: float = Field(default=0.1, gt=0)
    adv_tau: float = Field(default=1.0, ge=0)
    kl_tau: float = Field(default=1e-3, ge=0)
    clip_ratio_c: float | None = Field(default=10.0, gt=1)
    """A token with A < 0 that has become more than this many times likelier has no gradient; "None" has no limit."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL estimate to the reference model. Above 0 needs a `score` slot."""
    aggregation: LossAggregation = "token_mean"
    """token_mean: each trained token counts alike; seq_mean_token_mean: each sequence counts alike;
    seq_mean_token_sum: token sums, divided by the number of sequences."""


class GRPOLoss(Section):
    """PPO's clipped objective over group advantages."""

    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.2, ge=0)
    """Larger than `clip_low`: clip-higher (DAPO)."""
    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """Dual clip: a token with A < 0 whose ratio is above this has no gradient; "None" has no limit."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Largest factor by which a token counts. The factor is how many times likelier the token was under the weights
    before the batch than when it was sampled; without a `score` slot it is 1."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL estimate to the reference model. Above 0 needs a `score` slot."""
    aggregation: LossAggregation = "token_mean"
    """token_mean: each trained token counts alike; seq_mean_token_mean: each sequence counts alike;
    seq_mean_token_sum: token sums, divided by the number of sequences."""


class CustomLoss(Section):
    type: Literal["custom"] = "custom"
    import_path: ImportPath
    """`package.module.function`, called as `function(LossInputs, **kwargs) -> LossOutputs`."""
    kwargs: dict[str, object] = {}
    needs_reference: bool = False
    """The function reads `ref_logprobs`. Needs a `score` slot."""
    aggregation: LossAggregation = "token_mean"
    """token_mean: each trained token counts alike; seq_mean_token_mean: each sequence counts alike;
    seq_mean_token_sum: token sums, divided by the number of sequences. The function sees sequences as
    `LossInputs.sequences`."""


class SFTLoss(Section):
    """Negative log-likelihood of the masked-in tokens. What `ductile sft` trains with."""

    type: Literal["sft"] = "sft"


LossConfig = Annotated[DefaultLoss | IPOLoss | GRPOLoss | CustomLoss | SFTLoss, Field(discriminator="type")]


def needs_reference(loss: LossConfig) -> bool:
    """Return whether the loss reads the reference model's log-probs, which a score slot computes."""
    match loss:
        case DefaultLoss() | IPOLoss() | GRPOLoss():
            return loss.kl_coef > 0
        case CustomLoss():
            return loss.needs_reference
        case SFTLoss():
            return False


def loss_aggregation(loss: LossConfig) -> LossAggregation:
    """How the loss is aggregated over tokens; in SFT every trained token counts alike."""
    return "token_mean" if isinstance(loss, SFTLoss) else loss.aggregation


class FakeDataConfig(Section):
    batch_size: int = Field(default=2, ge=1)
    """Samples a step."""
    generate_samples: bool = False
    """Documents of different lengths instead of one full sequence a sample."""


class TrainerDataConfig(Section):
    fake: FakeDataConfig | None = None
    """Train on made-up data; no generator is needed."""


class WeightsCheckpointConfig(Section):
    save_sharded: bool = True
    save_format: Literal["safetensors", "torch"] = "safetensors"
    save_adapter_separately: bool = False


class CheckpointConfig(Section):
    interval: Annotated[int, Ge(1)] | Literal["auto"] | None = "auto"
    """Save every n steps. "auto": every ten minutes, or less often, so that saving takes at most 5% of the time;
    "None": only at the end and on Ctrl-C, when every run saves."""
    keep_last: int | None = Field(default=2, ge=1)
    """Complete checkpoints to keep; "None" keeps all. A save needs room for one more."""
    resume_step: int | None = Field(default=None, ge=-1)
    """Resume from this step; -1 is the latest complete one."""
    export_model: bool = True
    """Also write an HF folder at each save."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the exported weights. "auto": that of the weights of `model.name`."""
    keep_interval: Annotated[int | None, NotBuilt("keeping every n-th checkpoint for good")] = Field(default=None, ge=1)
    output_dir: Annotated[str | None, NotBuilt("checkpoints outside `output_dir`")] = None
    skip_progress: Annotated[bool, NotBuilt("resuming a part of the state")] = False
    skip_scheduler: Annotated[bool, NotBuilt("resuming a part of the state")] = False
    skip_dataloader: Annotated[bool, NotBuilt("resuming a part of the state")] = False
    skip_optimizer: Annotated[bool, NotBuilt("resuming a part of the state")] = False
    weights_only: Annotated[
        bool, NotBuilt("checkpoints of the weights alone", instead="`ckpt.export_model` writes them beside the state.")
    ] = False
    weights: Annotated[WeightsCheckpointConfig | None, NotBuilt("choosing how weights are written")] = None


class GCConfig(Section):
    interval: int = Field(default=50, ge=1)
    """Steps between collections, in lock-step on all ranks."""


class HeartbeatConfig(Section):
    url: str


class MetricsServerConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)


class FilesystemBroadcast(Section):
    type: Literal["filesystem"] = "filesystem"
    save_sharded: bool = True
    save_format: Literal["safetensors", "torch"] = "safetensors"


class NcclBroadcast(Section):
    type: Literal["nccl"] = "nccl"
    host: str = "localhost"
    """Address of the trainer's machine at which servers reach it. localhost: those of the same machine alone."""
    port: int = Field(default=29501, ge=1, le=65535)
    timeout: int = Field(default=1200, ge=1)
    inference_world_size: int = Field(default=1, ge=1)
    quantize_in_weight_transfer: Annotated[bool, NotBuilt("quantized weights on their way to servers")] = False


class NixlBroadcast(Section):
    type: Annotated[Literal["nixl"], NotBuilt("weights through NIXL", instead='There are "filesystem" and "nccl".')]


WeightBroadcastConfig = Annotated[FilesystemBroadcast | NcclBroadcast | NixlBroadcast, Field(discriminator="type")]


class FilesystemTransport(Section):
    type: Literal["filesystem"] = "filesystem"


class ZmqTransport(Section):
    type: Literal["zmq"] = "zmq"
    host: str = "localhost"
    port: int = Field(default=5555, ge=1, le=65535)
    hwm: int = Field(default=10, ge=1)


TransportConfig = Annotated[FilesystemTransport | ZmqTransport, Field(discriminator="type")]


class ResizeConfig(Section):
    """How the trainer changes its slots and its layout while it trains (docs/resize.md)."""

    layouts: list[str] = []
    """Layouts of the trainer by number of slots, such as ["pp=2,dp_shard=2,tp=2", "tp=2"]: whenever it gets slots, by a
    scheduler or by hand, it takes the first that fits their number. Axes that are not named are 1; without `dp_shard`
    a layout fits every multiple of its size. Other numbers of slots have `model.tp`, `model.pp`, ...; the trainer is
    not given those that these do not fit."""
    timeout_s: float = Field(default=30.0, gt=0)
    """A step of a resize that takes longer fails, and the trainer stays as it was."""
    memory: Literal["shadow", "streaming"] = "shadow"
    """shadow: old and new state exist together until the resize is finalized, and it can be taken back until then;
    streaming: a new part of a tensor is allocated when its first bytes come, an old one freed when its last bytes have
    left, with at most 64 MiB of staging memory besides, and there is no way back once bytes move."""
    carrier: Literal["auto", "peer_memory", "p2p"] = "auto"
    """What moves the bytes: slots of one host read each other's memory; p2p sends messages through gloo or NCCL."""
    verify: Literal["moved", "all", "off"] = "moved"
    """moved: compare fingerprints of what goes from slot to slot; all: each slot also compares what it copied for
    itself, bit for bit, with what it had (not with `memory` "streaming", which frees that); off: compare nothing."""


class TrainerConfig(Section):
    model: TrainerModelConfig = TrainerModelConfig()
    optim: OptimConfig = AdamWConfig()
    scheduler: SchedulerConfig = ConstantSchedule()
    loss: LossConfig = DefaultLoss()
    data: TrainerDataConfig = TrainerDataConfig()
    max_steps: int | None = Field(default=None, ge=1)
    seed: int = 0
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    dist_timeout_seconds: int = Field(default=600, ge=1)
    """A collective of gloo's gives up after this; the wait for one of NCCL's ends with `cluster.command_timeout_s`."""
    resize: ResizeConfig = ResizeConfig()
    weight_broadcast: WeightBroadcastConfig | None = None
    """How new weights go to servers: filesystem, by files in the run's folder, which they must see; nccl, by
    connections from each server to all ranks, made for each version, from host memory. Left out: the fastest way that
    trainer and server have in common. Slots read them from shared memory in any case. Also written `weight_broadcast`
    at the root."""
    rollout_transport: Annotated[
        TransportConfig | None,
        NotBuilt("choosing how rollouts travel", instead="They go through the run's own sockets."),
    ] = None
    """Also written `rollout_transport` at the root."""
    gc: Annotated[GCConfig | None, NotBuilt("garbage collection in lock-step")] = None
    memory_profiler_path: FilePath | None = None
    """Folder for what each train slot has allocated on its GPU, a file a step, for https://pytorch.org/memory_viz."""
    heartbeat: Annotated[HeartbeatConfig | None, NotBuilt("heartbeats to a URL")] = None
    metrics_server: Annotated[MetricsServerConfig | None, NotBuilt("a metrics server in the trainer")] = None
    enable_router_replay: Annotated[bool, NotBuilt("mixture of experts")] = False
    enable_token_export: Annotated[bool, NotBuilt("exporting trained tokens")] = False
    max_concurrent_runs: Annotated[int, NotBuilt("several adapters in one run")] = Field(default=1, ge=1)
