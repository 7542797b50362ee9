"""What an optimizer keeps for each parameter, as its config says:

AdamW in float32    exp_avg float32 as the parameter, exp_avg_sq float32 as the parameter, step float32 scalar
SGD with momentum   momentum_buffer float32 as the parameter
"""

from dataclasses import dataclass
from typing import Literal

from ductile.config.schema.trainer import AdamWConfig, OptimConfig, SGDConfig

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
    is_offloaded: bool = False
    """It lies in host memory, and comes to the device for a step (`trainer.model.optim_cpu_offload`)."""


def supported(config: OptimConfig) -> Supported:
    """The config itself. Raises ValueError for an optimizer that only the config knows."""
    if isinstance(config, Supported):
        return config
    raise ValueError(f"trainer.optim.type = {config.type!r} is not built yet; use adamw or sgd")


def optimizer_state(
    config: Supported, parameter: str, dtype: str, is_offloaded: bool = False
) -> tuple[OptimizerTensor, ...]:
    """Return what the optimizer keeps for the parameter of this name and dtype."""
    if isinstance(config, AdamWConfig):
        moments = (OptimizerTensor(name, dtype, is_offloaded=is_offloaded) for name in ("exp_avg", "exp_avg_sq"))
        return *moments, OptimizerTensor("step", "float32", "scalar")
    return (OptimizerTensor("momentum_buffer", dtype, is_offloaded=is_offloaded),) if config.momentum else ()
