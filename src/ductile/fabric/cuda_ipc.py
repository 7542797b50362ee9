"""Read the state straight out of a peer's GPU memory: CUDA IPC, between processes of one host.

A slot says in which allocations the buffers lie that its peers will read. They map them and copy, device to device,
over NVLink where there is one. torch has the mechanism, made for tensors in queues: every `_share_cuda_` is for one
reader, and the allocation stays until that reader has let go of it. What is read must be frozen.
"""

from typing import Any

import msgspec
import torch

from ductile.core.transfer.plan import PeerMessage
from ductile.fabric.carrier import PreparedTransfer, TransferFailed, TransferInputs
from ductile.fabric.digest import Digests
from ductile.fabric.exchange import Exchange
from ductile.fabric.fingerprint import box_fingerprint
from ductile.fabric.memory import WORDS
from ductile.fabric.process import Process


class CudaIpcHandle(msgspec.Struct, frozen=True, array_like=True):
    """What `UntypedStorage._share_cuda_` returns and `_new_shared_cuda` takes, in this order."""

    device: int
    handle: bytes
    size_bytes: int
    offset_bytes: int
    """Offset at which the storage begins in the allocation."""
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
    """Offset at which the buffer begins in the storage, in items of the buffer."""
    num_items: int


Windows = dict[int, list[Window]]
"""Windows by the slot that reads them, in the order in which the parts for this reader touch the buffers."""


class CudaIpc:
    """Reads from the GPUs of `peers`, by slot. `choose` makes it once every slot could read every other."""

    name = "cuda_ipc"
    one_sided = True

    def __init__(self, exchange: Exchange, peers: dict[int, Process], device: str) -> None:
        self._exchange = exchange
        self._peers = peers
        self._device = torch.device(device)
        self._num_transfers = 0

    def prepare(self, inputs: TransferInputs) -> PreparedTransfer:
        work = inputs.plan.at_once(inputs.slot)

        def run(sent: Digests, received: Digests) -> None:
            inputs.steps.before(0)
            if inputs.plan.wire_bytes:
                self._num_transfers += 1
                torch.cuda.synchronize(self._device)  # whatever still writes to the buffers
                note = msgspec.msgpack.encode({message.peer: _windows(inputs, message) for message in work.sends})
                notes = self._exchange.all_gather(f"windows/{self._num_transfers}", note)
                for message in work.receives:
                    windows = msgspec.msgpack.decode(notes[message.peer], type=Windows, strict=False)
                    self._pull(inputs, message, windows[inputs.slot])
            inputs.steps.meanwhile()
            for message in work.sends if sent.on else ():
                for part in message.parts:
                    sent.update(message.peer, box_fingerprint(inputs.old.box(part.name, part.box)))
            for message in work.receives if received.on else ():
                for part in message.parts:
                    received.update(message.peer, box_fingerprint(inputs.new.box(part.name, part.box)))
            torch.cuda.synchronize(self._device)
            inputs.steps.after(0)

        return run

    def _pull(self, inputs: TransferInputs, message: PeerMessage, windows: list[Window]) -> None:
        peer, source = self._peers[message.peer], inputs.plan.source
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
                inputs.new.box(part.name, part.box).copy_(there, non_blocking=True)
            torch.cuda.synchronize(self._device)  # before the mappings go
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise TransferFailed(f"slot {message.peer}'s GPU cannot be read: {cause}", message.peer) from None
        if not peer.alive:
            raise TransferFailed(f"slot {message.peer} (process {peer.pid}) is gone", message.peer)


def _windows(inputs: TransferInputs, message: PeerMessage) -> list[Window]:
    """The buffers that this message's parts lie in, each once, in the order of the parts."""
    names = dict.fromkeys(inputs.old.buffer(part.name, part.box) for part in message.parts)
    buffers = [inputs.old.words(name) for name in names]
    return [Window(CudaIpcHandle.of(words), int(words.storage_offset()), len(words)) for words in buffers]


def _mapped(window: Window, dtype: torch.dtype) -> torch.Tensor:
    """The peer's buffer, on the peer's device, which may be this slot's, too."""
    storage: Any = window.share.open()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, window.first, (window.num_items,), (1,))
