"""AdamW whose moments have 8 bits a number.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861): a number is one of 256 of a
table that is dense near zero, times the largest of its block. Of the second moment it is the root that is kept, and
none but 0 becomes 0: a number whose gradient is a ten thousandth of its neighbour's would else be divided by `eps`
alone, and leap. A block is a part of one row of the whole matrix, so a
number is rounded alike in every layout, and a resize moves codes and scales byte by byte
(`ductile.core.layout.geometry.strategy.block_columns`).
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from ductile.config.schema.optimizer_state import SCALE
from ductile.config.schema.trainer import AdamWConfig
from ductile.parallel.data import local_shard

TENTHS = 7
"""Powers of ten that the table spans, from 1e-6 to 1."""


class AdamW8bit:
    """The update rule of some matrices."""

    def __init__(self, config: AdamWConfig, parameters: Mapping[str, nn.Parameter], weight_decay: float) -> None:
        self._config, self._parameters, self._weight_decay = config, parameters, weight_decay

    @torch.no_grad()
    def step(self, lr: float, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Update the parameters by their gradients."""
        config = self._config
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None, "the trainer has looked for a gradient"
            weights, gradient, kept = local_shard(parameter), local_shard(parameter.grad).float(), state[name]
            kept["step"].add_(1)
            num_updates = kept["step"].double()
            first = _read(kept, "exp_avg", is_signed=True).lerp_(gradient, 1 - config.betas1)
            second = _read(kept, "exp_avg_sq", is_signed=False).square_()
            second.mul_(config.betas2).addcmul_(gradient, gradient, value=1 - config.betas2)
            _write(kept, "exp_avg", first, is_signed=True)
            _write(kept, "exp_avg_sq", second.sqrt_(), is_signed=False)
            # Both bias corrections; on the device, as nothing here waits for it.
            largest = (lr / (1 - config.betas1**num_updates)).float()
            root = second.div_((1 - config.betas2**num_updates).sqrt().float()).add_(config.eps)
            weights.mul_(1 - lr * self._weight_decay).sub_(first.div_(root).mul_(largest))


def quantized(numbers: Tensor, columns: int, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes [rows, width] uint8 and the scales [rows, width / columns] of numbers [rows, width], fp32."""
    blocks = numbers.unflatten(-1, (-1, columns))
    scales = blocks.abs().amax(-1)
    shares = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(shares, _table(is_signed, numbers.device)[1], out_int32=True)
    if not is_signed:
        codes.clamp_(min=1).masked_fill_(blocks == 0, 0)
    return codes.to(torch.uint8).view(numbers.shape), scales


def dequantized(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """Return the numbers, fp32, that `quantized` gave these codes and scales."""
    if not codes.numel():
        return codes.float()
    table = _table(is_signed, codes.device)[0]
    blocks = table[codes.int()].unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales.unsqueeze(-1)).view(codes.shape)


def _read(kept: Mapping[str, Tensor], name: str, is_signed: bool) -> Tensor:
    return dequantized(kept[name], kept[name + SCALE], is_signed)


def _write(kept: Mapping[str, Tensor], name: str, numbers: Tensor, is_signed: bool) -> None:
    if not numbers.numel():
        return
    codes, scales = quantized(numbers, numbers.shape[-1] // kept[name + SCALE].shape[-1], is_signed)
    kept[name].copy_(codes)
    kept[name + SCALE].copy_(scales)


@lru_cache(maxsize=8)
def _table(is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 numbers of the table, in order, and the borders between them.

    Between two powers of ten they are evenly spaced, twice as many as between the two before (the paper's 1.3: dynamic
    tree quantization). Without a sign there are twice as many again.
    """
    numbers = [0.0, 1.0]
    for power in range(TENTHS):
        spaces = torch.linspace(0.1, 1, 2 ** (power + (0 if is_signed else 1)) + 1, dtype=torch.float64)
        middles = 10.0 ** (power + 1 - TENTHS) * (spaces[:-1] + spaces[1:]) / 2
        numbers += middles.tolist()
        numbers += (-middles).tolist() if is_signed else []
    ordered = torch.tensor(sorted(numbers), dtype=torch.float64)
    borders = (ordered[:-1] + ordered[1:]) / 2
    return ordered.float().to(device), borders.float().to(device)
