"""Messages through a gloo group for code that calls torch's own `dist.isend` and `dist.irecv`, such as
`torch.distributed.pipelining`.

What gloo's own lack: they are waited for as long as the group's timeout was when the group was made, whatever
`Groups.set_timeout` has set since; and what lies on a GPU is not sent. Here it goes through memory of the host.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class GlooSendRecv(dist.ProcessGroup):
    """The group, for messages alone. Tags do not tell messages of one slot apart: their order does."""

    def __init__(self, group: dist.ProcessGroup, timeout: Callable[[], timedelta]) -> None:
        super().__init__(group.rank(), group.size())  # pyright: ignore[reportCallIssue]
        self._group, self._timeout = group, timeout

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:
        on_host = [tensor.contiguous().cpu() for tensor in tensors]
        return _Message(self._group.send(on_host, dstRank, tag), self._timeout, on_host, on_host)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:
        on_host = [tensor.new_empty(tensor.shape, device="cpu") if tensor.is_cuda else tensor for tensor in tensors]
        return _Message(self._group.recv(on_host, srcRank, tag), self._timeout, on_host, tensors)


class _Message(dist.Work):
    def __init__(
        self, work: dist.Work, timeout: Callable[[], timedelta], on_host: list[Tensor], tensors: list[Tensor]
    ) -> None:
        super().__init__()
        self._work, self._timeout, self._on_host, self._tensors = work, timeout, on_host, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._work.wait(timeout or self._timeout())
        for on_host, tensor in zip(self._on_host, self._tensors, strict=True):
            if tensor is not on_host:
                tensor.copy_(on_host)
        return done
