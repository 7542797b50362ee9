"""All-gather of short notes among the slots of a transfer: who they are, where their buffers lie.

Two kinds: over the run's store, for slots that it started; over a process group, for people who bring their own.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ductile.fabric.carrier import TransferFailed

FIRST_PAUSE_S, LAST_PAUSE_S = 0.0002, 0.02
"""Pauses between two looks at the store, in seconds; each one is twice as long as the one before."""
LENGTH_BYTES = 4
SHORT_BYTES = 512 - LENGTH_BYTES
"""Longest note that travels in a group's first round; longer ones wait until all ranks know the longest length."""
Missing = Callable[[list[int]], None]
"""Called with the slots whose notes are awaited; raises when waiting for them is in vain."""


def _nothing() -> None:
    pass


class Exchange(Protocol):
    slot: int
    members: tuple[int, ...]
    timeout_s: float

    def all_gather(
        self,
        topic: str,
        note: bytes,
        missing: Missing | None = None,
        longest: int | None = None,
        meanwhile: Callable[[], None] = _nothing,
    ) -> dict[int, bytes]:
        """Leave a note and read those of all members. Collective; a topic is used once. `meanwhile()` is done while the
        notes travel.

        Where all know how long the `longest` note is, saying so can save a round. Raises `TransferFailed` when a
        note has not come within the timeout, and what `meanwhile` raises; the others get the note all the same.
        """
        ...


class StoreExchange:
    """Notes under a prefix of a store; the last reader takes them down."""

    def __init__(self, store: Store, prefix: str, slot: int, members: Sequence[int], timeout_s: float) -> None:
        self._store, self._prefix = store, prefix
        self.slot, self.members, self.timeout_s = slot, tuple(members), timeout_s

    def all_gather(
        self,
        topic: str,
        note: bytes,
        missing: Missing | None = None,
        longest: int | None = None,
        meanwhile: Callable[[], None] = _nothing,
    ) -> dict[int, bytes]:
        keys = {member: f"{self._prefix}/{topic}/{member}" for member in self.members}
        counter = f"{self._prefix}/{topic}/read"
        self._store.set(keys[self.slot], note)  # pyright: ignore[reportArgumentType] (the stub knows only str)
        meanwhile()
        self._wait(keys, missing)
        notes = dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True))
        if self._store.add(counter, 1) == len(keys):
            for key in (*keys.values(), counter):
                self._store.delete_key(key)
        return notes

    def _wait(self, keys: dict[int, str], missing: Missing | None) -> None:
        deadline = time.monotonic() + self.timeout_s
        pause_s = FIRST_PAUSE_S
        while not self._store.check(list(keys.values())):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            late = time.monotonic() >= deadline
            if late or (missing is not None and pause_s == LAST_PAUSE_S):
                awaited = [member for member, key in keys.items() if not self._store.check([key])]
                if missing is not None:
                    missing(awaited)
                if awaited and late:
                    raise TransferFailed(f"slots {awaited} did not reply within {self.timeout_s:g} s", awaited[0])


class GroupExchange:
    """Notes by all-gather on a group whose ranks are `members` in this order."""

    def __init__(self, group: dist.ProcessGroup, slot: int, members: Sequence[int], device: str, timeout_s: float):
        self._group, self._device = group, torch.device(device)
        self.slot, self.members, self.timeout_s = slot, tuple(members), timeout_s

    def all_gather(
        self,
        topic: str,
        note: bytes,
        missing: Missing | None = None,
        longest: int | None = None,
        meanwhile: Callable[[], None] = _nothing,
    ) -> dict[int, bytes]:
        if longest is None:
            notes = self._gather(topic, note, SHORT_BYTES)
            longest = max(map(_length, notes))
            if longest <= SHORT_BYTES:
                meanwhile()
                return self._named(notes)
        assert len(note) <= longest, f"a note of {len(note)} bytes is longer than the longest"
        return self._named(self._gather(topic, note, longest, meanwhile))

    def _gather(
        self, topic: str, note: bytes, longest: int, meanwhile: Callable[[], None] = _nothing
    ) -> list[torch.Tensor]:
        """The length of each note, and as much of it as fits."""
        framed = len(note).to_bytes(LENGTH_BYTES, "little") + note[:longest].ljust(longest, b"\0")
        with self._telling(topic):
            posted = self._post(torch.frombuffer(bytearray(framed), dtype=torch.uint8))
        meanwhile()  # its errors are not those of a slot that died
        with self._telling(topic):
            return self._wait(posted)

    def _named(self, notes: list[torch.Tensor]) -> dict[int, bytes]:
        return {member: _note(framed) for member, framed in zip(self.members, notes, strict=True)}

    @contextmanager
    def _telling(self, topic: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            cause = str(error).partition("\n")[0].partition(" This is typically")[0]  # gloo goes on with advice
            raise TransferFailed(
                f"a slot died, or did not reply within {self.timeout_s:g} s ({topic!r}: {cause})"
            ) from None

    def _post(self, value: torch.Tensor) -> tuple[dist.Work, list[torch.Tensor]]:
        value = value.to(self._device)
        found = [torch.empty_like(value) for _ in self.members]
        work = dist.all_gather(found, value, group=self._group, async_op=True)
        assert work is not None, "this slot is in the group"
        return work, found

    def _wait(self, posted: tuple[dist.Work, list[torch.Tensor]]) -> list[torch.Tensor]:
        work, found = posted
        work.wait(timedelta(seconds=self.timeout_s))  # the group's own timeout may be half an hour
        return [one.cpu() for one in found]


def _length(framed: torch.Tensor) -> int:
    return int.from_bytes(framed[:LENGTH_BYTES].numpy().tobytes(), "little")


def _note(framed: torch.Tensor) -> bytes:
    return framed[LENGTH_BYTES : LENGTH_BYTES + _length(framed)].numpy().tobytes()
