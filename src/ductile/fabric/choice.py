"""Which carrier for these slots? All of them ask together, and all get the same carrier and the same reason.

carrier, reason = choose(exchange, "cpu", lambda: groups.group(members))
# peer_memory: all 4 slots are processes of this host, and a trial read worked
# p2p: slot 3 runs on another host than slot 0
"""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from ductile.fabric.carrier import Carrier
from ductile.fabric.cuda_ipc import CudaIpc, CudaIpcHandle
from ductile.fabric.exchange import Exchange, Missing
from ductile.fabric.p2p import PeerToPeer
from ductile.fabric.peer_memory import PeerMemory, permit_siblings, read
from ductile.fabric.process import Process, host


class _Card(msgspec.Struct, frozen=True):
    """What a slot says of itself."""

    host: str
    process: Process
    content: int
    """What the probe holds: a random number."""
    address: int = 0
    """Address of the probe, eight bytes, on a CPU."""
    shares: dict[int, CudaIpcHandle] = {}
    """Shares of the probe on a GPU, by the slot that reads it."""
    unshared: str = ""
    """Why the slot cannot share memory of its GPU; empty where it can."""


def choose(
    exchange: Exchange, device: str, group: Callable[[], dist.ProcessGroup], one_sided: bool = True
) -> tuple[Carrier, str]:
    """The fastest carrier that works among all members of `exchange`, and why: a sentence. Collective.

    `group` makes the process group of all members, in case that messages are needed. Without `one_sided` only messages
    are considered: to stream, or to compare. Raises `TransferFailed` when a slot does not reply.
    """
    reader, reason = choose_reader(exchange, device, one_sided, None)
    return reader or PeerToPeer(group(), device, exchange.timeout_s), reason


def choose_reader(
    exchange: Exchange, device: str, one_sided: bool, missing: Missing | None
) -> tuple[Carrier | None, str]:
    """`choose` as far as it needs no process group: the carrier, None where messages are needed, and why. Raises what
    `missing` raises, too."""
    if not one_sided:
        return None, "p2p: only messages were asked for"
    cards, reason = (
        _try_memory(exchange, missing) if device == "cpu" else _try_gpus(exchange, torch.device(device), missing)
    )
    if reason:
        return None, f"p2p: {reason}"
    peers = {slot: card.process for slot, card in cards.items()}
    carrier = CudaIpc(exchange, peers, device) if device != "cpu" else PeerMemory(exchange, peers)
    return carrier, f"{carrier.name}: all {len(peers)} slots are processes of this host, and a trial read worked"


def _try_memory(exchange: Exchange, missing: Missing | None) -> tuple[dict[int, _Card], str]:
    """Each slot reads eight bytes of every other slot's memory."""
    permit_siblings()
    probe = np.frombuffer(os.urandom(8), dtype="<u8").copy()

    def look(card: _Card) -> int:
        found = np.zeros(1, dtype="<u8")
        here, there = (np.array([[address, 8]], dtype=np.int64) for address in (found.ctypes.data, card.address))
        read(card.process, here, there)
        return int(found[0])

    card = _Card(host(), Process.own(), int(probe[0]), address=probe.ctypes.data)
    return _try_all(exchange, card, look, missing)


def _try_gpus(exchange: Exchange, device: torch.device, missing: Missing | None) -> tuple[dict[int, _Card], str]:
    """Each slot reads one number of every other slot's GPU."""
    content = int.from_bytes(os.urandom(4), "little")
    probe = torch.full((1,), content, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)

    def look(card: _Card) -> int:
        storage: Any = card.shares[exchange.slot].open()
        return int(torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage, 0, (1,), (1,)).item())

    readers = [member for member in exchange.members if member != exchange.slot]
    shares, unshared = dict[int, CudaIpcHandle](), ""
    try:
        shares = {reader: CudaIpcHandle.of(probe) for reader in readers}
    except RuntimeError as error:  # memory in expandable segments, a container without CUDA IPC
        unshared = str(error).partition("\n")[0]
    card = _Card(host(), Process.own(), content, shares=shares, unshared=unshared)
    return _try_all(exchange, card, look, missing)


def _try_all(
    exchange: Exchange, card: _Card, look: Callable[[_Card], int], missing: Missing | None
) -> tuple[dict[int, _Card], str]:
    """(card of each slot, what kept some slot from reading another: the same on all slots)"""
    notes = exchange.all_gather("cards", msgspec.msgpack.encode(card), missing)
    cards = {slot: msgspec.msgpack.decode(note, type=_Card, strict=False) for slot, note in notes.items()}
    others = ((slot, other) for slot, other in cards.items() if slot != exchange.slot)
    verdict = next(filter(None, (_try(exchange.slot, card, slot, other, look) for slot, other in others)), "")
    verdicts = exchange.all_gather("verdicts", verdict.encode(), missing)  # no probe goes before all slots have looked
    return cards, next((verdict.decode() for _, verdict in sorted(verdicts.items()) if verdict), "")


def _try(slot: int, card: _Card, peer: int, other: _Card, look: Callable[[_Card], int]) -> str:
    """Why `slot` cannot read `peer`, or nothing."""
    if other.host != card.host:
        return f"slots {slot} and {peer} are on different hosts, or in containers that do not see each other"
    if other.unshared:
        return f"slot {peer} cannot share its memory ({other.unshared})"
    try:
        found = look(other)
    except (OSError, RuntimeError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        return f"slot {slot} may not read the memory of slot {peer} ({cause})"
    return "" if found == other.content else f"slot {slot} read something else than slot {peer} has"
