"""Host memory: what a slot keeps beside its device, and which tensors those are.

On a GPU `Tensor.device` says where a tensor lies. Where slots are processes on a CPU it does not: device and host are
the same memory. So what is allocated here is remembered as the host's, and whoever counts memory (`live_memory`) counts
it as a machine with a GPU would.

    moments = host_like(parameter)      # on a GPU pinned, so that copies overlap with computing
    is_host(moments), is_host(moments[:8])      # True, True: it is the memory that is marked
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

_host = WeakIdKeyDictionary()
"""Storages that are host memory. One that is freed is forgotten."""
_allocating: ContextVar[bool] = ContextVar("allocating host memory", default=False)
_listeners: list["WeakMethod[Callable[[Tensor], None]]"] = []


def host_like(tensor: Tensor, dtype: torch.dtype | None = None, pin_memory: bool = True) -> Tensor:
    """Return a tensor of this shape in host memory, whose numbers are whatever lay there; for a tensor on CUDA pinned.
    Of a DTensor it is this rank's part, as a plain tensor. It is contiguous, also where `tensor` is not."""
    (part,) = plain_tensors(tensor)
    before = _allocating.set(True)
    try:
        made = torch.empty(part.shape, dtype=dtype or part.dtype, device="cpu", pin_memory=pin_memory and part.is_cuda)
    finally:
        _allocating.reset(before)
    mark_host(made)
    return made


def mark_host(tensor: Tensor) -> None:
    """Have the tensor's memory, and so every view of it, taken for host memory, which somebody else has allocated. On
    a CPU it is the device's until then."""
    for part in plain_tensors(tensor):
        _host[part.untyped_storage()] = True
        for listener in list(_listeners):
            if (call := listener()) is not None:
                call(part)


def is_host(tensor: Tensor) -> bool:
    """Return whether the tensor's memory was marked as the host's."""
    return any(part.untyped_storage() in _host for part in plain_tensors(tensor))


def allocates_host() -> bool:
    """Return whether this thread is inside `host_like`: what operators make now will be marked in a moment."""
    return _allocating.get()


def on_mark(listener: Callable[[Tensor], None]) -> None:
    """Call a bound method with every tensor that is marked from now on, in the thread that marks it, as long as its
    object lives."""
    _listeners[:] = [each for each in _listeners if each() is not None]
    _listeners.append(WeakMethod(listener))


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield what holds a tensor's memory: itself, or of a wrapper such as DTensor the tensors inside."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(inner := getattr(tensor, name), Tensor):  # a DTensor names its mesh, too
            yield from plain_tensors(inner)
