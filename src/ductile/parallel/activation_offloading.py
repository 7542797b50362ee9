"""Activation offloading: what layers keep for the backward pass waits in host memory.

While a layer runs, each tensor that it saves is copied to host memory, and the device's own memory of it is let go of.
At most `max_inflight_activations` of them are in flight: once there is one more, the oldest must have arrived, and the
device holds it no longer. In the backward pass they come back in the opposite order, ahead of their use; those that are
used, those on their way back and those that have not left yet are together no more than that. Those that are still in
flight when they are used have never left. With checkpointing what a layer saves is its input, and what a module of it
kept.

Host memory is taken from a pool and goes back to it, as pinned memory is slow to get. What is small stays, and so do
weights, and what all layers share: cos and sin.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ductile.config.schema.model import ActivationOffloading
from ductile.core.layout.memory.offloaded import LEAST_BYTES, buffer_bytes
from ductile.model.transformer import Transformer
from ductile.parallel.host_copies import Copy, HostCopies, host_copies
from ductile.parallel.host_memory import host_like


@dataclass(slots=True)
class OffloadCounters:
    """Counts since the model was made."""

    num_offloaded: int = 0
    num_bytes: int = 0
    """Bytes that went to host memory."""
    num_returned: int = 0
    """Activations that came back; the others were used before they had left."""
    most_in_flight: int = 0


class ActivationOffload:
    """Activations of one model: in flight, in host memory, and on their way back."""

    def __init__(self, max_in_flight: int, copies: HostCopies, device: torch.device, pin_memory: bool = True) -> None:
        self.counters = OffloadCounters()
        self._max_in_flight, self._copies, self._device = max_in_flight, copies, device
        self._pool = HostPool(device, pin_memory)
        self._leaving: deque[_Activation] = deque()
        """Activations whose copies to host memory are in flight, oldest first."""
        self._here: list[_Returned] = []
        """Activations that are back on the device, or on their way there, and are still to be used."""
        self._saved: WeakValueDictionary[_Place, _Activation] = WeakValueDictionary()
        """Activations by their place on the device: one that several operators save leaves once."""
        self._latest: ref[_Activation] | None = None

    @classmethod
    def of(cls, config: ActivationOffloading, device: torch.device) -> "ActivationOffload":
        """Return the one of a model on this device."""
        return cls(config.max_inflight_activations, host_copies(device), device, config.pin_memory)

    def apply(self, model: Transformer) -> None:
        """Have every layer of the model offload what it saves. Names of parameters stay."""
        for layer in model.layers.values():
            vars(layer)["forward"] = partial(self.run, layer, layer.forward)

    def run(self, layer: nn.Module, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Run a layer's forward pass."""
        if not torch.is_grad_enabled():
            return forward(*inputs)
        shared = [each for each in inputs if isinstance(each, Tensor) and not each.requires_grad]
        stays = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *shared)}
        with saved_tensors_hooks(partial(self._pack, stays), self._unpack):
            return forward(*inputs)

    def _pack(self, stays: Collection[int], tensor: Tensor) -> "Tensor | _Saved":
        storage = tensor.untyped_storage()
        if storage.data_ptr() in stays or not self._leaves(tensor):
            return tensor
        place = (storage.data_ptr(), int(tensor.storage_offset()), tensor.numel(), tensor.dtype, tensor._version)
        activation = self._saved.get(place) if tensor.is_contiguous() else None
        if activation is None or activation.storage.expired():
            activation = self._offload(tensor)
            if tensor.is_contiguous():
                self._saved[place] = activation
        activation.num_uses += 1
        return _Saved(activation, tensor.shape)

    def _leaves(self, tensor: Tensor) -> bool:
        is_expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        return (
            type(tensor) is Tensor  # no parameter
            and tensor.device.type == self._device.type
            and tensor.nbytes >= LEAST_BYTES
            and not is_expanded
        )

    def _offload(self, tensor: Tensor) -> "_Activation":
        self._make_room()
        host = self._pool.take(tensor.nbytes)
        content = host[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        on_device = tensor.detach()  # a reference to what made it would keep all of that
        activation = _Activation(
            content, on_device, self._copies.start(on_device, content), StorageWeakRef(tensor.untyped_storage())
        )
        finalize(activation, self._pool.put, host)
        activation.before, self._latest = self._latest, ref(activation)
        self._leaving.append(activation)
        self.counters.num_offloaded += 1
        self.counters.num_bytes += tensor.nbytes
        self._count()
        return activation

    def _unpack(self, saved: "Tensor | _Saved") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        activation = saved.activation
        if activation in self._leaving:
            self._leaving.remove(activation)
            self._here.append(_Returned(ref(activation), activation.copy, activation.on_device))
        elif activation.on_device is None:
            self._make_room()
            self._bring_back(activation)
        activation.copy.wait()
        on_device = activation.on_device
        assert on_device is not None
        self._count()
        activation.num_uses -= 1
        own = next(each for each in self._here if each.activation() is activation)
        own.is_used = True
        if activation.num_uses <= 0:
            activation.on_device = None
            self._here.remove(own)
        self._bring_ahead(activation)
        return on_device.view(saved.shape)

    def _bring_ahead(self, used: "_Activation") -> None:
        """Begin to bring back what was saved before this one, which is used now, and is thus used after it."""
        before = used.before and used.before()
        own = used.on_device is None  # no longer among those that are here
        while before is not None and own + len(self._leaving) + len(self._here) < self._max_in_flight:
            if before.on_device is None and before.num_uses > 0:
                self._bring_back(before)
                self._count(own)
            before = before.before and before.before()

    def _bring_back(self, activation: "_Activation") -> None:
        on_device = torch.empty(activation.content.shape, dtype=activation.content.dtype, device=self._device)
        activation.on_device, activation.copy = on_device, self._copies.start(activation.content, on_device)
        self._here.append(_Returned(ref(activation), activation.copy, on_device))
        self.counters.num_returned += 1

    def _make_room(self) -> None:
        """Let the device have one activation less than it may. Those that are used again later go first and come back
        once more; then the one that has been leaving longest; then the one that came farthest ahead."""
        for each in self._here:
            if each.activation() is None:  # nobody runs that backward pass any more
                each.copy.wait()
        self._here = [each for each in self._here if each.activation() is not None]
        while len(self._leaving) + len(self._here) >= self._max_in_flight:
            used = next((each for each in self._here if each.is_used), None)
            if used is None and self._leaving:
                oldest = self._leaving.popleft()
            else:
                gone = used or self._here[-1]
                self._here.remove(gone)
                oldest = gone.activation()
                assert oldest is not None
            oldest.copy.wait()
            oldest.on_device = None

    def _count(self, others: int = 0) -> None:
        in_flight = len(self._leaving) + len(self._here) + others
        self.counters.most_in_flight = max(self.counters.most_in_flight, in_flight)


_Place = tuple[int, int, int, torch.dtype, int]
"""Address of the storage, offset, number of elements, dtype, and version of the content."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Activation:
    """A tensor that layers have saved, in host memory, and maybe on the device."""

    content: Tensor
    """The tensor in host memory, contiguous."""
    on_device: Tensor | None
    """The tensor on the device, while it is in flight, or used more than once."""
    copy: Copy
    storage: StorageWeakRef
    """Storage that it came from."""
    num_uses: int = 0
    """How often it will still be used."""
    before: "ref[_Activation] | None" = None
    """The activation that was saved before it."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """What an operator keeps in place of a tensor."""

    activation: _Activation
    shape: torch.Size


@dataclass(slots=True, eq=False)
class _Returned:
    """An activation on the device in a backward pass."""

    activation: "ref[_Activation]"
    copy: Copy
    on_device: Tensor | None
    """Memory that is kept until the copy is waited for, also if the activation is gone before."""
    is_used: bool = False
    """It has been used, and will be once more."""


class HostPool:
    """Buffers in host memory that are used again and again."""

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        self._pin_memory = pin_memory
        self._byte = torch.empty(1, dtype=torch.uint8, device=device)
        self._free: list[Tensor] = []
        """Buffers that nobody uses, smallest first."""

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer of at least so many bytes, uint8.

        It is the smallest free one that is large enough. Where none is, the largest free one is given up for a new one:
        micro-batches of many sizes end with the buffers that the largest needs, not with some for each size.
        """
        size = buffer_bytes(num_bytes, self._pin_memory and self._byte.is_cuda)
        place = bisect_left(self._free, size, key=len)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            del self._free[-1]
        return host_like(self._byte.expand(size), pin_memory=self._pin_memory)

    def put(self, buffer: Tensor) -> None:
        insort(self._free, buffer, key=len)
