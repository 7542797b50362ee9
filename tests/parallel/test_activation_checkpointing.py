"""A layer computes again what it is told to, and nothing else; gradients keep every bit."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ductile.config.schema.model import ActivationCheckpointing
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel import activation_checkpointing
from ductile.parallel.activation_checkpointing import ATTENTION, PRODUCTS
from tests.trainer.naive import make_samples

NUM_LAYERS = 3
SPEC = ModelSpec("qwen3", 102, 16, 24, num_layers=NUM_LAYERS, num_heads=4, num_kv_heads=2, head_dim=4, qk_norm=True)
NUM_DOCUMENTS = 3
"""Each is a call of attention in a layer."""


class Calls(TorchDispatchMode):
    """Counts the operators that are run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def of(self, operators: frozenset[str]) -> int:
        return sum(self.counts[name] for name in operators)


def gradients(config: ActivationCheckpointing | None) -> tuple[list[Tensor], Calls]:
    """Return the gradients of all weights, and what the backward pass has run."""
    torch.manual_seed(7)
    model = Transformer(SPEC)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if config is not None:
        activation_checkpointing.apply(model, config)
    packed = PackedSamples.of(make_samples((31, 7, 18)[:NUM_DOCUMENTS], seed=1))
    logprobs, _ = packed.score(model)
    with Calls() as calls:
        logprobs.sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], calls


@pytest.mark.parametrize(
    ("config", "products", "attentions"),
    [
        # Recomputation stops once all is there that the backward pass asks for: nobody asks for what `down_proj` gives.
        ({"mode": "full"}, 3, 1),
        ({"mode": "full", "freq": 2}, 3, 1),
        ({"mode": "selective", "targets": ["norm"]}, 0, 0),
        ({"mode": "selective", "targets": ["attn_proj"]}, 1, 0),
        ({"mode": "selective", "targets": ["mlp"]}, 1, 0),
        ({"mode": "selective", "targets": ["attn_proj", "mlp"]}, 2, 0),
        ({"mode": "selective", "targets": ["norm", "attn_proj", "mlp", "mlp"]}, 3, 0),
    ],
    ids=str,
)
def test_a_layer_runs_again_what_it_is_told_to(config: dict[str, Any], products: int, attentions: int) -> None:
    plain, of_plain = gradients(None)
    ours, calls = gradients(ActivationCheckpointing.model_validate(config))
    assert all(map(torch.equal, ours, plain))
    num_layers = len(range(0, NUM_LAYERS, config.get("freq", 1)))
    assert calls.of(PRODUCTS) - of_plain.of(PRODUCTS) == products * num_layers
    assert calls.of(ATTENTION) - of_plain.of(ATTENTION) == attentions * NUM_DOCUMENTS * num_layers
