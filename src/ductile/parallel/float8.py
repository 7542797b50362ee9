"""Gives the linear layers of a model products of 8 bits (`ductile.kernels.float8`): those of its layers, not the
head."""

from ductile.kernels import float8
from ductile.model.linear import Linear
from ductile.model.transformer import Transformer


def apply(model: Transformer) -> None:
    """Have the layers multiply by 8 bits. With tp they are the slot's parts already. Adapters stay as they are.

    Raises ValueError where a slot's part has inputs or outputs that the products cannot have."""
    for name, module in model.layers.named_modules():
        if not isinstance(module, Linear):
            continue
        outputs, inputs = module.weight.shape
        if outputs % float8.MULTIPLE or inputs % float8.MULTIPLE:
            raise ValueError(
                f"trainer.model.fp8 needs inputs and outputs that are multiples of {float8.MULTIPLE}, and "
                f"layers.{name} has {inputs} and {outputs} on a slot. Write false, or another trainer.model.tp"
            )
        vars(module)["product"] = float8.linear
