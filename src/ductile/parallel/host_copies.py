"""Copies between a device and host memory, beside what the device computes.

On a GPU they run on a stream of their own, which waits for what has been queued so far; pinned host memory lets them.
On a CPU, where both lie in the same memory, they are done at once. What runs on a GPU has not been run by the tests,
which hold every implementation to one contract on a CPU.
"""

from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy under way. Both tensors must stay until it was waited for: no allocator is told of it (by
    `Tensor.record_stream`), as it would use the memory again only once the device has come that far."""

    def wait(self) -> None:
        """Have what is queued on the device from now on come after the copy."""
        ...

    def finish(self) -> None:
        """Return once the copy is done."""
        ...


class HostCopies(Protocol):
    def start(self, source: Tensor, target: Tensor) -> Copy:
        """Copy one tensor to another of its shape, one of them in host memory, behind all that is queued so far."""
        ...


def host_copies(device: torch.device) -> HostCopies:
    """Return the copies of this device."""
    return _StreamCopies(device) if device.type == "cuda" else _ImmediateCopies()


class _Done:
    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass


class _ImmediateCopies:
    def start(self, source: Tensor, target: Tensor) -> Copy:
        target.copy_(source)
        return _Done()


class _StreamCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        # The stream is asked for now: whoever waits may be on another one than who began.
        torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


class _StreamCopies:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, source: Tensor, target: Tensor) -> Copy:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _StreamCopy(event)
