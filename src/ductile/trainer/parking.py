"""Parking: a slot's part of the trainer waits in host memory while another role has the slot's device.

    parked = park(trainer)      parameters, gradient, moments and all else that it keeps: not a byte stays on the device
    parked.restore()            all is there again, bit for bit

Whole storages move, and each comes back into itself, as FSDP2 frees and fills gathered parameters: whatever refers to
one (FSDP2's own shards, an optimizer, views of a state) has it again afterwards, without having been told. What lies in
host memory anyway stays there.

On a GPU host memory is pinned, and copies run on a stream of their own. None of that has been run by the tests, which
park on a CPU.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ductile.parallel.data import reshard
from ductile.parallel.fsdp_state import fsdp_tensors
from ductile.parallel.host_copies import Copy, host_copies
from ductile.parallel.host_memory import host_like, is_host, plain_tensors
from ductile.trainer.trainer import Trainer

IN_FLIGHT = 4
"""Most copies that are under way at a time: what is copied is freed only when its copy is through."""


class ParkingFailed(RuntimeError):
    """The trainer is not parked, and is as good as before. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """A storage of the device, which is empty now, and what was in it."""

    storage: torch.UntypedStorage
    host: Tensor
    """All of its bytes."""


@dataclass(slots=True)
class ParkedTrainer:
    """A trainer that is parked. It computes nothing until it is restored."""

    trainer: Trainer
    moved: list[_Moved]
    num_bytes: int
    seconds: float
    """Seconds that the move took."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the trainer that are on the device."""
        return sum(storage.nbytes() for storage in _on_device(self.trainer))

    @property
    def is_whole(self) -> bool:
        """True where all of it is in host memory, and no attempt to bring it back has failed half way."""
        return sum(each.host.nbytes for each in self.moved) == self.num_bytes

    def restore(self) -> float:
        """Bring it back, and return the seconds that this took.

        Raises what torch raises where the device has no room. What is still in host memory stays there then, and this
        may be called again.
        """
        began_s = time.perf_counter()
        copies, coming = host_copies(self.trainer.device), deque[tuple[Copy, _Moved]]()
        try:
            while self.moved:
                moved = self.moved[-1]
                moved.storage.resize_(moved.host.nbytes)
                try:
                    copy = copies.start(moved.host, _bytes_of(moved.storage))
                except BaseException:
                    moved.storage.resize_(0)  # it is in host memory alone, as before
                    raise
                coming.append((copy, self.moved.pop()))
                if len(coming) >= IN_FLIGHT:
                    coming.popleft()[0].finish()
        finally:
            for copy, _ in coming:
                copy.finish()
        return time.perf_counter() - began_s


def park(trainer: Trainer) -> ParkedTrainer:
    """Move a slot's part of a trainer to host memory. It is between two micro-steps, and nobody reads its state.

    Raises ParkingFailed, and the trainer is where it was: where there is no host memory for it, or some of it cannot
    leave the device.
    """
    began_s = time.perf_counter()
    reshard(trainer.model)  # parameters that a forward pass alone has gathered
    storages = list(_on_device(trainer))
    fixed = sum(storage.nbytes() for storage in storages if not storage.resizable())
    if fixed:
        raise ParkingFailed(f"{fixed} bytes of the trainer are in memory that cannot be freed and filled again")
    num_bytes = sum(storage.nbytes() for storage in storages)
    parked = ParkedTrainer(trainer, [], num_bytes, 0.0)
    try:
        _move(storages, parked)
    except (RuntimeError, MemoryError) as error:  # torch has no class of its own for host memory that is not there
        parked.restore()
        raise ParkingFailed(f"{num_bytes} bytes of the trainer could not be moved to host memory: {error}") from error
    if left := parked.device_bytes:
        parked.restore()
        raise ParkingFailed(f"{left} bytes of the trainer are still on the device")
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()  # else it would be torch's, and not the next role's
    parked.seconds = time.perf_counter() - began_s
    return parked


def _move(storages: Sequence[torch.UntypedStorage], parked: ParkedTrainer) -> None:
    copies, leaving = host_copies(parked.trainer.device), deque[tuple[Copy, _Moved]]()

    def free_first() -> None:
        copy, moved = leaving.popleft()
        copy.finish()
        moved.storage.resize_(0)
        parked.moved.append(moved)

    try:
        for storage in storages:
            content = _bytes_of(storage)
            moved = _Moved(storage, host_like(content))
            leaving.append((copies.start(content, moved.host), moved))
            if len(leaving) >= IN_FLIGHT:
                free_first()
    finally:
        while leaving:
            free_first()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the content of a storage as one tensor of bytes, sharing memory."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))  # pyright: ignore[reportArgumentType]


def _on_device(trainer: Trainer) -> Iterator[torch.UntypedStorage]:
    """Yield each storage of the trainer that is on its device and has something in it, once."""
    seen = set[int]()
    for tensor in _tensors_of(trainer):
        for part in plain_tensors(tensor):
            storage = part.untyped_storage()
            if part.device.type != trainer.device.type or not storage.nbytes() or is_host(part):
                continue
            if (key := storage._cdata) not in seen:
                seen.add(key)
                yield storage


def _tensors_of(trainer: Trainer) -> Iterator[Tensor]:
    """Yield all that the trainer keeps from one command to the next; some of it may come several times."""
    for parameter in trainer.model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from trainer.model.buffers()
    yield from fsdp_tensors(trainer.model)
    for kept in trainer.optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, Tensor))
    yield from trainer.accumulated()
