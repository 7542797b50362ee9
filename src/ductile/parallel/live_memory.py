"""Bytes of the tensors that live, as operators make them: on a CPU, what the memory of a GPU would hold.

    counter = MemoryCounter()
    with counter.watch():                       # in each thread that runs operators
        trainer.forward_backward(micro_batches)
    counter.peak_bytes("device"), counter.peak_parts("device")

Memory is counted by storage, once, from the operator that makes it until its last tensor is gone: a view costs nothing,
and a storage that is resized, as FSDP2 does it with gathered parameters, counts as large as it then is. Which tensors
are the host's, `host_memory` says; all others are the device's. A backward pass on a CPU runs in the thread that asks
for it, and is seen there.

Not seen: what an operator allocates and frees inside, what communication libraries have of their own, the allocator's
rounding and fragmentation, and memory that no operator has made (`MemoryCounter.add`). Nothing here knows what the
planner expects, so that either can be held against the other.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from threading import RLock
from typing import Any, Literal
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ductile.parallel import host_memory

Pool = Literal["device", "host"]
POOLS: tuple[Pool, ...] = ("device", "host")

_label: ContextVar[str] = ContextVar("label of memory", default="")
_watching: "WeakSet[MemoryCounter]" = WeakSet()
"""Counters that watch a thread."""
_watching_lock = RLock()
_resize_before: list[Callable[[torch.UntypedStorage, int], None]] = []
"""How storages are resized without this module, while a thread is watched: it is no operator, which modes would see."""


@contextmanager
def counted_as(label: str) -> Iterator[None]:
    """Have what operators of this thread make inside called so in a counter's parts, instead of after the operator."""
    before = _label.set(label)
    try:
        yield
    finally:
        _label.reset(before)


@contextmanager
def watched_thread() -> Iterator[None]:
    """Have this thread watched by every counter that watches another one now. For a thread that the product starts and
    that makes tensors: without a counter it does nothing."""
    with ExitStack() as stack:
        for counter in list(_watching):
            stack.enter_context(counter.watch())
        yield


class _Held:
    """A storage that lives."""

    __slots__ = ("key", "label", "num_bytes", "pool", "storage")

    def __init__(self, storage: torch.UntypedStorage, pool: Pool, label: str, freed: "deque[_Held]") -> None:
        self.key, self.label, self.num_bytes = id(storage), label, 0
        self.pool: Pool = pool
        self.storage = ref(storage, lambda _: freed.append(self))


class MemoryCounter:
    """Live bytes of a process's tensors, now and at most, by pool."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """`device`: the slot's. Of a GPU's process all that lies on the CPU is the host's."""
        self._device_type = torch.device(device).type
        self._lock = RLock()
        self._held: dict[int, _Held] = {}
        """Storages that live, by their identity, which torch keeps as long as they do."""
        self._freed: deque[_Held] = deque()
        """Those that are gone and still counted. Python may free one between any two lines, also of this class: it is
        only put here, and taken off the count before the next one is added."""
        self._parts: dict[Pool, Counter[str]] = {"device": Counter(), "host": Counter()}
        self._bytes: dict[Pool, int] = {"device": 0, "host": 0}
        self._peak_bytes: dict[Pool, int] = {"device": 0, "host": 0}
        self._peak_parts: dict[Pool, Mapping[str, int]] = {"device": {}, "host": {}}
        self._num_watched = 0
        host_memory.on_mark(self._was_marked)

    @contextmanager
    def watch(self) -> Iterator["MemoryCounter"]:
        """Count what this thread's operators make; several threads may be watched at a time."""
        with _watching_lock:
            self._num_watched += 1
            _watching.add(self)
            _follow_resizes()
        try:
            with _Watch(self):
                yield self
        finally:
            with _watching_lock:
                self._num_watched -= 1
                if not self._num_watched:
                    _watching.discard(self)
                _follow_resizes()

    def add(self, tensors: Iterable[Tensor], label: str = "added") -> None:
        """Count tensors that were made before, or by no operator. Those that are counted already stay as they are."""
        for tensor in tensors:
            self.saw(tensor, label)

    def current_bytes(self, pool: Pool) -> int:
        """Return the bytes that live now."""
        with self._lock:
            self._forget_freed()
            return self._bytes[pool]

    def peak_bytes(self, pool: Pool) -> int:
        """Return the most bytes that have lived at a time, since the counter was made or `reset_peak`."""
        return self._peak_bytes[pool]

    def peak_parts(self, pool: Pool) -> dict[str, int]:
        """Return what the peak consisted of, largest first: bytes by the operator that made them, as in "aten::mm", or
        by the label that the maker gave (`counted_as`)."""
        return dict(sorted(self._peak_parts[pool].items(), key=lambda part: -part[1]))

    def reset_peak(self) -> None:
        """Let the peak be what lives now."""
        with self._lock:
            self._forget_freed()
            for pool in POOLS:
                self._peak_bytes[pool] = 0
                self._note_peak(pool)

    def saw(self, made: object, label: str) -> None:
        """Count what an operator returned: a tensor, several, or nothing that is one."""
        if isinstance(made, Tensor):
            for part in host_memory.plain_tensors(made):
                self._count(part, label)
        elif isinstance(made, list | tuple):
            for each in made:
                self.saw(each, label)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage by its size of now, if it is counted at all."""
        with self._lock:
            self._forget_freed()
            if (held := self._found(storage)) is not None:
                self._set_size(held, storage.nbytes())

    def _count(self, tensor: Tensor, label: str) -> None:
        if tensor.layout != torch.strided:
            raise ValueError(f"{label} made a tensor whose memory cannot be counted: its layout is {tensor.layout}")
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return
        with self._lock:
            self._forget_freed()
            held = self._found(storage)
            if held is None:
                held = self._held[id(storage)] = _Held(storage, self._pool_of(tensor), label, self._freed)
            self._set_size(held, storage.nbytes())

    def _found(self, storage: torch.UntypedStorage) -> _Held | None:
        held = self._held.get(id(storage))
        # Another thread may have freed the one that was known by this identity a moment ago.
        return held if held is not None and held.storage() is storage else None

    def _pool_of(self, tensor: Tensor) -> Pool:
        if self._device_type != "cpu":
            return "host" if tensor.device.type == "cpu" else "device"
        return "host" if host_memory.allocates_host() or host_memory.is_host(tensor) else "device"

    def _was_marked(self, tensor: Tensor) -> None:
        """Move to the host what was the device's."""
        with self._lock:
            self._forget_freed()
            held = self._found(tensor.untyped_storage())
            if held is not None and held.pool != "host":
                num_bytes = held.num_bytes
                self._set_size(held, 0)
                held.pool = "host"
                self._set_size(held, num_bytes)

    def _set_size(self, held: _Held, num_bytes: int) -> None:
        more = num_bytes - held.num_bytes
        if more:
            held.num_bytes = num_bytes
            self._bytes[held.pool] += more
            self._parts[held.pool][held.label] += more
            self._note_peak(held.pool)

    def _note_peak(self, pool: Pool) -> None:
        if self._bytes[pool] > self._peak_bytes[pool]:
            self._peak_bytes[pool] = self._bytes[pool]
            self._peak_parts[pool] = {label: size for label, size in self._parts[pool].items() if size}

    def _forget_freed(self) -> None:
        """Take what is freed off the count."""
        while self._freed:
            held = self._freed.popleft()
            self._bytes[held.pool] -= held.num_bytes
            self._parts[held.pool][held.label] -= held.num_bytes
            if self._held.get(held.key) is held:  # else another storage has the identity by now
                del self._held[held.key]


class _Watch(TorchDispatchMode):
    """Tells a counter what operators make, in the thread that has entered it."""

    def __init__(self, counter: MemoryCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs operators on the tensors inside, which come here again
        made = func(*args, **(kwargs or {}))
        self._counter.saw(made, _label.get() or _name_of(func))
        return made


@cache
def _name_of(operator: Any) -> str:
    """ "aten::add" of its overload "aten::add.Tensor"."""
    return operator.name().partition(".")[0]


def _follow_resizes() -> None:
    """Have counters told of storages that are resized, as long as there are any that watch."""
    if _watching and not _resize_before:
        _resize_before.append(torch.UntypedStorage.resize_)
        torch.UntypedStorage.resize_ = _resize  # pyright: ignore[reportAttributeAccessIssue]
    elif not _watching and _resize_before:
        torch.UntypedStorage.resize_ = _resize_before.pop()  # pyright: ignore[reportAttributeAccessIssue]


def _resize(storage: torch.UntypedStorage, size: int) -> None:
    _resize_before[-1](storage, size)
    for counter in list(_watching):
        counter.resized(storage)
