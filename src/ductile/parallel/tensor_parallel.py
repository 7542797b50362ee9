"""Tensor parallelism: each tp slot has a part of every weight matrix, and its modules compute with that part.

`apply` gives each module of the textbook model its part and puts one that knows the other slots in its place:

| module | here | the slot has |
|---|---|---|
| `embed` | `VocabularyParallelEmbedding` | rows of the vocabulary |
| `layers.3` | `SequenceParallelLayer` | a part of the tokens; all of the norms' weights |
| `attention` | `HeadParallelAttention` | its heads of all tokens |
| `qkv_proj` | `ColumnParallelLinear` | rows of its heads; other slots may have the same key heads |
| `gate_up_proj` | `ColumnParallelLinear` | rows of gate and of up |
| `o_proj`, `down_proj` | `RowParallelLinear` | columns, and all of the bias |
| `norm` | `SequenceParallelNorm` | a part of the tokens; all of the weight |
| `lm_head` | stays; `VocabularyParallelHead` is called with its weight | rows of the vocabulary |

Where it cuts is for `ductile.core.layout.strategy` to say. Parts may differ in size.

The number of tokens, T, must be a multiple of the number of slots, R. Between the modules a slot has S = T / R tokens
(`ductile.parallel.sequence_parallel`). H query heads and K key/value heads on a slot, D head size, M hidden size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ductile.core.layout.heads import Heads, heads_on, share_key_heads
from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.core.layout.spec import ModelSpec
from ductile.core.layout.strategy import tensor_parallel, tensor_parallel_shapes
from ductile.kernels.dispatch import linear, rms_norm
from ductile.model.attention import Attend
from ductile.model.transformer import Attention, Layer, Linear, RMSNorm, Transformer
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.sequence_parallel import SharedRows, gather, reduce_scatter, sum_gradients
from ductile.parallel.vocabulary_parallel import VocabularyParallelEmbedding


def apply(model: Transformer, context: ParallelContext) -> None:
    """Make a model that has no values yet the slot's part of a tensor-parallel one. The names of its parameters stay.

    Raises ValueError where a slot would have no part of something.
    """
    _refuse_empty_parts(model.spec, context.layout)
    shapes = tensor_parallel_shapes(model.spec, context.layout.mesh, context.slot)
    for name, parameter in list(model.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        part = nn.Parameter(parameter.new_empty(shapes[name]), parameter.requires_grad)
        model.get_submodule(owner).register_parameter(own_name, part)
    in_place_of = _replacements(model.spec, context)
    for name, module in reversed(list(model.named_modules())):  # a module after those inside it
        kind = "layer" if isinstance(module, Layer) else name.rpartition(".")[2]
        if replacement := in_place_of.get(kind):
            model.set_submodule(name, replacement(module))


def _refuse_empty_parts(spec: ModelSpec, layout: ParallelLayout) -> None:
    """Parts are rounded up, so the last slot's is the first to be empty; FSDP2 has no gradient of what is."""
    last = layout.group(layout.first, ("tp",))[-1]
    for name, shape in tensor_parallel_shapes(spec, layout.mesh, last).items():
        if 0 in shape:
            raise ValueError(
                f"trainer.model.tp = {layout.dims.tp} leaves a slot without any part of {name}; write a divisor of the "
                f"model's num_attention_heads, {spec.num_heads}, and of its intermediate_size, {spec.intermediate_size}"
            )


def _replacements(spec: ModelSpec, context: ParallelContext) -> dict[str, Callable[..., nn.Module]]:
    """What takes the place of a module, by the last part of its name."""
    group = context.group("tp")
    heads = heads_on(spec, group.size(), group.rank())
    return {
        "embed": lambda module: VocabularyParallelEmbedding(module, group),
        "layer": lambda module: SequenceParallelLayer(
            module, group, _shared_weights(module, spec, heads, group.size())
        ),
        "attention": lambda module: HeadParallelAttention(module, heads),
        "qkv_proj": lambda module: ColumnParallelLinear(module, group),
        "gate_up_proj": lambda module: ColumnParallelLinear(module, group),
        "o_proj": lambda module: RowParallelLinear(module, group),
        "down_proj": lambda module: RowParallelLinear(module, group),
        "norm": lambda module: SequenceParallelNorm(module, group),
    }


def _shared_weights(layer: Layer, spec: ModelSpec, heads: Heads, size: int) -> dict[str, SharedRows | None]:
    """The weights of a layer that several of `size` slots have, and which of their rows; None: all."""
    names, cut = [name for name, _ in layer.named_parameters()], tensor_parallel(spec, spec.vocab_size)
    shared: dict[str, SharedRows | None] = {name: None for name in names if name not in cut}
    if share_key_heads(spec, size):
        shared |= {name: _key_rows(spec, heads) for name in names if name.startswith("attention.qkv_proj.")}
    return shared


def _key_rows(spec: ModelSpec, heads: Heads) -> SharedRows:
    """Rows of `qkv_proj` that are of key heads, and of their values."""
    num_queries, num_keys, _ = (count * spec.head_dim for count in heads.counts)
    first, all_keys = heads.keys.start * spec.head_dim, spec.num_kv_heads * spec.head_dim
    places = (
        (slice(num_queries, num_queries + num_keys), slice(first, first + num_keys)),
        (slice(num_queries + num_keys, None), slice(all_keys + first, all_keys + first + num_keys)),
    )
    return SharedRows(2 * all_keys, places)


class SequenceParallelLayer(nn.Module):
    """The textbook's layer on the slot's tokens, with weights whose gradients are summed over the slots."""

    textbook: Layer
    """The layer itself, not as a module of this one: its weights would have two names."""

    def __init__(self, whole: Layer, group: dist.ProcessGroup, shared: dict[str, SharedRows | None]) -> None:
        """`shared`: the weights that several slots have, and which of their rows; None: all."""
        super().__init__()
        for name, module in whole.named_children():
            self.add_module(name, module)
        object.__setattr__(self, "textbook", whole)
        self.group = group
        self.shared = shared

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        weights = [self.get_parameter(name) for name in self.shared]
        summed = sum_gradients(self.group, weights, [*self.shared.values()])
        in_place = dict(zip(self.shared, summed, strict=True))
        return functional_call(self.textbook, in_place, (x, cos, sin, layer, attend), tie_weights=False)


class SequenceParallelNorm(RMSNorm):
    """Norm of the slot's tokens."""

    def __init__(self, whole: RMSNorm, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = sum_gradients(self.group, [self.weight], [None])
        return rms_norm(x, weight, self.eps)


class ColumnParallelLinear(Linear):
    """The slot's outputs of all tokens."""

    def __init__(self, whole: Linear, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """[S, M] -> [T, outputs]."""
        return linear(gather(input, self.group), self.weight, self.bias)


class RowParallelLinear(Linear):
    """The sum, over slots, of what their inputs give."""

    def __init__(self, whole: Linear, group: dist.ProcessGroup) -> None:
        vars(self).update(vars(whole))
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """[T, inputs] -> [S, M]."""
        out = reduce_scatter(linear(input, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class HeadParallelAttention(Attention):
    """Attention over the slot's heads of all tokens."""

    def __init__(self, whole: Attention, heads: Heads) -> None:
        vars(self).update(vars(whole))
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
