"""The receiver's side of a publish: map the segment, check it, hand out its tensors. No weight is touched before."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ductile.fabric.segment import SegmentUnavailable, map_segment
from ductile.records import Manifest, TensorEntry


class WeightsUnavailable(Exception):
    """A manifest's weights cannot be had, or are not what it says. The text names the version and the cause."""


def receive(manifest: Manifest) -> dict[str, Tensor]:
    """The version's tensors, by name, on the CPU. They are views of the publisher's memory, which is not copied; they
    may be written to, which changes no other reader's, and live on after the version is withdrawn."""
    if manifest.carrier != "shared_memory":
        raise WeightsUnavailable(
            f"version {manifest.version} is offered by {manifest.carrier}; only shared_memory is read"
        )
    try:
        content = map_segment(manifest.location, manifest.num_bytes, manifest.fingerprint)
    except SegmentUnavailable as error:
        raise WeightsUnavailable(f"version {manifest.version} {error}") from error
    return {entry.name: _view(content, entry, manifest) for entry in manifest.tensors}


def _view(content: Tensor, entry: TensorEntry, manifest: Manifest) -> Tensor:
    dtype = vars(torch).get(entry.dtype)
    if not isinstance(dtype, torch.dtype):
        raise WeightsUnavailable(f"version {manifest.version}: {entry.name} has the unknown dtype {entry.dtype!r}")
    end = entry.offset_bytes + entry.num_bytes
    if not 0 <= entry.offset_bytes <= end <= len(content):
        raise WeightsUnavailable(
            f"version {manifest.version}: {entry.name} lies at bytes {entry.offset_bytes} to {end} of {len(content)}"
        )
    flat = content[entry.offset_bytes : end].view(dtype)
    try:
        return flat.view(entry.shape)
    except RuntimeError as error:
        raise WeightsUnavailable(
            f"version {manifest.version}: {entry.name} has {entry.num_bytes} bytes, too many or few for {entry.dtype} "
            f"{list(entry.shape)}"
        ) from error


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
