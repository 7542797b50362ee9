"""The trainer behind its Protocol: every command goes to all slots of its formation, one command at a time.

Samples go out in micro-steps: one micro-batch a rank, the next one already waiting in the slot, so that no slot waits
for the orchestrator. Between two of them the trainer may change its formation (`ductile.wire.resize`): what has not
gone out by then is packed anew, for the ranks that there are then.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from ductile.core.batch.packing import pack
from ductile.records import Formation, Manifest, MicroBatch, Sample, StepReport
from ductile.roles import Refused, SlotLost
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import (
    Command,
    Done,
    ExportModel,
    ForwardBackward,
    ForwardBackwardDone,
    LoadState,
    OptimStep,
    Publish,
    Published,
    SaveState,
    Stepped,
    Withdraw,
)
from ductile.wire.remote import R, ask_each

IN_FLIGHT = 2
"""Micro-steps: one that runs and one that waits in the slots. More would only make a change wait for longer."""

Row = tuple[MicroBatch, ...]
"""A micro-step: each rank's micro-batch."""


class RemoteTrainer:
    """Follows `ductile.roles.Trainer`."""

    def __init__(self, mailbox: Mailbox, formation: Formation, timeout_s: float) -> None:
        self.formation = formation
        """Set by a change, within `boundary`."""
        self.with_gradient = False
        """Something has been accumulated since the last optimizer step."""
        self._mailbox, self._timeout_s = mailbox, timeout_s
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        """Changes that wait for the next boundary."""
        self._publishers: dict[int, int] = {}
        """Version to the slot that keeps it, until it is withdrawn."""
        self._withdrawn = asyncio.Condition()
        self._end: SlotLost | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.formation.members)

    async def forward_backward(self, samples: Sequence[Sample], seq_len: int) -> None:
        packed_for: Formation | None = None
        left: Sequence[Sample] = samples
        rows: deque[Row] = deque()
        while packed_for is None or rows:
            async with self._own_turn():
                if packed_for != self.formation:
                    packed_for = self.formation
                    rows = deque(zip(*pack(left, self.num_ranks, seq_len), strict=True))
                await self._micro_steps(rows)
            left = [sample for row in rows for micro_batch in row for sample in micro_batch.samples]

    async def optim_step(self, divisor: float) -> StepReport:
        async with self._own_turn():
            replies = await self._all(OptimStep(divisor), Stepped)
            self.with_gradient = False
            return replies[self.formation.members[0]].report

    async def publish(self, version: int) -> Manifest:
        async with self._own_turn():
            first = self.formation.members[0]
            replies = await self._all(Publish(version), Published)
        manifest = replies[first].manifest
        if manifest is None:
            raise Refused(f"{self._mailbox.describe(first)} published version {version} without a manifest")
        self._publishers[version] = first
        return manifest

    async def withdraw(self, version: int) -> None:
        kept = {kept: slot for kept, slot in self._publishers.items() if kept <= version}
        async with self._own_turn():
            # A slot that has left the trainer may be gone by now, and with it what it kept.
            asked = set(kept.values()).difference(set(self._mailbox.lost).difference(self.formation.members))
            await ask_each(self._mailbox, dict.fromkeys(asked, Withdraw(version)), self._timeout_s, Done)
        async with self._withdrawn:
            for old in kept:
                del self._publishers[old]
            self._withdrawn.notify_all()

    async def save(self, path: str) -> None:
        async with self._own_turn():
            await self._all(SaveState(path), Done)

    async def load(self, path: str) -> None:
        async with self._own_turn():
            await self._all(LoadState(path), Done)
            self.with_gradient = False

    async def export(self, path: str) -> None:
        async with self._own_turn():
            await self._all(ExportModel(path), Done)

    @asynccontextmanager
    async def boundary(self) -> AsyncIterator[None]:
        """Between two micro-steps, with none in flight: nothing else is asked of the trainer meanwhile."""
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    def lose(self, error: SlotLost) -> None:
        """There is no trainer any more: whatever is asked of it raises `error`."""
        self._end = error

    @property
    def publishers(self) -> frozenset[int]:
        """Slots that keep a version which is not withdrawn yet. One that leaves the trainer may be among them."""
        return frozenset(self._publishers.values())

    async def has_withdrawn(self, slot: int, deadline_s: float) -> None:
        """Returns when no version is left that `slot` keeps for others, or at the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._withdrawn:
                await self._withdrawn.wait_for(lambda: slot not in self.publishers)

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        async with self._turn:
            if self._end is not None:
                raise self._end
            yield

    async def _micro_steps(self, rows: deque[Row]) -> None:
        """Run `rows` from the left, and take them out, until none is left or a change is due."""
        flying: deque[asyncio.Task[Mapping[int, ForwardBackwardDone]]] = deque()
        try:
            while flying or (rows and not self._num_waiting):
                while rows and len(flying) < IN_FLIGHT and not self._num_waiting:
                    flying.append(asyncio.create_task(self._micro_step(rows.popleft())))
                    self.with_gradient = True
                await flying[0]
                flying.popleft()
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    async def _micro_step(self, row: Row) -> Mapping[int, ForwardBackwardDone]:
        members = self.formation.members
        commands = {slot: ForwardBackward((part,)) for slot, part in zip(members, row, strict=True)}
        return await ask_each(self._mailbox, commands, self._timeout_s, ForwardBackwardDone)

    async def _all(self, command: Command, expected: type[R]) -> Mapping[int, R]:
        commands = dict.fromkeys(self.formation.members, command)
        return await ask_each(self._mailbox, commands, self._timeout_s, expected)
