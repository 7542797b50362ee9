"""Tensor parallelism: each tp slot has a part of every weight matrix, and its modules compute with that part.

`apply` gives each module of the textbook model its part and puts one that knows the other slots in its place:

| module | here | the slot has |
|---|---|---|
| `embed` | `VocabularyParallelEmbedding` | rows of the vocabulary |
| `attention_norm`, `mlp_norm` | `SequenceParallelAddNorm` | all of the weight, a part of the tokens |
| `norm` | `SequenceParallelNorm` | the same |
| `qkv_proj` | `ColumnParallelLinear`, `SharingProjection` | rows of its heads, of which others may have the same |
| `attention` | `HeadParallelAttention` | its heads of all tokens |
| `gate_up_proj` | `ColumnParallelLinear` | rows of gate and of up |
| `o_proj`, `down_proj` | `RowParallelLinear` | columns, and all of the bias |
| the former two with adapters | `ColumnParallelLora` | the same rows of B, all of A |
| the latter two with adapters | `RowParallelLora` | the same columns of A, all of B |
| `q_norm`, `k_norm` | stay; `HeadParallelAttention` reads their weights | all of the weight, its heads |
| `lm_head` | stays; `VocabularyParallelHead` is called with its weight | rows of the vocabulary |

A module with parameters that is not in this table is refused: if its weight is whole on every slot and sees a part of
the tokens, slots would go apart without its gradient being summed.

Where it cuts is for `ductile.core.layout.geometry.strategy` to say. Parts may differ in size.

The number of tokens, T, must be a multiple of the number of slots, R. Between the modules a slot has S = T / R tokens
(`ductile.parallel.sequence_parallel`). H query heads and K key/value heads on a slot, D head size, M hidden size.
"""

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ductile.core.layout.geometry.attention_heads import Heads, heads_on, share_key_heads
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import tensor_parallel_shapes
from ductile.core.layout.model.spec import ModelSpec
from ductile.kernels.dispatch import add_norm, rms_norm
from ductile.model.attention import Attend
from ductile.model.linear import Linear, LoraLinear
from ductile.model.transformer import AddNorm, Attention, RMSNorm, Transformer
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.sequence_parallel import (
    SharedRows,
    gather,
    reduce_scatter,
    sum_gradients,
    sum_shared_rows,
)
from ductile.parallel.vocabulary_parallel import VocabularyParallelEmbedding

STAY = frozenset({"q_norm", "k_norm", "lm_head"})
"""Modules that stay, as others read their weights and see to the gradients."""


def apply(model: Transformer, context: ParallelContext) -> None:
    """Make a model that has no values yet the slot's part of a tensor-parallel one. The names of its parameters stay.

    Raises ValueError where a slot would have no part of something, and for a module that the table above lacks.
    """
    _refuse_empty_parts(model.spec, context.layout)
    in_place_of = _replacements(model.spec, context)
    _refuse_unknown(model, in_place_of.keys() | STAY)
    shapes = tensor_parallel_shapes(model.spec, context.layout, context.slot)
    for name, parameter in list(model.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        part = nn.Parameter(parameter.new_empty(shapes[name]), parameter.requires_grad)
        model.get_submodule(owner).register_parameter(own_name, part)
    for name, module in list(model.named_modules()):
        if replacement := in_place_of.get(name.rpartition(".")[2]):
            model.set_submodule(name, replacement(module))


def _refuse_unknown(model: Transformer, known: Collection[str]) -> None:
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind not in known and next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"nothing says what tp does to {name}, which has parameters: write {kind!r} in "
                "`tensor_parallel._replacements`, or in STAY where another module sees to its gradients"
            )


def _refuse_empty_parts(spec: ModelSpec, layout: ParallelLayout) -> None:
    """Parts are rounded up, so the last slot's is the first to be empty; FSDP2 has no gradient of what is."""
    last = layout.group(layout.first, ("tp",))[-1]
    for name, shape in tensor_parallel_shapes(spec, layout, last).items():
        if 0 in shape:
            raise ValueError(
                f"tp = {layout.dims.tp} (trainer.model.tp or scorer.tp) leaves a slot without any part of {name}; "
                f"write a divisor of the model's num_attention_heads, {spec.num_heads}, and of its intermediate_size, "
                f"{spec.intermediate_size}"
            )


def _replacements(spec: ModelSpec, context: ParallelContext) -> dict[str, Callable[..., nn.Module]]:
    """What takes the place of a module, by the last part of its name."""
    group = context.group("tp")
    heads = heads_on(spec, group.size(), group.rank())
    shared = _key_rows(spec, heads) if share_key_heads(spec, group.size()) else None
    rows_of_heads = [count * spec.head_dim for count in heads.counts]

    def projection_of_heads(module: Linear) -> Linear:
        if isinstance(module, LoraLinear):
            return ColumnParallelLora(module, group, rows_of_heads, shared)
        return SharingProjection(module, group, shared) if shared else ColumnParallelLinear(module, group)

    def gate_and_up(module: Linear) -> Linear:
        if isinstance(module, LoraLinear):
            return ColumnParallelLora(module, group, [len(module.weight) // 2] * 2)
        return ColumnParallelLinear(module, group)

    def row_parallel(module: Linear) -> Linear:
        return RowParallelLora(module, group) if isinstance(module, LoraLinear) else RowParallelLinear(module, group)

    return {
        "embed": lambda module: VocabularyParallelEmbedding(module, group),
        "attention_norm": lambda module: SequenceParallelAddNorm(module, group),
        "qkv_proj": projection_of_heads,
        "attention": lambda module: HeadParallelAttention(module, group, heads),
        "o_proj": row_parallel,
        "mlp_norm": lambda module: SequenceParallelAddNorm(module, group),
        "gate_up_proj": gate_and_up,
        "down_proj": row_parallel,
        "norm": lambda module: SequenceParallelNorm(module, group),
    }


def _key_rows(spec: ModelSpec, heads: Heads) -> SharedRows:
    """Rows of `qkv_proj` that are of key heads, and of their values."""
    num_queries, num_keys, _ = (count * spec.head_dim for count in heads.counts)
    first, all_keys = heads.keys.start * spec.head_dim, spec.num_kv_heads * spec.head_dim
    places = (
        (slice(num_queries, num_queries + num_keys), slice(first, first + num_keys)),
        (slice(num_queries + num_keys, None), slice(all_keys + first, all_keys + first + num_keys)),
    )
    return SharedRows(2 * all_keys, places)


class SequenceParallelNorm(RMSNorm):
    """Norm of the slot's tokens."""

    def __init__(self, whole: RMSNorm, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = sum_gradients(self.group, self.weight)
        return rms_norm(x, weight, self.eps)


class SequenceParallelAddNorm(AddNorm):
    """Norm of the slot's tokens of the residual stream."""

    def __init__(self, whole: AddNorm, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, x: Tensor, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
        (weight,) = sum_gradients(self.group, self.weight)
        return add_norm(x, change, weight, self.eps)


class ColumnParallelLinear(Linear):
    """The slot's outputs of all tokens."""

    def __init__(self, whole: Linear, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """[S, M] -> [T, outputs]."""
        return self.product(gather(input, self.group), self.weight, self.bias)


class SharingProjection(ColumnParallelLinear):
    """Column parallel, where slots that have the same key head add up its gradients."""

    def __init__(self, whole: Linear, group: dist.ProcessGroup, shared: SharedRows) -> None:
        super().__init__(whole, group)
        self.shared = shared

    def forward(self, input: Tensor) -> Tensor:
        weights = [self.weight] if self.bias is None else [self.weight, self.bias]
        return self.product(gather(input, self.group), *sum_shared_rows(self.group, self.shared, *weights))


class RowParallelLinear(Linear):
    """The sum, over slots, of what their inputs give."""

    def __init__(self, whole: Linear, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """[T, inputs] -> [S, M]."""
        out = reduce_scatter(self.product(input, self.weight), self.group)
        if self.bias is None:
            return out
        (bias,) = sum_gradients(self.group, self.bias)
        return out + bias


class ColumnParallelLora(LoraLinear):
    """The slot's outputs of all tokens, with its rows of B; each slot uses all of A for its outputs."""

    def __init__(
        self, whole: LoraLinear, group: dist.ProcessGroup, rows: Sequence[int], shared: SharedRows | None = None
    ) -> None:
        """rows: the slot's outputs of each projection. shared: those that are on other slots, too."""
        vars(self).update(vars(whole))
        self.group, self.rows, self.shared = group, rows, shared

    def forward(self, input: Tensor) -> Tensor:
        """[S, M] -> [T, outputs]."""
        x, up = gather(input, self.group), self.up()
        (down,) = sum_gradients(self.group, self.lora_A)
        if self.shared is not None:
            (up,) = sum_shared_rows(self.group, self.shared, up)
        return self.product(x, self.weight, self.bias) + self.change(x, down, up)


class RowParallelLora(LoraLinear):
    """The sum, over slots, of what their inputs give, with their columns of A; each slot has all of B."""

    def __init__(self, whole: LoraLinear, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """[T, inputs] -> [S, M]."""
        (up,) = sum_gradients(self.group, self.up())
        out = reduce_scatter(self.product(input, self.weight) + self.change(input, self.lora_A, up), self.group)
        return out if self.bias is None else out + self.bias


class HeadParallelAttention(Attention):
    """Attention over the slot's heads of all tokens."""

    def __init__(self, whole: Attention, group: dist.ProcessGroup, heads: Heads) -> None:
        vars(self).update(vars(whole))
        self.group = group
        self.heads = heads.counts
        self.readers = heads.readers

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        is_even = len({*self.readers}) == 1
        return super().forward(x, cos, sin, layer, attend if is_even else self._a_key_a_query(attend))

    def _a_key_a_query(self, attend: Attend) -> Attend:
        """The same attention, with a key head for each query head, as it takes equally many of these a key for
        granted."""

        def spread(heads: Tensor) -> Tensor:
            each = zip(heads.split(1, dim=1), self.readers, strict=True)
            return torch.cat([head.expand(-1, num_readers, -1) for head, num_readers in each], dim=1)

        return lambda layer, q, k, v: attend(layer, q, spread(k), spread(v))

    def _norm_weight(self) -> Tensor | None:
        if not (isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)):
            return None
        q_weight, k_weight = sum_gradients(self.group, self.q_norm.weight, self.k_norm.weight)
        num_q, num_k, _ = self.heads
        return torch.cat((q_weight.expand(num_q, -1), k_weight.expand(num_k, -1)))
