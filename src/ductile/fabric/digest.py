"""A running 64-bit fingerprint of bytes as they pass, by peer: what one slot sent must be what the other received.

On the CPU it is xxh3, which keeps up with memory. It guards against accidents, not against somebody who wants two
inputs to collide.
"""

import torch
import xxhash


class Digests:
    """One fingerprint a peer. Off, it costs nothing and says nothing."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self._running: dict[int, xxhash.xxh3_64] = {}

    def update(self, peer: int, data: torch.Tensor | bytes) -> None:
        """`data` is contiguous bytes, the next ones to or from this peer. Pieces may be cut anywhere."""
        if self.on:
            if peer not in self._running:
                self._running[peer] = xxhash.xxh3_64()
            self._running[peer].update(data if isinstance(data, bytes) else data.numpy().data)

    def values(self) -> dict[int, int]:
        return {peer: running.intdigest() for peer, running in sorted(self._running.items())}
