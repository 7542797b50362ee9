"""The optimizer, with its state in place from the start, so that a checkpoint always knows what to read and write.

What it keeps is described (`state_of`), and all that saves, moves or builds it reads the description:

    AdamW in float32    exp_avg float32 as the parameter, exp_avg_sq float32 as the parameter, step float32 scalar
    SGD with momentum   momentum_buffer float32 as the parameter
"""

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ductile.config.trainer import AdamWConfig, OptimConfig, SGDConfig
from ductile.parallel.data import like

Supported = AdamWConfig | SGDConfig


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """A tensor that an optimizer keeps for each parameter."""

    name: str
    """Name in the optimizer's state of a parameter, as torch has it."""
    dtype: str
    layout: Literal["parameter", "scalar"] = "parameter"
    """`parameter`: it has the parameter's shape and lies as the parameter does. `scalar`: it is one number, the count
    of updates, which is set on every slot and so neither saved nor moved."""


def supported(config: OptimConfig) -> Supported:
    """The config itself. Raises ValueError for an optimizer that only the config knows."""
    if isinstance(config, Supported):
        return config
    raise ValueError(f"trainer.optim.type = {config.type!r} is not built yet; use adamw or sgd")


def make_optimizer(
    config: Supported,
    described: Sequence[OptimizerTensor],
    parameters: Iterable[tuple[str, nn.Parameter]],
    buffers: MutableMapping[str, Tensor] | None = None,
) -> torch.optim.Optimizer:
    """One group of all parameters; weight decay goes to every one of them, as torch does by itself.

    What is `described` starts as zeros, or lives in the `buffers` called `<name>/<parameter>`: this rank's parts, flat,
    taken out of the mapping.
    """
    named = dict(parameters)
    trained = list(named.values())
    if isinstance(config, AdamWConfig):
        optimizer = torch.optim.AdamW(
            trained,
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    else:
        optimizer = torch.optim.SGD(
            trained,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov and config.momentum > 0,
        )
    for name, parameter in named.items():
        state = optimizer.state[parameter]
        for kept in described:
            dtype: torch.dtype = getattr(torch, kept.dtype)
            if kept.layout == "scalar":
                state[kept.name] = torch.zeros((), dtype=dtype, device=parameter.device)
            elif buffers is None:
                state[kept.name] = torch.zeros_like(parameter.detach(), dtype=dtype)
            else:
                state[kept.name] = like(parameter, buffers.pop(f"{kept.name}/{name}"))
    return optimizer


def state_of(config: Supported, dtype: str) -> tuple[OptimizerTensor, ...]:
    """What the optimizer keeps for each parameter of this dtype."""
    if isinstance(config, AdamWConfig):
        moments = OptimizerTensor("exp_avg", dtype), OptimizerTensor("exp_avg_sq", dtype)
        return *moments, OptimizerTensor("step", "float32", "scalar")
    return (OptimizerTensor("momentum_buffer", dtype),) if config.momentum else ()


def set_num_updates(optimizer: torch.optim.Optimizer, described: Sequence[OptimizerTensor], num_updates: int) -> None:
    """Set the scalars, such as the count that Adam's bias correction keeps for each parameter."""
    for kept in described:
        if kept.layout == "scalar":
            for state in optimizer.state.values():
                state[kept.name].fill_(float(num_updates))
