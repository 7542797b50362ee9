"""A running 64-bit fingerprint of bytes as they pass, by peer: what one slot sent must be what the other received.

It is xxh3, which keeps up with memory. What lies on a GPU is reduced to sixteen bytes there before
(`ductile.fabric.fingerprint`). It guards against accidents, not against an attacker who wants two inputs to collide.
"""

import torch
import xxhash

from ductile.fabric.fingerprint import box_fingerprint
from ductile.fabric.memory import as_array

ROW_BYTES = 1 << 12
"""Bytes that are fingerprinted as a row of a matrix: a dim as long as a segment would need as many weights."""


class Digests:
    """One fingerprint a peer. Off, it costs nothing and says nothing."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self._running: dict[int, xxhash.xxh3_64] = {}

    def update(self, peer: int, data: torch.Tensor | bytes) -> None:
        """`data` is contiguous bytes, the next ones to or from this peer. Both sides cut them in the same places."""
        if self.on:
            if peer not in self._running:
                self._running[peer] = xxhash.xxh3_64()
            self._running[peer].update(_content(data))

    def values(self) -> dict[int, int]:
        return {peer: running.intdigest() for peer, running in sorted(self._running.items())}


def _content(data: torch.Tensor | bytes) -> bytes | memoryview:
    if isinstance(data, bytes):
        return data
    return as_array(data).data if data.device.type == "cpu" else fingerprint_of_bytes(data)


def fingerprint_of_bytes(data: torch.Tensor) -> bytes:
    """Return 16 bytes that stand for flat bytes, taken where they lie, on any device: eight for all whole rows, and
    eight for what is left behind them."""
    end = data.numel() // ROW_BYTES * ROW_BYTES
    return box_fingerprint(data[:end].view(-1, ROW_BYTES)) + box_fingerprint(data[end:])
