"""Writes a version's tensors into a model's own parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ductile.model.transformer import Transformer
from ductile.parallel import data
from ductile.parallel.parts import SlotParts


@torch.no_grad()
def overwrite_all(model: nn.Module, tensors: Mapping[str, Tensor], version: int) -> None:
    """Give the model's parameters the values of these tensors, all of them by its own names. Raises `ValueError`, with
    nothing changed, when names or shapes are not the model's."""
    parameters = dict(model.named_parameters())
    _refuse_strange({name: tuple(parameter.shape) for name, parameter in parameters.items()}, tensors, version)
    for name, parameter in parameters.items():
        overwrite(parameter, tensors[name])


def overwrite_parts(model: Transformer, parts: SlotParts, tensors: Mapping[str, Tensor], version: int) -> None:
    """Do as `overwrite_all` for a model of which this slot has `parts`: it gets its boxes of the tensors, which are
    whole."""
    _refuse_strange({name: parts.shape(name) for name, _ in model.named_parameters()}, tensors, version)
    data.fill(model, tensors.items(), parts)


def overwrite(parameter: Tensor, values: Tensor) -> None:
    """Give `parameter`, or a box of it, the values of a contiguous tensor of its shape. It stays as it lies."""
    if parameter.dim() == 2 and not parameter.is_contiguous():
        parameter, values = parameter.t(), values.t()
        if not parameter.is_contiguous():
            values = values.contiguous()  # torch transposes fast only into memory that lies in one piece
    parameter.copy_(values)


def _refuse_strange(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], version: int) -> None:
    if wrong := sorted(shapes.keys() ^ tensors.keys()):
        raise ValueError(f"version {version} is of another model: {', '.join(wrong[:5])} on one side only")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name} of version {version} has shape {tuple(tensors[name].shape)}, the model's has {shape}"
            )
