"""Activations that wait in host memory (`parallel/activation_offloading.py`): how many bytes of them are still on the
device, and how many host memory takes."""

from collections.abc import Sequence

from ductile.core.layout.memory.layer_memory import LayerMemory

CLASSES = 8
"""Sizes of pooled buffers between a power of two and the next: `parallel.activation_offloading.CLASSES`."""


def window(sizes: Sequence[int], number: int) -> int:
    """The most bytes that so many tensors have that are saved one after the other."""
    most = max(1, min(number, len(sizes)))
    return max((sum(sizes[start : start + most]) for start in range(len(sizes) - most + 1)), default=0)


def host_bytes(layer: LayerMemory) -> int:
    """Bytes of host memory for what a layer keeps."""
    return sum(map(size_class, layer.kept))


def size_class(num_bytes: int) -> int:
    """Bytes of the buffer that so many are put into."""
    step = max(1, (1 << (num_bytes - 1).bit_length()) // 2 // CLASSES)
    return -(-num_bytes // step) * step
