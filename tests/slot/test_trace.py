"""How much of a trace is communication."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from ductile.slot.trace import communication_s

CPU, CUDA = DeviceType.CPU, DeviceType.CUDA


def event(name: str, start_us: float, end_us: float, device: DeviceType = CPU) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start_us, end=end_us), device_type=device)


@pytest.mark.parametrize(
    ("events", "communication_us"),
    [
        ([], 0),
        ([event("aten::mm", 0, 9), event("nccl:all_reduce", 0, 9)], 0),
        ([event("gloo:all_reduce", 1, 3), event("gloo:all_gather", 5, 6)], 3),
        ([event("gloo:all_gather", 2, 9), event("gloo:all_reduce", 1, 3), event("gloo:all_reduce", 4, 5)], 8),
        ([event("ncclDevKernel_AllGather_RING_LL", 1, 3, CUDA), event("gemm", 2, 9, CUDA)], 2),
    ],
)
def test_collectives_at_one_time_count_once(events: list[SimpleNamespace], communication_us: float) -> None:
    assert communication_s(events) == pytest.approx(communication_us / 1e6)
