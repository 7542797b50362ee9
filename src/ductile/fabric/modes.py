"""What a slot does with its own memory while a transfer runs.

shadow      old and new state exist side by side: the caller commits by using the new one, or drops it
streaming   a target buffer is allocated when its first bytes come, a source buffer freed when its last ones are
            gone: the peak stays near the larger of the two states, and there is no way back
"""

from collections.abc import Callable, Iterable, MutableMapping

import torch

from ductile.core.transfer.plan import Part, Plan
from ductile.fabric import heap
from ductile.fabric.carrier import Steps
from ductile.fabric.memory import Memory, copy

Allocate = Callable[[str, str, int], torch.Tensor]
"""Function that allocates a buffer: (name, dtype, elements) -> a contiguous tensor."""


TRIMS = 16
"""About how many times in a transfer a streaming slot gives freed memory back to the system."""


class Shadow(Steps):
    """Copies what stays on the slot while the first messages travel."""

    def __init__(self, plan: Plan, old: Memory, new: Memory) -> None:
        """The buffers themselves may come until `bind`."""
        self._old, self._new = old, new
        local = plan.local(new.slot)
        self._places = [(old.place(part.name, part.box), new.place(part.name, part.box)) for part in local]
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def bind(self, handed_on: Iterable[str]) -> None:
        kept = set(handed_on)
        self._copies = [
            (self._old.at(source), self._new.at(target)) for source, target in self._places if target.buffer not in kept
        ]

    def meanwhile(self) -> None:
        for source, target in self._copies:
            copy(source, target)


class Streaming(Steps):
    """Allocates and frees round by round.

    What stays on the slot moves when the last bytes of its source buffer have left; buffers that send nothing move at
    once, one after the other.
    """

    def __init__(
        self,
        plan: Plan,
        old: Memory,
        new: Memory,
        handed_on: Iterable[str],
        source: MutableMapping[str, torch.Tensor],
        target: MutableMapping[str, torch.Tensor],
        allocate: Allocate,
    ) -> None:
        self._old, self._new = old, new
        self._source, self._target, self._allocate = source, target, allocate
        kept = set(handed_on)
        rounds = list(plan.rounds(new.slot))
        self._needed: dict[int, list[str]] = {}
        """Target buffers that the messages of a round touch, by the round's index."""
        last: dict[str, int] = dict.fromkeys((name for name in old if name not in kept), -1)
        for index, step in enumerate(rounds):
            for message in step.receives:
                self._needed.setdefault(index, []).extend(new.buffer(part.name, part.box) for part in message.parts)
            for message in step.sends:
                last.update((old.buffer(p.name, p.box), index) for p in message.parts if not p.relayed)
        self._leaving: dict[int, list[str]] = {}
        """Source buffers that no round after this one reads, by the round's index; -1 before the first."""
        for name, index in last.items():
            if name not in kept:
                self._leaving.setdefault(index, []).append(name)
        self._old_bytes, self._freed_bytes = sum(old.words(name).nbytes for name in old), 0
        self._copies: dict[str, list[Part]] = {}
        for part in plan.local(new.slot):
            if new.buffer(part.name, part.box) not in kept:
                self._copies.setdefault(old.buffer(part.name, part.box), []).append(part)

    def before(self, index: int) -> None:
        if index == 0:
            self.after(-1)
        for name in self._needed.get(index, ()):
            self._ensure(name)

    def after(self, index: int) -> None:
        for name in self._leaving.pop(index, ()):
            for part in self._copies.pop(name, ()):
                self._ensure(self._new.buffer(part.name, part.box))
                copy(self._old.box(part.name, part.box), self._new.box(part.name, part.box))
            self._freed_bytes += self._old.words(name).nbytes
            self._old.drop(name)
            del self._source[name]
        if self._freed_bytes > self._old_bytes // TRIMS:
            # The C library keeps freed pieces for later, and same-sized aligned ones do not fit into the holes.
            heap.trim()
            self._freed_bytes = 0

    def finish(self) -> None:
        """Move what stays where there were no rounds, and allocate buffers that hold nothing but padding."""
        self.after(-1)
        for name in self._new.sizes:
            self._ensure(name)

    def _ensure(self, name: str) -> None:
        if name not in self._new:
            self._target[name] = self._allocate(name, *self._new.sizes[name])
            self._new.add(name, self._target[name])
