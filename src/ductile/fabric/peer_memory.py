"""Read the state straight out of a peer's process, on the CPU of one host.

The kernel copies from one address space into the other (`process_vm_readv`): ordinary memory, and no slot has to lend
it. A slab after the other is read, hashed while it is in the core's cache, and put where it belongs: what is contiguous
here arrives in its place, the rest goes through staging memory that never leaves the cache. Nothing can be left behind.
A peer that has stopped can still be read; one that has died is noticed at once. What is read must be frozen.
"""

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ductile.core.layout.geometry.holdings import Ints
from ductile.core.transfer.plan import Part, PeerMessage
from ductile.fabric import boxes
from ductile.fabric.alignment import aligned
from ductile.fabric.carrier import PreparedTransfer, TransferFailed, TransferInputs
from ductile.fabric.digest import Digests
from ductile.fabric.exchange import Exchange
from ductile.fabric.memory import Memory, as_array
from ductile.fabric.process import Process
from ductile.fabric.slabs import ACROSS_BYTES, MAX_PIECES, SLAB_BYTES, Slab, slabs

STAGING_BYTES = ACROSS_BYTES + SLAB_BYTES
PIECE_BYTES = 16
"""Bytes of a piece as the kernel takes it: an address and a length."""
_PR_SET_PTRACER = 0x59616D61

Bytes = NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
]  # fmt: skip


def permit_siblings() -> None:
    """Let our parent's other children read our memory where the kernel asks for permission (Yama's ptrace_scope 1)."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)  # elsewhere an error, which means nothing


def read(process: Process, local: Ints, remote: Ints) -> None:
    """Copy memory of `process` into ours. Both lists are [pieces, (address, bytes)], equally long in bytes, and of at
    most MAX_PIECES.

    Raises `OSError`: ESRCH when the process is gone, EPERM when it may not be read, EFAULT for addresses it lacks.
    """
    _read(process, local.ctypes.data, len(local), remote.ctypes.data, len(remote), int(local[:, 1].sum()))


def _read(process: Process, local: int, num_local: int, remote: int, num_remote: int, num_bytes: int) -> None:
    """`read` with the two lists given by their addresses and lengths."""
    done = _libc.process_vm_readv(process.pid, local, num_local, remote, num_remote, 0)
    if done != num_bytes:
        code = ctypes.get_errno() if done < 0 else errno.EFAULT  # only the beginning could be read
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class _ReadSlab:
    """What becomes of a slab once it has been read."""

    gathered: tuple[NDArray[Any], NDArray[Any]] | None
    """(to, from) of the copy that leaves out what was read between the elements; None where nothing was."""
    content: memoryview
    """The slab's elements in row-major order, to be hashed."""
    scattered: tuple[NDArray[Any], NDArray[Any]] | None
    """(to, from) of the copy out of staging memory; None where the slab was read into its place."""
    ends_part: bool


class _Step:
    """Some slabs that are read in one call: as many as stay in the cache together."""

    def __init__(self, staging: Bytes) -> None:
        self._staging = staging
        self._num_bytes = self._num_pieces = self._staged_bytes = 0
        self.local: list[tuple[int, int]] = []
        """(address, bytes) of the memory here that each slab is read into."""
        self.remote: list[Ints] = []
        """Pieces of each slab: [pieces, (offset in the peer's buffer, bytes)]."""
        self.buffers: list[int] = []
        """The peer's buffer that each piece lies in, by its number in the peer's layout."""
        self.read_slabs: list[_ReadSlab] = []

    def has_room(self, slab: Slab) -> bool:
        return (
            self._num_bytes + slab.num_bytes <= SLAB_BYTES
            and self._num_pieces + len(slab.pieces) <= MAX_PIECES
            and self._staged_bytes + _across_bytes(slab) + _packed_bytes(slab) <= len(self._staging)
        )

    def add(self, buffer: int, slab: Slab, memory: Bytes, ends_part: bool) -> None:
        """Add a slab to read from the peer's `buffer` into `memory`."""
        target = packed = slab.lying_here(memory)
        loose = None
        if slab.across:
            loose = slab.lying_there(self._staging, self._staged_bytes)
        if _is_staged(slab):
            packed = slab.packed(self._staging, self._staged_bytes + _across_bytes(slab))
        self.read_slabs.append(
            _ReadSlab(
                None if loose is None else (packed, loose),
                packed.data,
                None if packed is target else (target, packed),
                ends_part,
            )
        )
        arriving = packed if loose is None else loose
        self.local.append((arriving.ctypes.data, int(slab.pieces[:, 1].sum())))
        self.remote.append(slab.pieces)
        self.buffers += [buffer] * len(slab.pieces)
        self._num_bytes += slab.num_bytes
        self._num_pieces += len(slab.pieces)
        self._staged_bytes += _across_bytes(slab) + _packed_bytes(slab)


def _across_bytes(slab: Slab) -> int:
    """Staging memory that a slab takes as it is read."""
    return aligned(slab.span_bytes) if slab.across else 0


def _packed_bytes(slab: Slab) -> int:
    """Staging memory that a slab takes end to end; 0 where it is read into its place."""
    return aligned(slab.num_bytes) if _is_staged(slab) else 0


def _is_staged(slab: Slab) -> bool:
    """Out of the cache a slab is copied past the cache faster than it is read into memory that is not there: on one
    core of a Xeon, with its hash, 5.5 GB/s and 4.9. numpy copies as slowly as the kernel: 4.2."""
    return boxes.built() or not slab.is_whole


class _Pull:
    """What one peer has for us, made ready: only where its buffers begin is not known yet."""

    def __init__(self, inputs: TransferInputs, message: PeerMessage, staging: Bytes) -> None:
        self.peer = message.peer
        steps = [_Step(staging)]
        for buffer, slab, memory, ends_part in _slabs_of(inputs, message):
            if not steps[-1].has_room(slab):
                steps.append(_Step(staging))
            steps[-1].add(buffer, slab, memory, ends_part)
        self._read_slabs = [step.read_slabs for step in steps]
        self._local = np.array([piece for step in steps for piece in step.local], dtype=np.int64)
        self._offsets = np.concatenate([pieces for step in steps for pieces in step.remote])
        self._buffers = np.concatenate([np.array(step.buffers, dtype=np.int64) for step in steps])
        self._remote = self._offsets.copy()
        self._calls: list[tuple[int, int, int, int, int]] = []
        """Arguments of each call of `_read`, besides the process."""
        local, remote = self._local.ctypes.data, self._remote.ctypes.data
        for step in steps:
            num_bytes = sum(size for _, size in step.local)
            self._calls.append((local, len(step.local), remote, len(step.buffers), num_bytes))
            local += len(step.local) * PIECE_BYTES
            remote += len(step.buffers) * PIECE_BYTES

    def run(self, process: Process, addresses: Ints, received: Digests) -> None:
        """Read all slabs; `addresses` are those of the peer's buffers. Raises `OSError`."""
        self._remote[:, 0] = self._offsets[:, 0] + addresses[self._buffers]
        digest = xxhash.xxh3_64()
        for read_slabs, call in zip(self._read_slabs, self._calls, strict=True):
            _read(process, *call)
            for read_slab in read_slabs:
                if read_slab.gathered is not None:
                    np.copyto(*read_slab.gathered)
                if received.on:
                    digest.update(read_slab.content)
                    if read_slab.ends_part:
                        received.update(self.peer, digest.digest())
                        digest.reset()
                if read_slab.scattered is not None:
                    boxes.copy(*read_slab.scattered, least_bytes=0)


class PeerMemory:
    """Reads from the processes of `peers`, by slot. `choose` makes it once every slot could read every other."""

    name = "peer_memory"
    one_sided = True

    def __init__(self, exchange: Exchange, peers: dict[int, Process]) -> None:
        self._exchange = exchange
        self._peers = peers
        self._num_transfers = 0

    def prepare(self, inputs: TransferInputs) -> PreparedTransfer:
        strangers = set(inputs.plan.slots) - set(self._peers)
        if strangers:
            raise ValueError(
                f"slots {sorted(strangers)} of the plan are not among those that this carrier was tried on"
            )
        source, work = inputs.plan.source, inputs.plan.at_once(inputs.slot)
        staging = np.empty(STAGING_BYTES, dtype=np.uint8)
        pulls = [_Pull(inputs, message, staging) for message in work.receives]
        longest = 8 * max(len(source.buffer_sizes(slot)) for slot in inputs.plan.slots)

        def run(sent: Digests, received: Digests) -> None:
            inputs.steps.before(0)
            if inputs.plan.wire_bytes:
                # The names of the peers' buffers follow from their layout; only where they lie has to be told.
                own = np.array([inputs.old.words(name).data_ptr() for name in inputs.old.sizes], dtype="<i8")
                self._num_transfers += 1
                topic, meanwhile = f"addresses/{self._num_transfers}", inputs.steps.meanwhile
                notes = self._exchange.all_gather(topic, own.tobytes(), self._watch, longest, meanwhile)
                for pull in pulls:
                    self._read(pull, np.frombuffer(notes[pull.peer], dtype="<i8"), received)
            else:
                inputs.steps.meanwhile()
            if sent.on:
                _hash_sent(inputs.old, work.sends, sent, staging)
            inputs.steps.after(0)

        return run

    def _read(self, pull: _Pull, addresses: Ints, received: Digests) -> None:
        process = self._peers[pull.peer]
        try:
            if not process.alive:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            pull.run(process, addresses, received)
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


def _slabs_of(inputs: TransferInputs, message: PeerMessage) -> Iterator[tuple[int, Slab, Bytes, bool]]:
    """(the peer's buffer, the slab, the memory here, whether the slab ends its part) in the parts' order."""
    source = inputs.plan.source
    numbers = {name: number for number, name in enumerate(source.buffer_sizes(message.peer))}
    for part in message.parts:
        tensor = source[part.name]
        there = tensor.holdings.view(message.peer, part.box)
        here = inputs.new.place(part.name, part.box)
        memory = _bytes(inputs.new, here.buffer)
        found = list(slabs(there, here.view, tensor.item_bytes))
        for slab in found:
            yield numbers[tensor.buffer(there.buffer)], slab, memory, slab is found[-1]


def _bytes(memory: Memory, buffer: str) -> Bytes:
    return as_array(memory.words(buffer)).view(np.uint8)


def _hash_sent(old: Memory, sends: Sequence[PeerMessage], sent: Digests, staging: Bytes) -> None:
    """Hash what peers read of this slot. Several may read the same part; it is hashed once."""
    known: dict[Part, bytes] = {}
    for message in sends:
        for part in message.parts:
            if part not in known:
                known[part] = _digest(old, part, staging)
            sent.update(message.peer, known[part])


def _digest(memory: Memory, part: Part, staging: Bytes) -> bytes:
    """The hash of a box's bytes in row-major order."""
    buffer, view = memory.place(part.name, part.box)
    content = _bytes(memory, buffer)
    digest = xxhash.xxh3_64()
    for slab in slabs(view, view, memory.layout[part.name].item_bytes):
        elements = slab.lying_here(content)
        if not slab.is_whole:
            packed = slab.packed(staging, 0)
            np.copyto(packed, elements)
            elements = packed
        digest.update(elements.data)
    return digest.digest()
