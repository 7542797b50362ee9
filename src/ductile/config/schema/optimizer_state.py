"""What an optimizer keeps for each parameter, as its config says:

AdamW in float32    exp_avg float32 as the parameter, exp_avg_sq float32 as the parameter, step float32 scalar
AdamW, 8bit         of a matrix exp_avg and exp_avg_sq uint8 as the parameter, each with a scale float32 for each block
SGD with momentum   momentum_buffer float32 as the parameter
Muon                of a layer's matrix momentum_buffer, of the rest what AdamW keeps
sign-SGD            nothing
"""

from dataclasses import dataclass
from typing import Literal

from ductile.config.schema.trainer import AdamWConfig, MuonConfig, OptimConfig, SGDConfig
from ductile.core.layout.model.parameters import is_layer_matrix

SCALE = "_scale"
"""End of the names of 8-bit moments' scales."""


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """A tensor that an optimizer keeps for each parameter."""

    name: str
    """Name in the optimizer's state of a parameter, as torch has it."""
    dtype: str
    layout: Literal["parameter", "scalar", "blocks"] = "parameter"
    """`parameter`: it has the parameter's shape and lies as the parameter does. `scalar`: it is one number, the count
    of updates, which is set on every slot and so neither saved nor moved. `blocks`: it has a number for each block of a
    row, and lies where the block does."""
    is_offloaded: bool = False
    """It lies in host memory, and comes to the device for a step (`trainer.model.optim_cpu_offload`)."""
    columns: int = 0
    """Columns of a block, where it has a number for each."""


def optimizer_state(
    config: OptimConfig, parameter: str, dtype: str, is_offloaded: bool = False, columns: int = 0
) -> tuple[OptimizerTensor, ...]:
    """Return what the optimizer keeps for the parameter of this name and dtype. columns: of the blocks of its rows that
    share a scale where moments have 8 bits (`ductile.core.layout.geometry.strategy.block_columns`); 0: it has none."""

    def kept(name: str, dtype: str, layout: Literal["parameter", "blocks"] = "parameter") -> OptimizerTensor:
        return OptimizerTensor(name, dtype, layout, is_offloaded, columns if layout == "blocks" else 0)

    is_muon = isinstance(config, MuonConfig)
    if (isinstance(config, SGDConfig) and config.momentum) or (is_muon and is_layer_matrix(parameter)):
        return (kept("momentum_buffer", dtype),)
    if not isinstance(config, AdamWConfig | MuonConfig):
        return ()
    step = OptimizerTensor("step", "float32", "scalar")
    moments = ("exp_avg", "exp_avg_sq")
    if isinstance(config, AdamWConfig) and config.moments == "8bit" and columns:
        scales = (kept(name + SCALE, "float32", "blocks") for name in moments)
        return *(kept(name, "uint8") for name in moments), *scales, step
    return *(kept(name, dtype) for name in moments), step
