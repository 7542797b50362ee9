from pathlib import Path

import pytest
import torch

from ductile.fabric import pages


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("size", [0, 3, (1 << 21) - 1, 3 * (1 << 20) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_like_any_other(size: int, dtype: torch.dtype) -> None:
    buffer = pages.zeros(size, dtype, "cpu")
    assert torch.equal(buffer, torch.zeros(size, dtype=dtype))
    buffer.fill_(2)
    assert buffer.sum(dtype=torch.float64) == 2 * size


def test_memory_is_there_at_once_and_gone_with_the_last_reference() -> None:
    num_bytes = 256 << 20
    before = resident_bytes()
    buffer = pages.zeros(num_bytes // 4, torch.float32, "cpu")
    assert resident_bytes() - before > 0.9 * num_bytes
    part = buffer[: 1 << 10]
    del buffer
    assert resident_bytes() - before > 0.9 * num_bytes
    del part
    assert resident_bytes() - before < 0.1 * num_bytes


def test_on_demand_only_what_is_used_is_there() -> None:
    num_bytes = 256 << 20
    before = resident_bytes()
    buffer = pages.zeros_on_demand((4, num_bytes // 16), torch.float32, "cpu")
    assert resident_bytes() - before < 0.1 * num_bytes
    buffer[0] = 1
    assert 0.2 * num_bytes < resident_bytes() - before < 0.4 * num_bytes
    assert not buffer[1, :8].any()
