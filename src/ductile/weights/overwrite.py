"""Writes a version's tensors into a model's own parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def overwrite_all(model: nn.Module, tensors: Mapping[str, Tensor], version: int) -> None:
    """The model's parameters get the values of these tensors, all of them by its own names. Raises `ValueError`, with
    nothing changed, when names or shapes are not the model's."""
    parameters = dict(model.named_parameters())
    if wrong := sorted(parameters.keys() ^ tensors.keys()):
        raise ValueError(f"version {version} is of another model: {', '.join(wrong[:5])} on one side only")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise ValueError(
                f"{name} of version {version} has shape {tuple(tensors[name].shape)}, "
                f"the model's has {tuple(parameter.shape)}"
            )
    for name, parameter in parameters.items():
        overwrite(parameter, tensors[name])


def overwrite(parameter: Tensor, values: Tensor) -> None:
    """`parameter` gets the values of a contiguous tensor of its shape, and stays as it lies."""
    if parameter.dim() == 2 and not parameter.is_contiguous():
        parameter, values = parameter.t(), values.t()  # torch transposes fast into memory that lies in order
    parameter.copy_(values)
