"""Writes a version's tensors into a model's own parameters."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ductile.core.layout.model.parameters import frozen_names
from ductile.model.transformer import Transformer
from ductile.parallel import data
from ductile.parallel.parts import SlotParts


@torch.no_grad()
def overwrite_all(model: Transformer, tensors: Mapping[str, Tensor], version: int) -> None:
    """Give the model's parameters the values of these tensors, by its own names: all of them, but that those which
    training does not change may be missing. Raises `ValueError`, with
    nothing changed, when names or shapes are not the model's."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    _refuse_strange(shapes, frozen_names(model.spec), tensors, version)
    for name, values in tensors.items():
        overwrite(parameters[name], values)


def overwrite_parts(model: Transformer, parts: SlotParts, tensors: Mapping[str, Tensor], version: int) -> None:
    """Do as `overwrite_all` for a model of which this slot has `parts`: it gets its boxes of the tensors, which are
    whole."""
    shapes, frozen = {name: parts.shape(name) for name, _ in model.named_parameters()}, frozen_names(model.spec)
    _refuse_strange(shapes, frozen, tensors, version)
    data.fill(model, tensors.items(), parts, may_lack=frozen)


def overwrite(parameter: Tensor, values: Tensor) -> None:
    """Give `parameter`, or a box of it, the values of a contiguous tensor of its shape. It stays as it lies."""
    if parameter.dim() == 2 and not parameter.is_contiguous():
        parameter, values = parameter.t(), values.t()
        if not parameter.is_contiguous():
            values = values.contiguous()  # torch transposes fast only into memory that lies in one piece
    parameter.copy_(values)


def _refuse_strange(
    shapes: Mapping[str, tuple[int, ...]], may_lack: Collection[str], tensors: Mapping[str, Tensor], version: int
) -> None:
    if wrong := sorted((shapes.keys() ^ tensors.keys()) - (shapes.keys() & {*may_lack})):
        raise ValueError(f"version {version} is of another model: {', '.join(wrong[:5])} on one side only")
    for name in tensors:
        if tuple(tensors[name].shape) != shapes[name]:
            raise ValueError(
                f"{name} of version {version} has shape {tuple(tensors[name].shape)}, the model's has {shapes[name]}"
            )
