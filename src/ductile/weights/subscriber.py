"""The receiver's side of a publish: map the segment, check it, hand out its tensors. No weight is touched before."""

import mmap
import os

import torch

from ductile.records import Manifest, TensorEntry
from ductile.weights.fingerprint import fingerprint


class WeightsUnavailable(Exception):
    """A manifest's weights cannot be had, or are not what it says. The text names the version and the cause."""


def receive(manifest: Manifest) -> dict[str, torch.Tensor]:
    """The version's tensors, by name, on the CPU. They are views of the publisher's memory, which is not copied.

    The mapping is private: the tensors may be written to, which changes nobody else's. It lives as long as any of
    the tensors does, also after the version is withdrawn or its publisher dies.
    """
    if manifest.carrier != "shared_memory":
        raise WeightsUnavailable(
            f"version {manifest.version} is offered by {manifest.carrier}; only shared_memory is read"
        )
    if manifest.num_bytes == 0:
        content = torch.empty(0, dtype=torch.uint8)
    else:
        mapped = _map(manifest)
        content = torch.frombuffer(mapped, dtype=torch.uint8)
    found = fingerprint(content.numpy().data)
    if found != manifest.fingerprint:
        raise WeightsUnavailable(
            f"version {manifest.version} at {manifest.location} is damaged: its fingerprint is {found:016x}, "
            f"the manifest says {manifest.fingerprint:016x}"
        )
    return {entry.name: _view(content, entry, manifest) for entry in manifest.tensors}


def _map(manifest: Manifest) -> mmap.mmap:
    try:
        fd = os.open(manifest.location, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsUnavailable(
            f"version {manifest.version} is gone: {manifest.location} cannot be opened ({error.strerror}); "
            "its publisher ended or withdrew it"
        ) from error
    try:
        # The descriptor's number may serve another file by now; a file of another size never gets mapped.
        size_bytes = os.fstat(fd).st_size
        if size_bytes != manifest.num_bytes:
            raise WeightsUnavailable(
                f"version {manifest.version} at {manifest.location} has {size_bytes} bytes, the manifest says "
                f"{manifest.num_bytes}; its publisher withdrew it"
            )
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


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
