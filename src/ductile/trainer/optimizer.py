"""The optimizer, with its state in place from the start, so that a checkpoint always knows what to read and write."""

from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch import Tensor, nn

from ductile.config.trainer import AdamWConfig, OptimConfig, SGDConfig
from ductile.parallel.data import like

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Optimizer state that has a parameter's shape and layout. What else there is follows from the step."""


Supported = AdamWConfig | SGDConfig


def supported(config: OptimConfig) -> Supported:
    """The config itself. Raises ValueError for an optimizer that only the config knows."""
    if isinstance(config, Supported):
        return config
    raise ValueError(f"trainer.optim.type = {config.type!r} is not built yet; use adamw or sgd")


def make_optimizer(
    config: Supported,
    parameters: Iterable[tuple[str, nn.Parameter]],
    buffers: MutableMapping[str, Tensor] | None = None,
) -> torch.optim.Optimizer:
    """One group of all parameters; weight decay goes to every one of them, as torch does by itself.

    Moments start as zeros, or live in the `buffers` called `<moment>/<parameter>`: this rank's parts, flat, taken out
    of the mapping.
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
        for moment in moment_names(config):
            at = None if buffers is None else buffers.pop(f"{moment}/{name}")
            state[moment] = torch.zeros_like(parameter.detach()) if at is None else like(parameter, at)
        if isinstance(config, AdamWConfig):
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return optimizer


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of what the optimizer keeps for a parameter, in the parameter's layout."""
    for name, value in optimizer.state[parameter].items():
        if name in MOMENTS:
            yield name, value


def moment_names(config: Supported) -> tuple[str, ...]:
    """The kinds of moments that `moments` yields for every parameter."""
    if isinstance(config, AdamWConfig):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def set_num_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Set the count of steps that Adam's bias correction keeps for each parameter."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(float(num_steps))
