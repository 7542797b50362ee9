"""How large the tensors are that a slot of a layout computes with: `SlotShapes`."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from ductile.core.layout.geometry.context_parallel import CpStyle, chosen_style, num_laid_out
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.model.spec import ModelSpec

Rows = tuple[int, int]
"""Rows of a parameter that are dealt out to FSDP2's shards, and numbers of each."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapters of the projections that are fused into a module, as a slot has them."""

    module: str
    down: Rows
    """Rows and columns of A."""
    up: Rows
    """Rows and columns of B."""

    @property
    def num_elements(self) -> int:
        return self.down[0] * self.down[1] + self.up[0] * self.up[1]


@dataclass(frozen=True, slots=True)
class SlotShapes:
    """Numbers of one slot, the largest along tp, for one micro-batch."""

    tokens: int
    """Tokens that go through a slot's products: a part of the micro-batch along cp."""
    spread_tokens: int
    """Tokens of the slot's part of the residual stream: a part of these along tp."""
    hidden_size: int
    intermediate_size: int
    """Rows of the slot's part of gate."""
    heads: tuple[int, int]
    """Query heads and key heads of the slot."""
    head_dim: int
    exchanged_keys: int
    """Key heads that all slots along cp get together, with ulysses."""
    vocab_rows: int
    """Rows of the slot's part of the embeddings."""
    compute_bytes: int
    cp: int
    tp: int
    cp_style: CpStyle
    device: Literal["cpu", "cuda"]
    qk_norm: bool
    adapters: tuple[Adapter, ...] = ()
    """Adapters of a layer, which alone are trained; none: all parameters are."""

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the slot's part of the hidden states between two layers."""
        return self.spread_tokens * self.hidden_size * self.compute_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes of hidden states of all tokens that go through the slot's products."""
        return self.tokens * self.hidden_size * self.compute_bytes

    @property
    def qkv_weight(self) -> int:
        return (self.heads[0] + 2 * self.heads[1]) * self.head_dim * self.hidden_size

    @property
    def o_weight(self) -> int:
        return self.hidden_size * self.heads[0] * self.head_dim

    @property
    def gate_up_weight(self) -> int:
        return 2 * self.intermediate_size * self.hidden_size

    @property
    def down_weight(self) -> int:
        return self.hidden_size * self.intermediate_size

    @property
    def layer_rows(self) -> list[Rows]:
        """The parameters of a layer; biases, which few models have, are left out."""
        width = self.heads[0] * self.head_dim
        found = [
            (self.hidden_size, 1),
            (width + 2 * self.heads[1] * self.head_dim, self.hidden_size),
            (self.hidden_size, width),
            (self.hidden_size, 1),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        ]
        norms = [(self.head_dim, 1)] * 2 if self.qk_norm else []
        return [*found, *norms, *self.adapter_rows]

    @property
    def adapter_rows(self) -> list[Rows]:
        """The parameters of a layer's adapters."""
        return [rows for adapter in self.adapters for rows in (adapter.down, adapter.up)]

    def adapter_of(self, module: str) -> Adapter | None:
        """Return the adapter of a module such as "mlp.down_proj", if it has one."""
        return next((adapter for adapter in self.adapters if adapter.module == module), None)


@lru_cache(maxsize=1024)
def slot_shapes(spec: ModelSpec, dims: ParallelDims, options: MemoryOptions) -> SlotShapes:
    """Return the shapes of the slot that has most along tp."""
    style, _ = chosen_style(options.cp_style, spec, dims.tp, dims.cp)
    laid_out = num_laid_out(style, (options.seq_len,), dims.cp, dims.tp)
    tokens = -(-laid_out // dims.cp)
    queries = -(-spec.num_heads // dims.tp)
    keys = _most_keys(spec, dims.tp, queries)
    return SlotShapes(
        tokens=tokens,
        spread_tokens=-(-tokens // dims.tp),
        hidden_size=spec.hidden_size,
        intermediate_size=-(-spec.intermediate_size // dims.tp),
        heads=(queries, keys),
        head_dim=spec.head_dim,
        exchanged_keys=max(keys, dims.cp),
        vocab_rows=-(-spec.vocab_size // dims.tp),
        compute_bytes=options.compute_bytes,
        cp=dims.cp,
        tp=dims.tp,
        cp_style=style,
        device=options.device,
        qk_norm=spec.qk_norm,
        adapters=_adapters(spec, queries, keys, -(-spec.intermediate_size // dims.tp)),
    )


def _adapters(spec: ModelSpec, queries: int, keys: int, intermediate: int) -> tuple[Adapter, ...]:
    """The adapters of a slot with so many heads and rows of gate."""
    if spec.lora is None:
        return ()
    rank, hidden, head = spec.lora.rank, spec.hidden_size, spec.head_dim
    sizes = {
        "attention.qkv_proj": (hidden, (queries * head, keys * head, keys * head)),
        "attention.o_proj": (queries * head, (hidden,)),
        "mlp.gate_up_proj": (hidden, (intermediate, intermediate)),
        "mlp.down_proj": (intermediate, (hidden,)),
    }
    found: list[Adapter] = []
    for module, (inputs, outputs) in sizes.items():
        rows = [size for size, is_target in zip(outputs, spec.lora.among(module), strict=True) if is_target]
        if rows:
            found.append(Adapter(module, (rank * len(rows), inputs), (sum(rows), rank)))
    return tuple(found)


def _most_keys(spec: ModelSpec, tp: int, queries: int) -> int:
    """Key heads of the slot along tp whose query heads read most of them. `attention_heads.heads_on` says which; it
    takes numpy, which a config's mistakes are told without."""
    each = spec.num_heads // spec.num_kv_heads
    starts = [min(coordinate * queries, spec.num_heads) for coordinate in range(tp + 1)]
    return max(-(-stop // each) - start // each for start, stop in pairwise(starts))


def num_elements(parameters: list[Rows]) -> int:
    """Numbers of all the parameters."""
    return sum(rows * columns for rows, columns in parameters)


def num_of_shard(parameters: list[Rows], num_shards: int) -> int:
    """Numbers of the largest shard: rows are dealt out in equal chunks, rounded up."""
    return sum(-(-rows // num_shards) * columns for rows, columns in parameters)
