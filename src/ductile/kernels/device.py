"""What this process's device can do, and how much of its memory has been used."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ductile.core.layout.model.peak import Arithmetic, Peak, known_peak
from ductile.kernels.dispatch import linear

SIZES = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices whose product is timed, by kind of device: large enough for the fastest products."""
MEASURE_S = 0.3
"""Seconds for which products are timed; there are at least two."""

_measured: dict[tuple[torch.device, Arithmetic], Peak] = {}
"""Peaks that this process has measured or looked up."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most that there has been at a time, since the process began; on a GPU that was measured, since then."""

    used_bytes: int
    """Bytes that tensors took on a GPU, or that the process had resident elsewhere."""
    reserved_bytes: int | None
    """Bytes of the GPU that torch's allocator held; None elsewhere."""
    total_bytes: int | None = None
    """Bytes that the GPU has; None elsewhere."""


class DeviceStopwatch:
    """Measures what a device does for what is queued between its making and `stop`. On a GPU it measures by events, and
    nothing waits for the device until somebody asks for the time."""

    def __init__(self, device: str | torch.device) -> None:
        self.is_pending = torch.device(device).type == "cuda"
        """Whether the device may still be at work after `stop`."""
        self._started_s, self._stopped_s = time.perf_counter(), 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.is_pending else []
        for event in self._events[:1]:
            event.record()

    def stop(self) -> None:
        self._stopped_s = time.perf_counter()
        for event in self._events[1:]:
            event.record()

    def seconds(self) -> float:
        """Return the seconds from start to stop, once the device is done."""
        if not self._events:
            return self._stopped_s - self._started_s
        start, stop = self._events
        stop.synchronize()
        return start.elapsed_time(stop) / 1000


def name_of(device: str | torch.device) -> str:
    """A device's name, as torch calls it: "NVIDIA H200"; "cpu"."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_of(device: str | torch.device, arithmetic: Arithmetic, measure: bool = False) -> Peak | None:
    """A device's peak by the table of known devices, or as it was measured in this process. Else it is measured now,
    if `measure`, in less than a second, for which nothing else should be under way on the device. None where it is not
    measured, and where the device has no room for that."""
    device = torch.device(device)
    found = _measured.get((device, arithmetic))
    if found is None and device.type == "cuda" and (known := known_peak(name_of(device), arithmetic)):
        found = _measured[device, arithmetic] = Peak(known, "known")
    if found is None and measure and (flops_per_s := _measure(device, arithmetic)):
        found = _measured[device, arithmetic] = Peak(flops_per_s, "measured")
    return found


def peak_memory(device: str | torch.device) -> PeakMemory:
    device = torch.device(device)
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        return PeakMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), total_bytes)
    return PeakMemory(_resident_bytes(), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether it says that there is no room, on the device or in this process."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def _measure(device: torch.device, arithmetic: Arithmetic) -> float | None:
    """Operations a second; None where a GPU has no room for the matrices. Their memory is given back, and no peak of
    what comes after."""
    try:
        return _fastest(device, arithmetic)
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def _fastest(device: torch.device, arithmetic: Arithmetic) -> float:
    """Operations a second of the fastest of several products of matrices with random numbers."""
    size = SIZES[device.type]
    dtype = torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        linear(left, right)  # the first one loads kernels
        fastest_s, began_s, num_timed = float("inf"), time.perf_counter(), 0
        while num_timed < 2 or time.perf_counter() - began_s < MEASURE_S:
            fastest_s = min(fastest_s, _seconds_of(device, left, right))
            num_timed += 1
    finally:
        torch.set_float32_matmul_precision(precision)
    return 2 * size**3 / fastest_s


def _seconds_of(device: torch.device, left: torch.Tensor, right: torch.Tensor) -> float:
    _wait_for(device)
    start = time.perf_counter()
    linear(left, right)
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
