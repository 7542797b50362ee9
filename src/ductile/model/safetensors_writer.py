"""Write a safetensors file while its tensors are still being made.

The library's own writer wants all tensors of a file in memory at once. The format does not: eight bytes with the
header's length, the header (JSON: name -> dtype, shape, offsets), then the bytes. The header needs shapes only.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    name: str
    dtype: str
    """Dtype of the tensor, as the format spells it: "F32", "BF16"."""
    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.itemsize


def write_safetensors(path: Path, entries: Sequence[SafetensorsEntry], chunks: Iterable[memoryview]) -> None:
    """`chunks`, one after the other, are the bytes of `entries`, one after the other; their borders need not agree."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file; data starts aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(chunk) for chunk in chunks)
        if written != offset:
            raise ValueError(f"{path}: {written} bytes for entries of {offset} bytes")
        file.flush()
        os.fsync(file.fileno())
