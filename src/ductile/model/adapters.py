"""Values of a model's adapters: those that training begins with, and the weights with adapters folded into them."""

from collections.abc import Iterable, Iterator
from math import sqrt

import torch
from torch import Tensor

from ductile.core.layout.model.lora import FUSED
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.linear import spread


def first_adapters(spec: ModelSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield our names and full fp32 tensors of the adapters, as PEFT begins with them: each A uniform, by Kaiming's
    rule with a = sqrt(5), which is within 1 / sqrt(inputs); each B zero. Equal seeds give equal values."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters(spec):
        if parameter.name.endswith(".lora_A"):
            bound = 1 / sqrt(parameter.shape[1])
            yield parameter.name, torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif parameter.name.endswith(".lora_B"):
            yield parameter.name, torch.zeros(parameter.shape)


def merged(spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model without adapters, W + (alpha / rank) B A where it has some. tensors: full, in the
    order of `parameters(spec)`, which has a module's adapters before its weight."""
    down: Tensor | None = None
    up: Tensor | None = None
    for name, tensor in tensors:
        if name.endswith(".lora_A"):
            down = tensor
        elif name.endswith(".lora_B"):
            up = tensor
        elif down is not None and up is not None and spec.lora is not None:
            module = name.split(".", 2)[2].removesuffix(".weight")  # layers.3.mlp.down_proj.weight
            rows = [spec.projections[each][1] for each in FUSED[module]]
            spread_up = spread(up, rows, spec.lora.among(module))
            # In fp64, as a GPU may multiply numbers of fp32 with fewer bits.
            change = spec.lora.scale * (spread_up.double() @ down.double())
            yield name, (tensor.double() + change).to(tensor.dtype)
            down = up = None
        else:
            yield name, tensor
