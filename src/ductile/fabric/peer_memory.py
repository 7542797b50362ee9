"""Read the state straight out of a peer's process: `process_vm_readv`, on the CPU of one host.

The kernel copies from one address space into the other, scattered pieces on both sides, so nothing is packed, nothing
has to be allocated in a special way, and no segment can be left behind. A peer that has stopped can still be read; one
that has died is noticed at once. What is read must be frozen.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ductile.core.layout.holdings import Ints, View
from ductile.core.transfer.plan import Part
from ductile.core.transfer.topology import MIB
from ductile.fabric.board import Board
from ductile.fabric.carrier import Cargo, TransferFailed
from ductile.fabric.digest import Digests
from ductile.fabric.memory import Memory, flat_bytes

MAX_PIECES = 1024
"""The kernel takes so many pieces a side in one call."""
MAX_BYTES = 1 << 30
"""And somewhat less than 2 GiB."""
HASHED_BYTES = MIB
"""When bytes are hashed, they are read in pieces of this size, which are still in the cache then."""
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Process:
    """A process for certain: its number alone may belong to another one tomorrow."""

    pid: int
    started: int
    """In clock ticks after boot."""

    @classmethod
    def own(cls) -> "Process":
        return cls(os.getpid(), _start_of(os.getpid()))

    @property
    def alive(self) -> bool:
        return _start_of(self.pid) == self.started


def permit_siblings() -> None:
    """Let our parent's other children read our memory where the kernel asks for permission (Yama's ptrace_scope 1)."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # elsewhere an error, which means nothing


def read(process: Process, local: Ints, remote: Ints) -> None:
    """Copy memory of `process` into ours. Both lists are [pieces, (address, bytes)], equally long in bytes.

    Raises `OSError`: ESRCH when the process is gone, EPERM when it may not be read, EFAULT for addresses it lacks.
    """
    for ours, theirs, size in _calls(local, remote):
        done = _libc.process_vm_readv(
            process.pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0
        )  # fmt: skip
        if done != size:
            code = ctypes.get_errno() if done < 0 else 14  # EFAULT: only the beginning could be read
            raise OSError(code, os.strerror(code))


def _calls(local: Ints, remote: Ints):
    """Cut two lists of pieces into calls: at most so many pieces a side, and the same bytes on both."""
    ends = [np.cumsum(pieces[:, 1]) for pieces in (local, remote)]
    total = int(ends[0][-1]) if len(local) else 0
    begin = 0
    while begin < total:
        # The piece that `begin` lies in, and the end of the last one that fits into the call.
        firsts = [int(np.searchsorted(end, begin, side="right")) for end in ends]
        stop = min(int(end[min(first + MAX_PIECES, len(end)) - 1]) for end, first in zip(ends, firsts, strict=True))
        stop = min(stop, begin + MAX_BYTES)
        yield (
            _between(local, ends[0], firsts[0], begin, stop),
            _between(remote, ends[1], firsts[1], begin, stop),
            stop - begin,
        )
        begin = stop


def _between(pieces: Ints, ends: Ints, first: int, begin: int, stop: int) -> Ints:
    """Bytes begin:stop of the pieces laid end to end."""
    last = int(np.searchsorted(ends, stop, side="left"))
    found = pieces[first : last + 1].copy()
    found[-1, 1] -= ends[last] - stop
    skipped = begin - (ends[first] - pieces[first, 1])
    found[0, 0] += skipped
    found[0, 1] -= skipped
    return found


def pieces_of(view: View, address: int, item_bytes: int) -> Ints:
    """[pieces, (address, bytes)] of a box whose buffer begins at `address`, in row-major order."""
    run, dims = item_bytes, list(zip(view.shape, view.strides, strict=True))
    while dims and (dims[-1][1] * item_bytes == run or dims[-1][0] == 1):
        length, _ = dims.pop()
        run *= length
    starts = np.array([address + view.offset * item_bytes], dtype=np.int64)
    for length, stride in dims:
        starts = (starts[:, None] + np.arange(length, dtype=np.int64) * (stride * item_bytes)).reshape(-1)
    return np.stack([starts, np.full(len(starts), run, dtype=np.int64)], axis=1)


class PeerMemory:
    """Reads from the processes of `peers`, by slot. `choose` makes it once everybody could read everybody."""

    name = "peer_memory"
    one_sided = True

    def __init__(self, board: Board, peers: dict[int, Process]) -> None:
        self._board = board
        self._peers = peers
        self._num_exchanges = 0

    def carry(self, cargo: Cargo) -> None:
        cargo.steps.before(0)
        windows = self._exchange(cargo)
        work = cargo.plan.at_once(cargo.slot)
        for message in work.receives:
            self._pull(cargo, message.peer, message.parts, windows[message.peer])
        cargo.steps.meanwhile()
        for message in work.sends:
            _hash(cargo.sent, message.peer, cargo.old, message.parts)
        cargo.steps.after(0)

    def _exchange(self, cargo: Cargo) -> dict[int, dict[str, int]]:
        """Where the buffers of every slot lie: the names follow from the layout, so only addresses travel."""
        self._num_exchanges += 1
        addresses = [cargo.old.words(name).data_ptr() for name in cargo.old.sizes]
        note = np.array(addresses, dtype="<i8").tobytes()
        notes = self._board.exchange(f"windows/{self._num_exchanges}", note, self._watch)
        found: dict[int, dict[str, int]] = {}
        for message in cargo.plan.at_once(cargo.slot).receives:
            names = cargo.plan.source.buffer_sizes(message.peer)
            addresses = np.frombuffer(notes[message.peer], dtype="<i8").tolist()
            found[message.peer] = dict(zip(names, addresses, strict=True))
        return found

    def _pull(self, cargo: Cargo, peer: int, parts: Sequence[Part], addresses: dict[str, int]) -> None:
        source, target = cargo.plan.source, cargo.plan.target
        ours: list[Ints] = []
        theirs: list[Ints] = []
        for part in parts:
            held, wanted = source[part.name], target[part.name]
            there = held.holdings.view(peer, part.box)
            here = wanted.holdings.view(cargo.slot, part.box)
            theirs.append(pieces_of(there, addresses[held.buffer(there.buffer)], held.item_bytes))
            base = cargo.new.words(wanted.buffer(here.buffer)).data_ptr()
            ours.append(pieces_of(here, base, held.item_bytes))
        self._read(peer, np.concatenate(ours), np.concatenate(theirs))
        _hash(cargo.received, peer, cargo.new, parts)

    def _read(self, peer: int, local: Ints, remote: Ints) -> None:
        process = self._peers[peer]
        try:
            if not process.alive:
                raise ProcessLookupError(3, "No such process")
            read(process, local, remote)
            if not process.alive:  # another process could have got its number in between
                raise ProcessLookupError(3, "No such process")
        except OSError as error:
            raise TransferFailed(
                f"slot {peer} (process {process.pid}) cannot be read: {error.strerror}", peer
            ) from None

    def _watch(self, awaited: list[int]) -> None:
        for slot in awaited:
            if not self._peers[slot].alive:
                raise TransferFailed(f"slot {slot} (process {self._peers[slot].pid}) is gone", slot)


def _hash(digests: Digests, peer: int, memory: Memory, parts: Sequence[Part]) -> None:
    if digests.on:
        for part in parts:
            box = memory.box(part.name, part.box)
            flat = flat_bytes(box)
            digests.update(peer, box.contiguous().view(-1).view(torch.uint8) if flat is None else flat)


def _start_of(pid: int) -> int:
    """When the process started; 0 when there is none, or it is only waiting to be buried."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(fields[18])
