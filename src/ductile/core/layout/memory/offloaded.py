"""Activations that wait in host memory (`parallel/activation_offloading.py`): how many bytes of them are still on the
device, and how many host memory takes."""

from collections.abc import Sequence

from ductile.core.layout.memory.layer_memory import LayerMemory

CLASSES = 8
"""Sizes of pooled buffers between a power of two and the next: `parallel.activation_offloading.CLASSES`."""


LEAST_BYTES = 1024
"""Smallest tensor that is offloaded: `parallel.activation_offloading.LEAST_BYTES`."""


def last_saved(layers: Sequence[LayerMemory], number: int) -> int:
    """Bytes of so many tensors that these layers have saved last."""
    if not number:
        return 0
    sizes = [size for layer in layers for size in layer.kept]
    return sum(sizes[-number:])


def host_bytes(layer: LayerMemory) -> int:
    """Bytes of host memory for what a layer keeps."""
    return sum(size_class(size) for size in layer.kept if size >= LEAST_BYTES)


def size_class(num_bytes: int) -> int:
    """Bytes of the buffer that so many are put into."""
    step = max(1, (1 << (num_bytes - 1).bit_length()) // 2 // CLASSES)
    return -(-num_bytes // step) * step
