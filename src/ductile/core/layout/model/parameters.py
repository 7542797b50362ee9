"""Every parameter of a model: our name and shape, and the Hugging Face tensors that it is made of.

The rule is one and invertible: our tensor is its parts, one below the other (dim 0). Most have one part; `qkv_proj` and
`gate_up_proj` are fused and have three and two. So a folder can be read, published or written tensor by tensor.

Where the model has adapters (`ModelSpec.lora`), those of a module come before its weight: whoever folds them into it
has them then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ductile.core.layout.model.lora import LoraSpec
from ductile.core.layout.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor as a Hugging Face folder has it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor as our model has it."""

    name: str
    parts: tuple[HfTensor, ...]
    is_trained: bool = True
    """Training changes it: of a model with adapters these alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows each part takes: the argument of `torch.split`."""
        return tuple(part.shape[0] for part in self.parts)


def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """All parameters of a model, in the order of a forward pass. Tied embeddings appear once, as `embed.weight`."""
    table = [_same("embed.weight", "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)]
    for layer in range(spec.num_layers):
        table += _layer(spec, f"layers.{layer}.", f"model.layers.{layer}.")
    table.append(_same("norm.weight", "model.norm.weight", spec.hidden_size))
    if not spec.tie_embeddings:
        table.append(_same("lm_head.weight", "lm_head.weight", spec.vocab_size, spec.hidden_size))
    if spec.lora is not None:
        return tuple(replace(each, is_trained=is_adapter(each.name)) for each in table)
    return tuple(table)


@lru_cache(maxsize=8)
def frozen_names(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the parameters that training does not change."""
    return frozenset(each.name for each in parameters(spec) if not each.is_trained)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is one of an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


def is_layer_matrix(name: str) -> bool:
    """Return whether a parameter is a matrix of a layer, an adapter's among them: no embedding, head, norm or bias."""
    return name.startswith("layers.") and (name.endswith("_proj.weight") or is_adapter(name))


def is_norm_or_bias(name: str) -> bool:
    return name.endswith(("norm.weight", ".bias"))


def _layer(spec: ModelSpec, ours: str, theirs: str) -> Iterator[Parameter]:
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
    query, key = spec.num_heads * head, spec.num_kv_heads * head
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    qkv = ((attention + "q_proj", query), (attention + "k_proj", key), (attention + "v_proj", key))
    gate_up = ((mlp + "gate_proj", inner), (mlp + "up_proj", inner))

    yield _same(ours + "attention_norm.weight", theirs + "input_layernorm.weight", hidden)
    yield from _linear(spec.lora, ours + "attention.qkv_proj", qkv, hidden, spec.attention_bias)
    if spec.qk_norm:
        yield _same(ours + "attention.q_norm.weight", attention + "q_norm.weight", head)
        yield _same(ours + "attention.k_norm.weight", attention + "k_norm.weight", head)
    yield from _linear(spec.lora, ours + "attention.o_proj", ((attention + "o_proj", hidden),), query, spec.output_bias)
    yield _same(ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight", hidden)
    yield from _linear(spec.lora, ours + "mlp.gate_up_proj", gate_up, hidden, spec.mlp_bias)
    yield from _linear(spec.lora, ours + "mlp.down_proj", ((mlp + "down_proj", hidden),), inner, spec.mlp_bias)


def _same(ours: str, theirs: str, *shape: int) -> Parameter:
    return Parameter(ours, (HfTensor(theirs, shape),))


def _linear(
    lora: LoraSpec | None, ours: str, parts: tuple[tuple[str, int], ...], inputs: int, bias: bool
) -> Iterator[Parameter]:
    if lora is not None:
        yield from _adapters(lora, ours, parts, inputs)
    yield Parameter(ours + ".weight", tuple(HfTensor(name + ".weight", (outputs, inputs)) for name, outputs in parts))
    if bias:
        yield Parameter(ours + ".bias", tuple(HfTensor(name + ".bias", (outputs,)) for name, outputs in parts))


def _adapters(lora: LoraSpec, ours: str, parts: tuple[tuple[str, int], ...], inputs: int) -> Iterator[Parameter]:
    """The adapters of a module's targets; their names on disk are PEFT's."""
    targets = [(name, outputs) for name, outputs in parts if name.rpartition(".")[2] in lora.targets]
    if targets:
        down = (HfTensor(name + ".lora_A.weight", (lora.rank, inputs)) for name, _ in targets)
        up = (HfTensor(name + ".lora_B.weight", (outputs, lora.rank)) for name, outputs in targets)
        yield Parameter(ours + ".lora_A", tuple(down))
        yield Parameter(ours + ".lora_B", tuple(up))
