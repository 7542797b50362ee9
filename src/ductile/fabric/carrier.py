"""What carries bytes from slot to slot, behind one Protocol.

p2p           messages through a process group (gloo, NCCL): works everywhere
peer_memory   every receiver reads its peers' memory by itself: processes of one host, on the CPU
cuda_ipc      the same on the GPUs of one host
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ductile.core.transfer.plan import Plan
from ductile.fabric.digest import Digests
from ductile.fabric.memory import Memory


class TransferFailed(RuntimeError):
    """Bytes did not arrive: a peer died, stopped, or did not reply in time. The text says which slot and what.

    The new buffers are worth nothing then. Between two memory modes the old ones differ: in shadow mode they are whole.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        """Slot that failed; None where it is not known. It may be a slot that only waits for another one."""


class Steps:
    """What a slot does around the rounds of a transfer: nothing, where a memory mode (`ductile.fabric.modes`) does not
    say otherwise. `index` counts the slot's own rounds."""

    def before(self, index: int) -> None:
        """The round is about to be posted: its buffers must exist."""

    def meanwhile(self) -> None:
        """The first bytes are under way and the processor is free."""

    def after(self, index: int) -> None:
        """The round's messages have left and arrived."""

    def finish(self) -> None:
        """All messages have left and arrived. The transfer calls this, not the carrier."""


@dataclass(frozen=True)
class TransferInputs:
    """One slot's part of a plan, as a carrier gets it. Old buffers, and new ones in which nothing changes, may not be
    there before the transfer begins."""

    plan: Plan
    slot: int
    old: Memory
    new: Memory
    steps: Steps


PreparedTransfer = Callable[[Digests, Digests], None]
"""Function that sends and receives everything, and takes the fingerprints of both. Raises `TransferFailed` when the
carrier's timeout passes, or before."""


class Carrier(Protocol):
    name: str
    one_sided: bool
    """Whether receivers read the senders' memory themselves. Then there are no rounds, so plans have no relays, and
    what is read must stay until every slot is done."""

    def prepare(self, inputs: TransferInputs) -> PreparedTransfer:
        """Do all that needs no peer, so that it need not be done while all slots wait."""
        ...
