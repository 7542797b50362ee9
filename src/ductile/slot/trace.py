"""Traces of a slot's process, operator by operator, by torch's own profiler."""

import os
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch
from torch.autograd.profiler import profile, record_function

from ductile.messages.workers import CLOCK_EVENT, Traced

COLLECTIVES = {"CPU": "gloo:", "CUDA": "nccl"}
"""How the names of what carries a collective out begin, by where it runs. That a host launches NCCL's kernels takes no
time of the device, and is not among them."""


class TracedEvent(Protocol):
    """Fields that are read of an event of torch's profiler."""

    def name(self) -> str: ...

    def start_ns(self) -> int: ...

    def end_ns(self) -> int: ...

    def device_type(self) -> Enum: ...


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
        # Not `function_events`, which takes half a minute to make a tree of a hundred thousand.
        results = self._profile.kineto_results
        return Traced(seconds, communication_s(results.events() if results else ()))


def communication_s(events: Iterable[TracedEvent]) -> float:
    """Return the seconds in which a collective was under way; those of several at a time count once. A wait for ranks
    that come to it later is part of a collective."""
    spans = sorted(
        (event.start_ns(), event.end_ns())
        for event in events
        if (prefix := COLLECTIVES.get(event.device_type().name)) and event.name().startswith(prefix)
    )
    covered_ns = until_ns = 0
    for start_ns, end_ns in spans:
        covered_ns += max(0, end_ns - max(start_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return covered_ns / 1e9
