"""Our streaming writer, read back by the library."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ductile.core.layout.model.parameters import HfTensor
from ductile.model.safetensors_writer import write_safetensors


def raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    drawn = {"a": torch.randn(3, 5), "a scalar": torch.tensor(2.5), "nothing": torch.empty(0, 4), "é": torch.randn(7)}
    tensors = {name: tensor.to(dtype) for name, tensor in drawn.items()}
    described = [HfTensor(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(tmp_path / "f.safetensors", described, dtype, (raw(tensor) for tensor in tensors.values()))
    with safe_open(tmp_path / "f.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert file.get_tensor(name).dtype == dtype
            assert torch.equal(file.get_tensor(name), tensor)


def test_chunks_may_hold_several_entries(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(6, 2)
    parts = [HfTensor("top", (4, 2)), HfTensor("bottom", (2, 2))]
    write_safetensors(tmp_path / "f.safetensors", parts, torch.float32, [raw(whole)])
    with safe_open(tmp_path / "f.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("top"), whole[:4])
        assert torch.equal(file.get_tensor("bottom"), whole[4:])


@pytest.mark.parametrize("num_elements", [3, 5])
def test_too_few_or_too_many_bytes_are_an_error(num_elements: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{4 * num_elements} bytes for tensors of 16 bytes"):
        write_safetensors(tmp_path / "f", [HfTensor("a", (4,))], torch.float32, [raw(torch.zeros(num_elements))])
