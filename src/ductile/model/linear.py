"""Linear layers, and those with adapters beside their weight (`ductile.core.layout.model.lora`).

T tokens, r rank.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ductile.core.layout.model.lora import FUSED, LoraSpec
from ductile.core.layout.model.spec import ModelSpec
from ductile.kernels.dispatch import linear

Product = Callable[..., Tensor]
"""x [T, inputs], weight [outputs, inputs], and a bias if there is one -> [T, outputs], as `dispatch.linear`."""


class Linear(nn.Linear):
    """torch's linear layer for rows of a packed batch."""

    product: Product = staticmethod(linear)
    """What multiplies with the weight. A module may have its own (`ductile.parallel.float8`)."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)


class LoraLinear(Linear):
    """Linear layer whose weight stays, and adapters of some of the projections that are fused into it."""

    def __init__(self, inputs: int, rows: Sequence[int], bias: bool, lora: LoraSpec, is_target: Sequence[bool]) -> None:
        """rows: outputs of each projection. is_target: whether it has an adapter; one of them has."""
        super().__init__(inputs, sum(rows), bias=bias)
        self.rows, self.is_target, self.scale = rows, is_target, lora.scale
        outputs = sum(self.rows_of_targets)
        self.lora_A = nn.Parameter(torch.empty(lora.rank * sum(is_target), inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, lora.rank))

    @property
    def rows_of_targets(self) -> list[int]:
        return [rows for rows, is_target in zip(self.rows, self.is_target, strict=True) if is_target]

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.change(input, self.lora_A, self.up())

    def up(self) -> Tensor:
        """The Bs as one factor of what the As are the other of: [outputs, r x targets]."""
        return spread(self.lora_B, self.rows, self.is_target)

    def change(self, input: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return the adapters' share: input [T, inputs], down [n, inputs], up [outputs, n] -> [T, outputs]."""
        return linear(linear(input, down) * self.scale, up)


def spread(up: Tensor, rows: Sequence[int], is_target: Sequence[bool]) -> Tensor:
    """The Bs of a module's targets, one below the other [their rows, r], with the columns of each where the rows of its
    own A are, and zeros elsewhere: [all rows, r x targets]."""
    if len(rows) == 1:
        return up
    each = list(zip(rows, is_target, strict=True))
    of_targets = iter(up.split([length for length, has in each if has]))
    return torch.block_diag(*(next(of_targets) if has else up.new_empty(length, 0) for length, has in each))


def make_linear(spec: ModelSpec, module: str, inputs: int, rows: Sequence[int], bias: bool) -> Linear:
    """Return the linear layer of a module such as "mlp.gate_up_proj", whose projections have so many outputs each, with
    the adapters that the spec has there."""
    is_target = spec.lora.among(module) if spec.lora else (False,) * len(FUSED[module])
    if spec.lora is None or not any(is_target):
        return Linear(inputs, sum(rows), bias=bias)
    return LoraLinear(inputs, rows, bias, spec.lora, is_target)
