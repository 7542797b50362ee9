"""Which slots are near each other, and how fast links are.

Speeds choose between plans; that a plan is right never depends on them.
"""

from dataclasses import dataclass
from functools import cached_property

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Topology:
    nodes: tuple[tuple[int, ...], ...] = ()
    """Groups of slots that share a machine; empty when all slots share one. A slot in no group is a machine of its
    own."""
    node_bytes_s: float = 200e9
    """Bytes that a slot sends, and at the same time receives, per second inside its machine."""
    network_bytes_s: float = 50e9
    """Bytes that a slot sends, and at the same time receives, per second across machines."""
    round_s: float = 50e-6
    """Seconds that a round takes besides its bytes."""

    @property
    def speeds(self) -> str:
        """Speeds of the links that there are, in words."""
        near = f"{self.node_bytes_s / 1e9:g} GB/s"
        return f"{near} inside a machine and {self.network_bytes_s / 1e9:g} GB/s across" if self.nodes else near

    def node(self, slot: int) -> int:
        """Number of the slot's machine: equal numbers mean the same machine."""
        return self._node_of.get(slot, -1 - slot) if self.nodes else 0

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {slot: index for index, slots in enumerate(self.nodes) for slot in slots}
