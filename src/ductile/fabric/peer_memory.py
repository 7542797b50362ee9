"""Read the state straight out of a peer's process: `process_vm_readv`, on the CPU of one host.

The kernel copies from one address space into the other, scattered pieces on both sides, so nothing is packed, nothing
has to be allocated in a special way, and no segment can be left behind. A peer that has stopped can still be read; one
that has died is noticed at once. What is read must be frozen.
"""

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from ductile.core.layout.holdings import Ints, View
from ductile.core.transfer.plan import Message, Part
from ductile.core.transfer.topology import MIB
from ductile.fabric.board import Board
from ductile.fabric.carrier import Cargo, TransferFailed, Trip
from ductile.fabric.digest import Digests
from ductile.fabric.memory import Memory, flat_bytes, num_bytes, pack, slabs
from ductile.fabric.process import Process

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
class _Pull:
    """What one peer has for us."""

    peer: int
    boxes: list[torch.Tensor]
    """Where the parts go, in order."""
    local: Ints
    """[pieces, (address, bytes)] of all boxes, end to end."""
    remote: Ints
    """The same bytes at the peer; addresses count from the beginning of a buffer."""
    buffers: Ints
    """[remote pieces]: the buffer each lies in, by its place in the peer's list."""


class PeerMemory:
    """Reads from the processes of `peers`, by slot. `choose` makes it once everybody could read everybody."""

    name = "peer_memory"
    one_sided = True

    def __init__(self, board: Board, peers: dict[int, Process]) -> None:
        self._board = board
        self._peers = peers
        self._num_trips = 0

    def load(self, cargo: Cargo) -> Trip:
        strangers = set(cargo.plan.slots) - set(self._peers)
        if strangers:
            raise ValueError(
                f"slots {sorted(strangers)} of the plan are not among those that this carrier was tried on"
            )
        source, work = cargo.plan.source, cargo.plan.at_once(cargo.slot)
        pulls = [_pull(cargo, message) for message in work.receives]
        longest = 8 * max(len(source.buffer_sizes(slot)) for slot in cargo.plan.slots)

        def trip(sent: Digests, received: Digests) -> None:
            cargo.steps.before(0)
            if cargo.plan.wire_bytes:
                # The names of the peers' buffers follow from their layout; only where they lie has to be told.
                own = np.array([cargo.old.words(name).data_ptr() for name in cargo.old.sizes], dtype="<i8")
                self._num_trips += 1
                windows = self._board.exchange(f"windows/{self._num_trips}", own.tobytes(), self._watch, longest)
                for pull in pulls:
                    self._read(pull, np.frombuffer(windows[pull.peer], dtype="<i8"))
            cargo.steps.meanwhile()
            if sent.on:
                _hash_sent(cargo.old, work.sends, sent)
                for pull in pulls:
                    _hash_received(pull, received)
            cargo.steps.after(0)

        return trip

    def _read(self, pull: _Pull, addresses: Ints) -> None:
        process = self._peers[pull.peer]
        remote = pull.remote.copy()
        remote[:, 0] += addresses[pull.buffers]
        try:
            if not process.alive:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            read(process, pull.local, remote)
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


def _pull(cargo: Cargo, message: Message) -> _Pull:
    source, target = cargo.plan.source, cargo.plan.target
    places = {name: index for index, name in enumerate(source.buffer_sizes(message.peer))}
    boxes: list[torch.Tensor] = []
    local: list[Ints] = []
    remote: list[Ints] = []
    buffers: list[Ints] = []
    for part in message.parts:
        tensor = source[part.name]
        there = tensor.holdings.view(message.peer, part.box)
        here = target[part.name].holdings.view(cargo.slot, part.box)
        base = cargo.new.words(target[part.name].buffer(here.buffer)).data_ptr()
        boxes.append(cargo.new.box(part.name, part.box))
        local.append(pieces_of(here, base, tensor.item_bytes))
        remote.append(pieces_of(there, 0, tensor.item_bytes))
        buffers.append(np.full(len(remote[-1]), places[tensor.buffer(there.buffer)], dtype=np.int64))
    return _Pull(message.peer, boxes, np.concatenate(local), np.concatenate(remote), np.concatenate(buffers))


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
    for box in pull.boxes:
        received.update(pull.peer, _digest(box, staging))


def _hash_sent(old: Memory, sends: Sequence[Message], sent: Digests) -> None:
    """What peers read of us. Several may read the same part; it is hashed once."""
    staging = torch.empty(HASHED_BYTES, dtype=torch.uint8)
    known: dict[Part, bytes] = {}
    for message in sends:
        for part in message.parts:
            if part not in known:
                known[part] = _digest(old.box(part.name, part.box), staging)
            sent.update(message.peer, known[part])
