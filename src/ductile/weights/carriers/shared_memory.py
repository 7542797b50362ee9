"""Buckets by shared memory, between processes of one host: a ring of slots that the sender fills and all receivers map.

No byte is copied on the way: the sink reads the slot that the sender has filled. A slot is filled anew only after
every receiver has acknowledged its bucket; one that was given up, and reads on in a slot that is filled anew, never
hears `Through`, and so never takes what it read for the version.

The ring is a memfd that readers open through /proc and cannot write to. A sender keeps it from one update to the next,
and readers map it anew: an update leaves nothing of it in their memory. When its owner and its readers have ended,
however they ended, the kernel frees it: nothing is left behind.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ductile.fabric.alignment import aligned
from ductile.fabric.segment import F_SEAL_FUTURE_WRITE
from ductile.messages.updates import Bucket, Offer
from ductile.weights.carriers.carrier import UpdateFailed
from ductile.weights.carriers.channel import Coming, Loaded, Ring, Through
from ductile.weights.carriers.connected import ConnectedSender
from ductile.weights.carriers.control import Audience
from ductile.weights.carriers.source import Source

SLOT_ALIGNMENT_BYTES = 4096
"""Slots of a ring begin at multiples of this: a page of most machines."""


class SlotRing:
    """Memory of a sender in which buckets are filled, for all carriers."""

    def __init__(self, name: str, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, self.size_of(slot_bytes)
        self._got_bytes = [0] * num_slots
        """Bytes of each slot, from its beginning, whose memory is there."""
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.num_slots * self.slot_bytes)
            self._content = torch.frombuffer(mmap.mmap(self._fd, num_slots * self.slot_bytes), dtype=torch.uint8)
            self._seal()
        except BaseException:
            os.close(self._fd)
            raise

    def _seal(self) -> None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE)  # only the mapping above may write
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.1
                raise
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)

    @staticmethod
    def size_of(slot_bytes: int) -> int:
        """Return the bytes of a slot that has room for so many."""
        return aligned(max(1, slot_bytes), SLOT_ALIGNMENT_BYTES)

    @property
    def location(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def slot(self, index: int, num_bytes: int) -> Tensor:
        """Return a slot's bytes, to be filled. Raises OSError where their memory cannot be had: writing to a mapping
        would end the process then. To get it in one call takes a tenth less time than page by page."""
        if num_bytes > self._got_bytes[index]:
            os.posix_fallocate(self._fd, index * self.slot_bytes, aligned(num_bytes))
            self._got_bytes[index] = aligned(num_bytes)
        return _slot(self._content, index, self.slot_bytes, num_bytes)

    def close(self) -> None:
        """Free it, as soon as no view of it is left."""
        del self._content
        os.close(self._fd)


def _slot(content: Tensor, index: int, slot_bytes: int, num_bytes: int) -> Tensor:
    return content[index * slot_bytes :][:num_bytes]


class RingMemory:
    """The ring that a sender keeps from one update to the next: the kernel takes longer to make fresh pages than it
    takes to fill them. From any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: SlotRing | None = None
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        kept = self._kept
        return kept.num_slots * kept.slot_bytes if kept else 0

    def take(self, num_slots: int, slot_bytes: int) -> SlotRing:
        """Return a ring that nobody else has, until it is kept again or closed."""
        kept = self._exchange(None)
        if kept is not None and (kept.num_slots, kept.slot_bytes) == (num_slots, SlotRing.size_of(slot_bytes)):
            return kept
        if kept is not None:
            kept.close()
        return SlotRing("ductile-buckets", num_slots, slot_bytes)

    def keep(self, ring: SlotRing) -> None:
        """Keep a ring, in place of the one before it; once this has been closed, close it."""
        before = self._exchange(ring)
        if before is not None:
            before.close()

    def close(self) -> None:
        """Free what is kept, and whatever comes later."""
        kept = self._exchange(None, closes=True)
        if kept is not None:
            kept.close()

    def _exchange(self, ring: SlotRing | None, closes: bool = False) -> SlotRing | None:
        """Return what was kept, which is the caller's now, or the ring itself where nothing is kept any more."""
        with self._lock:
            self._is_closed = self._is_closed or closes
            if self._is_closed and ring is not None:
                return ring
            kept, self._kept = self._kept, ring
        return kept


class SharedMemorySender(ConnectedSender):
    def __init__(self, audience: Audience, ring: SlotRing) -> None:
        super().__init__(audience)
        audience.tell(Ring(ring.location, ring.num_slots, ring.slot_bytes))


def receive(source: Source, offer: Offer, load: Callable[[Bucket, Tensor, str], None]) -> None:
    """Load all buckets of one sender. Raises `UpdateFailed`."""
    ring = source.next()
    if not isinstance(ring, Ring):
        raise UpdateFailed(f"{offer.sender} said nothing of its memory")
    content = _map(ring, offer.sender) if offer.buckets else torch.empty(0)
    for bucket in offer.buckets:
        coming = source.next()
        if not isinstance(coming, Coming) or coming.index != bucket.index or not 0 <= coming.slot < ring.num_slots:
            raise UpdateFailed(f"{offer.sender} sent {coming} where bucket {bucket.index} was due")
        load(bucket, _slot(content, coming.slot, ring.slot_bytes, bucket.num_bytes), coming.checksum)
        source.say(Loaded(bucket.index))
    if not isinstance(source.next(), Through):
        raise UpdateFailed(f"{offer.sender} goes on after its last bucket")


def _map(ring: Ring, sender: str) -> Tensor:
    """Return the whole ring, which can only be read: who writes to this tensor ends its process. It lives as long as a
    view does."""
    num_bytes = ring.num_slots * ring.slot_bytes
    try:
        fd = os.open(ring.location, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The descriptor's number may serve another file by now; a shorter one would end this process when read.
            if (size_bytes := os.fstat(fd).st_size) != num_bytes or num_bytes <= 0:
                raise UpdateFailed(f"the memory of {sender} has {size_bytes} bytes, and {num_bytes} were announced")
            mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except OSError as error:
        raise UpdateFailed(f"the memory of {sender} cannot be mapped: {ring.location}: {error.strerror}") from error
    # torch has no tensors that cannot be written to, and warns of their buffers.
    view = (ctypes.c_char * num_bytes).from_address(np.frombuffer(mapping, np.uint8).ctypes.data)
    view.mapping = mapping  # pyright: ignore[reportAttributeAccessIssue] (keeps it as long as the tensor)
    return torch.frombuffer(view, dtype=torch.uint8)
