"""What a trainer's memory depends on besides its model and its layout: dtypes, what is kept, and where."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ductile.core.layout.geometry.context_parallel import CpStyleAsked
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.geometry.pipeline_schedule import PipelineSchedule

RuleName = Literal["torch", "muon", "adamw_8bit", "sign_sgd"]
"""Rules that need different memory while they update parameters; `torch` is any of torch's own."""
LeverName = Literal["selective", "fsdp_cpu_offload"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Layers that compute activations again: `trainer.model.ac`."""

    mode: Literal["full", "selective"] = "full"
    freq: int = 1
    """Every n-th layer does, counted over the whole model."""
    targets: tuple[str, ...] = ("norm",)
    """What `selective` computes again."""


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Options of a trainer that decide how much memory it takes. The defaults are those of AdamW on a GPU."""

    parameter_bytes: int = 4
    """Bytes of a number of the parameters that the optimizer updates, and of their gradients."""
    compute_bytes: int = 2
    """Bytes of a number in forward and backward passes."""
    reduce_bytes: int = 4
    """Bytes of a number of gradients that are being added up over ranks."""
    optimizer_bytes: float = 8
    """Bytes that the optimizer keeps for each parameter, on average."""
    rule: RuleName = "torch"
    reduce_every_step: bool = False
    """Whether each slot keeps the gradients of all weights that it gathers until the optimizer step."""
    reshard_after_forward: bool = True
    checkpointing: Checkpointing | None = None
    offloaded_in_flight: int | None = None
    """Activations of layers that are on the device at a time, as the others are in host memory; None: all are."""
    optim_cpu_offload: bool = False
    fsdp_cpu_offload: bool = False
    head_chunk_tokens: int | None = None
    """Tokens whose logits exist at a time; None: as many as `model.logprobs` chooses for the device."""
    fp32_lm_head: bool = False
    device: Literal["cpu", "cuda"] = "cuda"
    context_bytes: int = 0
    """Bytes of the device that its driver and its libraries take for a process."""
    generator_bytes: int = 0
    """Bytes of a generator on the same slot: its weights and its KV cache."""
    scorer_bytes: int = 0
    """Bytes of a scorer on the same slot: its weights."""
    num_micro_batches: int | None = None
    """Micro-batches of a data-parallel rank in an optimizer step; None: as many as `num_samples` makes. From the second
    one on there is a gradient all the time."""
    num_samples: int | None = None
    """Samples of an optimizer step that the trainer gets at once, each at most a micro-batch; None: they may come in
    any number of parts."""
    cp_style: CpStyleAsked = "auto"
    pp_schedule: PipelineSchedule = "1f1b"
    num_runs: int = 1
    """Runs of layers on each slot of pp."""
    seq_len: int = 2048
    """Tokens of a micro-batch, all of which are scored."""
    excluded: tuple[LeverName, ...] = ()
    """Ways to take less that other keys of the config rule out: compiled layers and FlexAttention the one, Muon the
    other."""

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "MemoryOptions":
        """The inverse of `dataclasses.asdict`."""
        own = dict(fields)
        if own.get("checkpointing") is not None:
            kept = own["checkpointing"]
            own["checkpointing"] = Checkpointing(kept["mode"], kept["freq"], tuple(kept["targets"]))
        own["excluded"] = tuple(own.get("excluded", ()))
        return MemoryOptions(**own)

    def micro_batches(self, dims: ParallelDims) -> int | None:
        """Return the most micro-batches that a data-parallel rank has in an optimizer step; None: many."""
        if self.num_micro_batches is not None or self.num_samples is None:
            return self.num_micro_batches
        return -(-self.num_samples // dims.num_data_parallel)

    @property
    def state_bytes(self) -> float:
        """Bytes of a parameter, its gradient and what the optimizer keeps for it."""
        return 2 * self.parameter_bytes + self.optimizer_bytes
