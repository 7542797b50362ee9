"""Which carrier for these slots? All of them ask together, and all get the same answer and the same reason.

carrier, reason = choose(board, "cpu", lambda: groups.group(members))
# peer_memory: all 4 slots are processes of this host, and a trial read worked
# p2p: slot 3 runs on another host than slot 0
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from ductile.fabric.board import Board
from ductile.fabric.carrier import Carrier
from ductile.fabric.p2p import PeerToPeer
from ductile.fabric.peer_memory import PeerMemory, Process, permit_siblings, read


class _Card(msgspec.Struct, frozen=True):
    """What a slot says of itself."""

    host: str
    pid: int
    started: int
    probe: int
    """Address of eight bytes."""
    content: int
    """What is there."""


def choose(
    board: Board, device: str, group: Callable[[], dist.ProcessGroup], one_sided: bool = True
) -> tuple[Carrier, str]:
    """The fastest carrier that works among all members of `board`, and why: a sentence. Collective.

    `group` makes the process group of all members, in case that messages are needed. Without `one_sided` only messages
    are considered: to stream, or to compare. Raises `TransferFailed` when somebody does not answer.
    """
    if not one_sided:
        reason = "only messages were asked for"
    elif device != "cpu":
        reason = "the state is not in the processes' own memory"
    else:
        peers, reason = _try_peers(board)
        if not reason:
            trial = f"all {len(peers)} slots are processes of this host, and a trial read worked"
            return PeerMemory(board, peers), f"peer_memory: {trial}"
    return PeerToPeer(group(), device, board.timeout_s), f"p2p: {reason}"


def _try_peers(board: Board) -> tuple[dict[int, Process], str]:
    """Everybody reads eight bytes of everybody else. What kept anybody from it is the reason for all."""
    permit_siblings()
    own = Process.own()
    probe = np.frombuffer(os.urandom(8), dtype="<u8").copy()
    card = _Card(_host(), own.pid, own.started, probe.ctypes.data, int(probe[0]))
    notes = board.exchange("cards", msgspec.msgpack.encode(card))
    cards = {slot: msgspec.msgpack.decode(note, type=_Card) for slot, note in notes.items()}
    verdict = next(filter(None, (_try(board.slot, card, slot, other) for slot, other in cards.items())), "")
    verdicts = board.exchange("verdicts", verdict.encode())  # nobody's probe goes before everybody has read it
    peers = {slot: Process(card.pid, card.started) for slot, card in cards.items()}
    return peers, next((verdict.decode() for _, verdict in sorted(verdicts.items()) if verdict), "")


def _try(slot: int, card: _Card, peer: int, other: _Card) -> str:
    """Why `slot` cannot read `peer`, or nothing."""
    if other.host != card.host:
        return f"slots {slot} and {peer} are on different hosts, or in containers that do not see each other"
    found = np.zeros(1, dtype="<u8")
    here, there = (np.array([[address, 8]], dtype=np.int64) for address in (found.ctypes.data, other.probe))
    try:
        read(Process(other.pid, other.started), here, there)
    except OSError as error:
        return f"slot {slot} may not read the memory of slot {peer} ({error.strerror})"
    return "" if int(found[0]) == other.content else f"slot {slot} read something else than slot {peer} has"


def _host() -> str:
    """Equal for processes that see each other under the same numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
