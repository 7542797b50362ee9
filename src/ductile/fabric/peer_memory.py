"""Read the state straight out of a peer's process, on the CPU of one host.

A peer's windows are mapped before the trip and copied from like memory of our own, as fast as it goes. Ordinary memory
is read with `process_vm_readv`: the kernel copies from one address space into the other, scattered pieces a side, at
half that speed. Either way nothing is packed, and nothing can be left behind. A peer that has stopped can still be
read; one that has died is noticed at once. What is read must be frozen.
"""

import ctypes
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from weakref import WeakValueDictionary

import numpy as np
import torch
import xxhash

from ductile.core.layout.holdings import Ints, View
from ductile.core.transfer.plan import Message, Part
from ductile.core.transfer.topology import MIB
from ductile.fabric import boxes
from ductile.fabric.board import Board
from ductile.fabric.carrier import Cargo, TransferFailed, Trip
from ductile.fabric.digest import Digests
from ductile.fabric.memory import Memory, flat_bytes, num_bytes, pack, slabs
from ductile.fabric.process import Process
from ductile.fabric.window import Window, place

MAX_PIECES = 1024
"""The kernel takes so many pieces a side in one call."""
MAX_BYTES = 1 << 30
"""And somewhat less than 2 GiB."""
HASHED_BYTES = MIB // 2
"""Strided boxes are gathered for hashing in pieces of this size, which stay in the cache."""
_PR_SET_PTRACER = 0x59616D61

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
]  # fmt: skip


def permit_siblings() -> None:
    """Let our parent's other children read our memory where the kernel asks for permission (Yama's ptrace_scope 1)."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # elsewhere an error, which means nothing


def read(process: Process, local: Ints, remote: Ints) -> None:
    """Copy memory of `process` into ours. Both lists are [pieces, (address, bytes)], equally long in bytes.

    Raises `OSError`: ESRCH when the process is gone, EPERM when it may not be read, EFAULT for addresses it lacks.
    """
    for ours, theirs, size in _calls(local, remote):
        done = _libc.process_vm_readv(process.pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
        if done != size:
            code = ctypes.get_errno() if done < 0 else errno.EFAULT  # only the beginning could be read
            raise OSError(code, os.strerror(code))


def _calls(local: Ints, remote: Ints) -> Iterator[tuple[Ints, Ints, int]]:
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


@dataclass(frozen=True)
class _Piece:
    """A box that one peer has for us."""

    buffer: int
    """Where it lies, by its place in the peer's list."""
    offset_bytes: int
    strides_bytes: tuple[int, ...]
    remote: Ints
    """[pieces, (address, bytes)] of it; addresses count from the beginning of the buffer."""
    local: Ints
    """The same bytes here."""
    box: torch.Tensor
    """Where it goes."""

    def copy(self, content: mmap, begin: int) -> None:
        """From the peer's window, in which the buffer begins there."""
        target = self.box.numpy()
        offset = begin + self.offset_bytes
        boxes.copy(target, np.ndarray(target.shape, target.dtype, content, offset, self.strides_bytes))


@dataclass(frozen=True)
class _Pull:
    """What one peer has for us."""

    peer: int
    pieces: list[_Piece]
    contents: dict[int, mmap]
    """Its windows, by key."""


class PeerMemory:
    """Reads from the processes of `peers`, by slot. `choose` makes it once everybody could read everybody.

    `windows` are those that they had then. What came later is read as ordinary memory.
    """

    name = "peer_memory"
    one_sided = True

    def __init__(self, board: Board, peers: dict[int, Process], windows: Mapping[int, Sequence[Window]]) -> None:
        self._board = board
        self._peers = peers
        self._windows = windows
        self._contents: WeakValueDictionary[tuple[int, int], mmap] = WeakValueDictionary()
        """By (slot, key): mapped as long as there is a trip that could read it."""
        self._num_trips = 0

    def load(self, cargo: Cargo) -> Trip:
        strangers = set(cargo.plan.slots) - set(self._peers)
        if strangers:
            raise ValueError(
                f"slots {sorted(strangers)} of the plan are not among those that this carrier was tried on"
            )
        source, work = cargo.plan.source, cargo.plan.at_once(cargo.slot)
        pulls = [_Pull(one.peer, _pieces(cargo, one), self._map(one.peer)) for one in work.receives]
        longest = 24 * max(len(source.buffer_sizes(slot)) for slot in cargo.plan.slots)

        def trip(sent: Digests, received: Digests) -> None:
            cargo.steps.before(0)
            if cargo.plan.wire_bytes:
                # The names of the peers' buffers follow from their layout; only where they lie has to be told.
                addresses = [cargo.old.words(name).data_ptr() for name in cargo.old.sizes]
                own = np.array([(address, *place(address)) for address in addresses], dtype="<i8")
                self._num_trips += 1
                topic, meanwhile = f"places/{self._num_trips}", cargo.steps.meanwhile
                places = self._board.exchange(topic, own.tobytes(), self._watch, longest, meanwhile)
                for pull in pulls:
                    self._read(pull, np.frombuffer(places[pull.peer], dtype="<i8").reshape(-1, 3))
            else:
                cargo.steps.meanwhile()
            if sent.on:
                _hash_sent(cargo.old, work.sends, sent)
                for pull in pulls:
                    _hash_received(pull, received)
            cargo.steps.after(0)

        return trip

    def _map(self, peer: int) -> dict[int, mmap]:
        """Without those that are gone: their memory is not among what will be asked for, or the peer is dead, which
        the trip finds out."""
        found: dict[int, mmap] = {}
        for window in self._windows[peer]:
            content = self._contents.get((peer, window.key))
            if content is None:
                try:
                    content = window.map(self._peers[peer])
                except OSError:
                    continue
                self._contents[peer, window.key] = content
            found[window.key] = content
        return found

    def _read(self, pull: _Pull, places: Ints) -> None:
        """`places`: [buffers, (address, window, where it begins in the window)]."""
        process = self._peers[pull.peer]
        where = places.tolist()
        ordinary = [piece for piece in pull.pieces if where[piece.buffer][1] not in pull.contents]
        try:
            if not process.alive:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            if ordinary:
                remote = [piece.remote + np.array([where[piece.buffer][0], 0]) for piece in ordinary]
                read(process, np.concatenate([piece.local for piece in ordinary]), np.concatenate(remote))
            for piece in pull.pieces:
                _, key, begin = where[piece.buffer]
                if key in pull.contents:
                    piece.copy(pull.contents[key], begin)
            if not process.alive:  # another process could have got its number in between
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        except OSError as error:
            raise TransferFailed(
                f"slot {pull.peer} (process {process.pid}) cannot be read: {error.strerror}", pull.peer
            ) from None

    def _watch(self, awaited: list[int]) -> None:
        for slot in awaited:
            if not self._peers[slot].alive:
                raise TransferFailed(f"slot {slot} (process {self._peers[slot].pid}) is gone", slot)


def _pieces(cargo: Cargo, message: Message) -> list[_Piece]:
    source, target = cargo.plan.source, cargo.plan.target
    buffers = {name: index for index, name in enumerate(source.buffer_sizes(message.peer))}
    pieces: list[_Piece] = []
    for part in message.parts:
        tensor, size = source[part.name], source[part.name].item_bytes
        there = tensor.holdings.view(message.peer, part.box)
        here = target[part.name].holdings.view(cargo.slot, part.box)
        base = cargo.new.words(target[part.name].buffer(here.buffer)).data_ptr()
        pieces.append(
            _Piece(
                buffers[tensor.buffer(there.buffer)],
                there.offset * size,
                tuple(stride * size for stride in there.strides),
                pieces_of(there, 0, size),
                pieces_of(here, base, size),
                cargo.new.box(part.name, part.box),
            )
        )
    return pieces


def _digest(box: torch.Tensor, staging: torch.Tensor) -> bytes:
    """Of a box's bytes in row-major order."""
    digest = xxhash.xxh3_64()
    for slab in slabs(box, len(staging)):
        memory = flat_bytes(slab)
        if memory is None:
            memory = staging[: num_bytes(slab)]
            pack(slab, memory)
        digest.update(memory.numpy().data)
    return digest.digest()


def _hash_received(pull: _Pull, received: Digests) -> None:
    staging = torch.empty(HASHED_BYTES, dtype=torch.uint8)
    for piece in pull.pieces:
        received.update(pull.peer, _digest(piece.box, staging))


def _hash_sent(old: Memory, sends: Sequence[Message], sent: Digests) -> None:
    """What peers read of us. Several may read the same part; it is hashed once."""
    staging = torch.empty(HASHED_BYTES, dtype=torch.uint8)
    known: dict[Part, bytes] = {}
    for message in sends:
        for part in message.parts:
            if part not in known:
                known[part] = _digest(old.box(part.name, part.box), staging)
            sent.update(message.peer, known[part])
