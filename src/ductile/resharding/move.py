"""One rank's part of a plan, between the memory of two inventories."""

import torch
from torch import Tensor

from ductile.core.transfer.cells import NotReshardable
from ductile.core.transfer.plan import Plan
from ductile.fabric.carrier import Carrier
from ductile.fabric.transfer import Moved, Transfer
from ductile.resharding.inventory import Inventory


class Move:
    """A transfer that can run again as long as plan and memory are the same (`key`).

    The carrier takes memory on `device`. What lies elsewhere, such as step counts that an optimizer keeps on the CPU,
    makes a detour over a copy there.
    """

    def __init__(
        self, plan: Plan, source: Inventory, target: Inventory, carrier: Carrier, rank: int, device: torch.device
    ) -> None:
        """Raises `NotReshardable` when source and target share memory."""
        self.key = self.key_of(plan, source, target)
        self._source, self._target = source, target
        self._old = {name: memory.to(device) for name, memory in source.buffers.items()}
        self._new = {name: memory.to(device) for name, memory in target.buffers.items()}
        try:
            self._transfer = Transfer(plan, rank, self._old, self._new, carrier)
        except ValueError as error:
            raise NotReshardable(f"source and target: {error}") from None

    @staticmethod
    def key_of(plan: Plan, source: Inventory, target: Inventory) -> tuple[object, ...]:
        buffers = [*source.buffers.values(), *target.buffers.values()]
        return (plan.key, *(memory.data_ptr() for memory in buffers))

    def run(self) -> Moved:
        """Raises `TransferFailed`."""
        for name, memory in self._source.buffers.items():
            if self._old[name] is not memory:
                self._old[name].copy_(memory)
        _wait_for_gpu()
        moved = self._transfer.run()
        for name, block in self._target.blocks.items():
            if self._new[name] is not self._target.buffers[name]:
                # Only the block itself: what lies between its elements may belong to another one.
                block.data.copy_(_like(block.data, self._new[name]))
        _wait_for_gpu()
        return moved


def _like(data: Tensor, memory: Tensor) -> Tensor:
    return memory.as_strided(data.shape, data.stride(), memory.storage_offset())


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
