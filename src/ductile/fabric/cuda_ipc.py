"""Read the state straight out of a peer's GPU memory: CUDA IPC, between processes of one host.

A slot says in which allocations the buffers lie that its peers will read. They map them and copy, device to device,
over NVLink where there is one. torch has the mechanism, made for tensors in queues: every `_share_cuda_` is for one
reader, and the allocation stays until that reader has let go of it. What is read must be frozen.
"""

from typing import Any

import msgspec
import torch

from ductile.core.transfer.plan import PeerMessage
from ductile.fabric.board import Board
from ductile.fabric.carrier import Cargo, TransferFailed, Trip
from ductile.fabric.digest import Digests
from ductile.fabric.fingerprint import box_fingerprint
from ductile.fabric.memory import WORDS
from ductile.fabric.process import Process


class CudaIpcHandle(msgspec.Struct, frozen=True, array_like=True):
    """What `UntypedStorage._share_cuda_` returns and `_new_shared_cuda` takes, in this order."""

    device: int
    handle: bytes
    size_bytes: int
    offset_bytes: int
    """Where the storage begins in the allocation."""
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "CudaIpcHandle":
        """A share of the tensor's storage, for one reader."""
        return cls(*tensor.untyped_storage()._share_cuda_())

    def open(self) -> torch.UntypedStorage:
        return torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(self))


class Window(msgspec.Struct, frozen=True, array_like=True):
    """A buffer that one peer may read."""

    share: CudaIpcHandle
    first: int
    """Where the buffer begins in the storage, in items of the buffer."""
    num_items: int


Windows = dict[int, list[Window]]
"""Windows by the slot that reads them, in the order in which the parts for this reader touch the buffers."""


class CudaIpc:
    """Reads from the GPUs of `peers`, by slot. `choose` makes it once every slot could read every other."""

    name = "cuda_ipc"
    one_sided = True

    def __init__(self, board: Board, peers: dict[int, Process], device: str) -> None:
        self._board = board
        self._peers = peers
        self._device = torch.device(device)
        self._num_trips = 0

    def load(self, cargo: Cargo) -> Trip:
        work = cargo.plan.at_once(cargo.slot)

        def trip(sent: Digests, received: Digests) -> None:
            cargo.steps.before(0)
            if cargo.plan.wire_bytes:
                self._num_trips += 1
                torch.cuda.synchronize(self._device)  # whatever still writes to the buffers
                note = msgspec.msgpack.encode({message.peer: _windows(cargo, message) for message in work.sends})
                notes = self._board.exchange(f"windows/{self._num_trips}", note)
                for message in work.receives:
                    windows = msgspec.msgpack.decode(notes[message.peer], type=Windows, strict=False)
                    self._pull(cargo, message, windows[cargo.slot])
            cargo.steps.meanwhile()
            for message in work.sends if sent.on else ():
                for part in message.parts:
                    sent.update(message.peer, box_fingerprint(cargo.old.box(part.name, part.box)))
            for message in work.receives if received.on else ():
                for part in message.parts:
                    received.update(message.peer, box_fingerprint(cargo.new.box(part.name, part.box)))
            torch.cuda.synchronize(self._device)
            cargo.steps.after(0)

        return trip

    def _pull(self, cargo: Cargo, message: PeerMessage, windows: list[Window]) -> None:
        peer, source = self._peers[message.peer], cargo.plan.source
        try:
            opened: dict[str, torch.Tensor] = {}
            left = iter(windows)
            for part in message.parts:
                tensor = source[part.name]
                view = tensor.holdings.view(message.peer, part.box)
                name = tensor.buffer(view.buffer)
                if name not in opened:
                    opened[name] = _mapped(next(left), WORDS[tensor.item_bytes])
                words = opened[name]
                there = words.as_strided(view.shape, view.strides, words.storage_offset() + view.offset)
                cargo.new.box(part.name, part.box).copy_(there, non_blocking=True)
            torch.cuda.synchronize(self._device)  # before the mappings go
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise TransferFailed(f"slot {message.peer}'s GPU cannot be read: {cause}", message.peer) from None
        if not peer.alive:
            raise TransferFailed(f"slot {message.peer} (process {peer.pid}) is gone", message.peer)


def _windows(cargo: Cargo, message: PeerMessage) -> list[Window]:
    """The buffers that this message's parts lie in, each once, in the order of the parts."""
    names = dict.fromkeys(cargo.old.buffer(part.name, part.box) for part in message.parts)
    buffers = [cargo.old.words(name) for name in names]
    return [Window(CudaIpcHandle.of(words), int(words.storage_offset()), len(words)) for words in buffers]


def _mapped(window: Window, dtype: torch.dtype) -> torch.Tensor:
    """The peer's buffer, on the peer's device, which may be this slot's, too."""
    storage: Any = window.share.open()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, window.first, (window.num_items,), (1,))
