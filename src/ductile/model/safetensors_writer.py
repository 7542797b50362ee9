"""Write a safetensors file while its tensors are still being made.

The library's own writer wants all tensors of a file in memory at once. The format does not: eight bytes with the
header's length, the header (JSON: name -> dtype, shape, offsets), then the bytes. The header needs shapes only.
"""

import json
import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import torch

from ductile.config.checks import weight_headers
from ductile.core.layout.model.parameters import HfTensor

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): spelled for spelled, name in weight_headers.DTYPES.items()}
"""Dtypes that we read and write, and how safetensors spells them."""


def write_safetensors(
    path: Path, tensors: Sequence[HfTensor], dtype: torch.dtype, chunks: Iterable[memoryview]
) -> None:
    """`chunks`, one after the other, are the bytes of `tensors`, one after the other; their borders need not agree."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + prod(tensor.shape) * dtype.itemsize
        header[tensor.name] = {"dtype": DTYPES[dtype], "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file; data starts aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(chunk) for chunk in chunks)
        if written != offset:
            raise ValueError(f"{path}: {written} bytes for tensors of {offset} bytes")
        file.flush()
        os.fsync(file.fileno())
