"""Activation checkpointing: what a layer's backward pass needs is computed again there, instead of kept until then.

`full`: of a layer its input is kept. `selective`: what `targets` names is computed again, and the rest is kept:

| target | computed again |
|---|---|
| `norm` | norms, and what else is done element by element: rotation of heads, SwiGLU |
| `attn_proj` | products before and behind attention, norms and rotation of heads; not attention itself |
| `mlp` | products of the MLP, and SwiGLU |

Attention itself is computed again by `full` alone, and by cp's ring, which merges it from parts that nobody keeps.

It is `torch.utils.checkpoint`'s recomputation without reentrance, which runs the same functions on the same inputs,
with the random numbers of the first time: losses and gradients keep every bit. Collectives of tp and cp inside a layer
are run again, by all slots in the same order.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ductile.config.schema.model import ActivationCheckpointing
from ductile.model.transformer import Layer, Transformer
from ductile.parallel.ring import RingAttention

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"})
"""Operators that `linear` comes down to."""
ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)
"""Operators that attention comes down to, and that `selective` never runs again."""


def apply(model: Transformer, config: ActivationCheckpointing) -> None:
    """Have every `freq`-th layer of the whole model checkpoint what it runs, in whichever stage it is. Names of
    parameters stay."""
    for number, layer in model.layers.items():
        if int(number) % config.freq == 0:
            assert isinstance(layer, Layer)
            if config.mode == "full":
                _checkpoint(layer)
            else:
                _checkpoint_targets(layer, {*config.targets})


def _checkpoint_targets(layer: Layer, targets: Collection[str]) -> None:
    products = _RunProducts(again_in=[name for name in ("attn_proj", "mlp") if name in targets])
    products.watch(layer.attention, "attn_proj")
    products.watch(layer.mlp, "mlp")
    if "norm" in targets:
        _checkpoint(layer, products.contexts)
        return
    if "attn_proj" in targets:
        _checkpoint(layer.attention, products.contexts)
    if "mlp" in targets:
        _checkpoint(layer.mlp, products.contexts)


def _checkpoint(module: nn.Module, contexts: Callable[[], Any] | None = None) -> None:
    """Have the module's forward be run again in the backward pass. FSDP2's hooks stay around it: they gather its
    weights before either."""
    others = {} if contexts is None else {"context_fn": contexts}
    vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False, **others)


class _RunProducts:
    """Policy of what a layer computes again: of products, those of some modules; of the rest all but attention."""

    def __init__(self, again_in: Collection[str]) -> None:
        self._again_in = again_in
        self._within = ""
        """Target whose module runs now."""
        self._keeps_attention = True

    def watch(self, module: nn.Module, target: str) -> None:
        """Know the module's products as those of a target."""
        vars(module)["forward"] = partial(self._run, target, module.forward)

    def contexts(self) -> Any:
        """Return the contexts of a forward pass and of its recomputation."""
        return create_selective_checkpoint_contexts(self._policy)

    def _run(self, target: str, forward: Callable[..., Any], *inputs: Any) -> Any:
        self._keeps_attention = not any(isinstance(each, RingAttention) for each in inputs)
        with self._in(target):
            return forward(*inputs)

    @contextmanager
    def _in(self, target: str) -> Iterator[None]:
        self._within = target
        try:
            yield
        finally:
            self._within = ""

    def _policy(self, context: object, operator: OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
        name = operator.name().partition(".")[0]
        keeps = self._keeps_attention if name in ATTENTION else name in PRODUCTS and self._within not in self._again_in
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
