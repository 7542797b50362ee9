"""Products of matrices, from the faster of the two libraries that torch has for them on a CPU.

torch multiplies fp32 matrices with MKL, which uses half the width of an AMD processor's vectors; oneDNN, which torch
brings too, uses all of it and is 2.3 times as fast there. On other processors, on GPUs and in other formats torch's own
choice stays.

N rows, K what is summed over, M outputs.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ductile.host import is_amd_with_avx512

SMALLEST = 1 << 21
"""N x K x M from which oneDNN is faster. A call of it takes 10 us longer to begin, and the first of a shape 200."""


class Linear(nn.Linear):
    """torch's linear layer, by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M] -> x weight^T + bias, [N, M], with gradients."""
    if not _is_for_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Linear.apply(x, weight, bias)  # pyright: ignore
    return _by_onednn(x, weight, bias)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K], weight [M, K] -> x weight^T [N, M], where no gradient is wanted."""
    return _by_onednn(x, weight, None) if _is_for_onednn(x, weight) else x @ weight.t()


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() * weight.shape[0] >= SMALLEST
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and onednn_is_faster()
    )


@cache
def onednn_is_faster() -> bool:
    return is_amd_with_avx512() and torch.backends.mkldnn.is_available()


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # what comes from a sum has one number in memory, which oneDNN does not take
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _by_onednn(grad, weight.t(), None) if of_x else None,
            _by_onednn(grad.t(), x.t(), None) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )
