"""The optimizer, with its state in place from the start, so that a checkpoint always knows what to read and write.

What it keeps is described (`ductile.config.schema.optimizer_state`), and all that saves, moves or builds it reads the
description.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn

from ductile.config.schema.optimizer_state import OptimizerTensor, Supported
from ductile.config.schema.trainer import AdamWConfig
from ductile.parallel.data import like


def make_optimizer(
    config: Supported,
    described: Mapping[str, Sequence[OptimizerTensor]],
    parameters: Mapping[str, nn.Parameter],
    buffers: MutableMapping[str, Tensor] | None = None,
) -> torch.optim.Optimizer:
    """Return one that has all parameters in one group; weight decay goes to every one of them, as torch does by itself.

    What is `described` of each starts as zeros, or lives in the `buffers` called `<name>/<parameter>`: this rank's
    parts, flat, taken out of the mapping.
    """
    optimizer = _torch_optimizer(config, parameters.values())
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        for kept in described[name]:
            dtype: torch.dtype = getattr(torch, kept.dtype)
            if kept.layout == "scalar":
                state[kept.name] = torch.zeros((), dtype=dtype, device=parameter.device)
            elif buffers is None:
                state[kept.name] = torch.zeros_like(parameter.detach(), dtype=dtype)
            else:
                state[kept.name] = like(parameter, buffers.pop(f"{kept.name}/{name}"))
    return optimizer


def _torch_optimizer(config: Supported, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(config, AdamWConfig):
        return torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov and config.momentum > 0,
    )


def set_num_updates(
    optimizer: torch.optim.Optimizer,
    described: Mapping[str, Sequence[OptimizerTensor]],
    parameters: Mapping[str, nn.Parameter],
    num_updates: int,
) -> None:
    """Set the scalars, such as the count that Adam's bias correction keeps for each parameter."""
    for name, parameter in parameters.items():
        for kept in described[name]:
            if kept.layout == "scalar":
                optimizer.state[parameter][kept.name].fill_(float(num_updates))
