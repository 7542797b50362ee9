"""Activations that wait in host memory (`parallel/activation_offloading.py`): how many bytes of them are still on the
device, and how many host memory takes."""

from collections.abc import Sequence

from ductile.core.layout.memory.layer_memory import LayerMemory

LEAST_BYTES = 1024
"""Smallest tensor that is offloaded: a smaller one takes longer to copy than it is worth."""


def last_saved(layers: Sequence[LayerMemory], number: int) -> int:
    """Bytes of so many tensors that these layers have saved last."""
    if not number:
        return 0
    sizes = [size for layer in layers for size in layer.kept]
    return sum(sizes[-number:])


def host_bytes(layer: LayerMemory, is_pinned: bool) -> int:
    """Bytes of host memory for what a layer keeps."""
    return sum(buffer_bytes(size, is_pinned) for size in (*layer.kept, *layer.views) if size >= LEAST_BYTES)


def buffer_bytes(num_bytes: int, is_pinned: bool) -> int:
    """Bytes of the buffer that so many are put into: torch takes pinned memory in powers of two."""
    return 1 << (num_bytes - 1).bit_length() if is_pinned else num_bytes
