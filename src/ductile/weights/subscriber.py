"""The receiver's side of a publish: map the segment, check it, hand out its tensors. No weight is touched before."""

import torch

from ductile.fabric.segment import SegmentUnavailable, map_segment
from ductile.records import Manifest, TensorEntry


class WeightsUnavailable(Exception):
    """A manifest's weights cannot be had, or are not what it says. The text names the version and the cause."""


def receive(manifest: Manifest) -> dict[str, torch.Tensor]:
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


def _view(content: torch.Tensor, entry: TensorEntry, manifest: Manifest) -> torch.Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
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


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
