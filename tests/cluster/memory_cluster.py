"""A `Cluster` inside one event loop, above slots that reply from memory: the double of `LocalCluster`.

transport = MemoryTransport(dict.fromkeys(range(3), respond))
cluster = MemoryCluster(Mailbox(transport), range(3))
cluster.kill(1)        # as by a signal
cluster.num_refused = 2  # the next two starts of slots fail
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ductile.cluster.cluster import Cluster, StartFailed
from ductile.cluster.survey import survey
from ductile.concurrency.listeners import Listeners
from ductile.core.layout.model.peak import Arithmetic
from ductile.core.scheduling.drains import Notice
from ductile.messages.workers import Surveyed
from ductile.transport.mailbox import Mailbox

FIRST_PID = 7


@dataclass(frozen=True, slots=True)
class MemoryProcess:
    pid: int


class MemoryCluster:
    def __init__(
        self,
        mailbox: Mailbox,
        slots: Sequence[int],
        begin: Callable[[int], None] = lambda slot: None,
        start_s: float = 0.0,
    ) -> None:
        """begin: called when a slot that was lost is started anew; what replies for it forgets its earlier life then.
        start_s: seconds that a start takes."""
        self.mailbox, self.slots = mailbox, tuple(slots)
        self.rendezvous = "127.0.0.1:1"
        self.on_notice = Listeners[[Notice]]()
        self._needed: Callable[[int], bool] = lambda slot: True
        self.devices = dict.fromkeys(slots, "cpu")
        self.processes: dict[int, MemoryProcess] = {}
        self.running: set[int] = set()
        self.sentences: list[str] = []
        """What the run was failed with."""
        self.errors: list[Exception] = []
        self.num_started = 0
        """Starts that were tried after the first one."""
        self.num_refused = 0
        """How many of the next ones fail."""
        self._begin, self._start_s = begin, start_s
        self._failed = asyncio.Event()
        self._run(self.slots)

    async def start(self) -> None:
        """The slots are there as soon as the cluster is made."""

    async def add(self, slots: Sequence[int]) -> list[int]:
        new = [slot for slot in slots if slot not in self.running or slot in self.mailbox.lost]
        if not new:
            return []
        await asyncio.sleep(self._start_s)
        self.num_started += 1
        if self.num_refused:
            self.num_refused -= 1
            raise StartFailed(f"slot {new[0]} ended with exit code 1")
        for slot in new:
            self.mailbox.welcome(slot)
            self._begin(slot)
        self._run(new)
        return new

    async def survey(self, measure: Arithmetic | None = None) -> dict[int, Surveyed]:
        return await survey(self.mailbox, self.slots, 10.0, measure)

    def startable(self, slots: Iterable[int]) -> frozenset[int]:
        return frozenset(slots) - self.mailbox.gone

    async def begin_again(self, slots: Sequence[int]) -> None:
        for slot in [*self.running]:
            self.condemn(slot, f"slot {slot} was ended")
        self._failed.clear()
        self.sentences.clear()
        self._needed = lambda slot: True
        await self.add(slots)

    def ends_without(self, needed: Callable[[int], bool]) -> None:
        self._needed = needed

    @property
    def has_failed(self) -> bool:
        return self._failed.is_set()

    async def death(self) -> str:
        await self._failed.wait()
        if self.errors:
            raise self.errors[0]
        return self.sentences[0]

    def node_of(self, slot: int) -> int:
        return 0

    async def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.running.discard(slot)
            self.mailbox.lose(slot, f"slot {slot} has left, as it was told to", is_gone=True)

    def kill(self, slot: int) -> None:
        """The slot dies as by a signal."""
        self.condemn(slot, f"slot {slot} was killed by SIGKILL")

    def condemn(self, slot: int, sentence: str) -> None:
        self.running.discard(slot)
        if slot in self.mailbox.lost:
            return
        if self._needed(slot):
            self.fail(sentence)
        self.mailbox.lose(slot, sentence)

    def fail(self, sentence: str) -> None:
        self.sentences.append(sentence)
        self._failed.set()

    def fail_with(self, sentence: str, error: Exception) -> None:
        self.errors.append(error)
        self._failed.set()

    async def stop(self) -> None:
        self.running.clear()

    def _run(self, slots: Sequence[int]) -> None:
        self.slots = tuple(sorted({*self.slots, *slots}))
        for slot in slots:
            self.devices.setdefault(slot, "cpu")
            self.processes[slot] = MemoryProcess(FIRST_PID + slot)
            self.running.add(slot)


_: type[Cluster] = MemoryCluster  # a type checker looks whether it agrees
