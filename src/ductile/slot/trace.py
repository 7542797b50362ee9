"""What a slot's process does for a while, operator by operator, as torch's own profiler sees it."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function
from torch.autograd.profiler_util import FunctionEvent

from ductile.messages.workers import CLOCK_EVENT, Traced

COLLECTIVES = {"CPU": "gloo:", "CUDA": "nccl"}
"""How the names of what carries a collective out begin, by where it runs. That a host launches NCCL's kernels takes no
time of the device, and is not among them."""


class SlotTrace:
    """Trace of this process, from its making to `end`, which the same thread calls.

    It sees that thread, with what autograd does for it, and the GPU. `torch.profiler` would also write down the world's
    process groups, and a slot is in none.
    """

    def __init__(self, device: str, file: str) -> None:
        """file: written at the end in Chrome's format, whole or not at all; "" writes none."""
        self._file, self._on_gpu = file, device.startswith("cuda")
        self._profile = profile(use_device="cuda" if self._on_gpu else None, use_kineto=True)
        self._profile.__enter__()
        with record_function(f"{CLOCK_EVENT}{time.time_ns()}"):
            self._began_s = time.perf_counter()

    def end(self) -> Traced:
        """Raises OSError where the file cannot be written."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began_s
        self._profile.__exit__(None, None, None)
        if self._file:
            partial = f"{self._file}.partial"
            Path(self._file).parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(partial)
            os.replace(partial, self._file)
        return Traced(seconds, communication_s(self._profile.function_events or ()))


def communication_s(events: Iterable[FunctionEvent]) -> float:
    """Return the seconds in which a collective was under way; those of several at a time count once. A wait for ranks
    that come to it later is part of a collective."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if (prefix := COLLECTIVES.get(event.device_type.name)) and event.name.startswith(prefix)
    )
    covered_us, until_us = 0.0, float("-inf")
    for start_us, end_us in spans:
        covered_us += max(0.0, end_us - max(start_us, until_us))
        until_us = max(until_us, end_us)
    return covered_us / 1e6
