"""How much of a trace is communication."""

from enum import Enum
from types import SimpleNamespace

import pytest

from ductile.slot.trace import communication_s

DeviceType = Enum("DeviceType", ["CPU", "CUDA"])
CPU, CUDA = DeviceType.CPU, DeviceType.CUDA


def event(name: str, start_us: int, end_us: int, device: DeviceType = CPU) -> SimpleNamespace:
    times = {"start_ns": 1000 * start_us, "end_ns": 1000 * end_us}
    told = {"name": name, "device_type": device, **times}
    return SimpleNamespace(**{key: lambda value=value: value for key, value in told.items()})


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
