"""Our streaming writer, read back by the library."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ductile.model.safetensors_writer import SafetensorsEntry, write_safetensors


def raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


def test_the_library_reads_it(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "a scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "é": torch.randn(7).bfloat16(),
    }
    entries = [
        SafetensorsEntry(
            name, {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype], tuple(tensor.shape), tensor.itemsize
        )
        for name, tensor in tensors.items()
    ]
    write_safetensors(tmp_path / "f.safetensors", entries, (raw(tensor) for tensor in tensors.values()))
    with safe_open(tmp_path / "f.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_chunks_may_hold_several_entries(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(6, 2)
    entries = [SafetensorsEntry("top", "F32", (4, 2), 4), SafetensorsEntry("bottom", "F32", (2, 2), 4)]
    write_safetensors(tmp_path / "f.safetensors", entries, [raw(whole)])
    with safe_open(tmp_path / "f.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("top"), whole[:4])
        assert torch.equal(file.get_tensor("bottom"), whole[4:])


@pytest.mark.parametrize("num_elements", [3, 5])
def test_too_few_or_too_many_bytes_are_an_error(num_elements: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{4 * num_elements} bytes for entries of 16 bytes"):
        write_safetensors(tmp_path / "f", [SafetensorsEntry("a", "F32", (4,), 4)], [raw(torch.zeros(num_elements))])
