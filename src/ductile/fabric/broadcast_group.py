"""A group that lives for a few broadcasts: one rank sends to all others.

It is none of torch's global groups: it has no name there that could be used twice, and it ends with its last reference.
Its makers may be of different runs and meet only here, so nothing is asked of their environment.
"""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

ROOT = 0
"""Rank of the one that sends."""


class BroadcastGroup:
    def __init__(self, store: Store, name: str, rank: int, size: int, host: str, timeout_s: float) -> None:
        """Collective among those that make it under this name, which must be new. Raises RuntimeError where they do not
        all come in time. host: address of this machine at which the others reach it."""
        self._timeout = timedelta(seconds=timeout_s)
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = self._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._group = ProcessGroupGloo(PrefixStore(name, store), rank, size, options)

    def broadcast(self, content: torch.Tensor) -> "Broadcast":
        """Begin to send, or to receive, a tensor on the CPU. Raises RuntimeError in a group that has failed."""
        work = self._group.broadcast(content, ROOT, self._timeout)  # pyright: ignore[reportAttributeAccessIssue]
        return Broadcast(work, (self._group, content))


class Broadcast:
    """A broadcast that is under way. It must be waited for before the last reference to its group goes: the group's
    end waits for it, and keeps all other threads of the process waiting with it. Until then it keeps the group's
    sockets open."""

    def __init__(self, work: dist.Work, kept: object) -> None:
        """kept: lives until it is over."""
        self._work: dist.Work | None = work
        self._kept: object = kept
        self._error = ""

    def abandon(self) -> None:
        """Have a thread of its own wait for it: a member that was stopped keeps it until the group's timeout."""
        Thread(target=self.wait, name="abandoned broadcast", daemon=True).start()

    def is_over(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> str:
        """Why it failed, within the group's timeout; "" when it did not."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                self._error = str(error) or type(error).__name__
            self._work = self._kept = None
        return self._error
