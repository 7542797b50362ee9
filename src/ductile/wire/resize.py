"""A resize of the live trainer: one change, from the first `Hold` to the last `Drop`.

    Hold(joining)   joiners build what needs no state          training goes on
    Prepare         groups, skeleton, buffers, plan            training goes on; old members start at a boundary,
                                                               and are asked at boundaries whether they are ready
    Freeze          all say their plan's key and progress      ┐
    Move            all say what they sent and received        ├ the pause, at a boundary
    Commit          the new state is the state                 ┘
    Settle          memory for taking back is freed            training goes on
    Drop            slots that left give the role up           training goes on

Each is a fan-out with a deadline and one outcome a slot. `ductile.core.cluster.membership` says what becomes of a bad
one: `Rollback`, and the old formation goes on, or the end of the trainer. Whoever does not answer in time is killed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ductile.core.cluster.membership import (
    Phase,
    Ruling,
    complaint_about_bytes,
    complaint_about_plans,
    complaint_about_progress,
    judge,
    overdue,
    total,
)
from ductile.records import Change, Formation
from ductile.roles import Late, Refused, SlotLost
from ductile.wire.mailbox import Mailbox, Outcome
from ductile.wire.messages import (
    Command,
    Commit,
    Done,
    Drop,
    Freeze,
    Frozen,
    Hold,
    Move,
    Moved,
    Prepare,
    Readiness,
    Ready,
    Reply,
    Rollback,
    Settle,
)
from ductile.wire.remote import AFTER_FAILURE_S
from ductile.wire.trainer import RemoteTrainer

GRACE_S = 1.0
"""Slots know the deadline of a step, too. Those that wait in vain for another one have this long to say so."""

READY_S, READY_SHARE = 0.02, 0.1
"""Between two questions whether slots are ready: seconds at least, and a share of how long it has taken so far. Each is
asked at a boundary, and costs the trainer about 2 ms."""

R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a change needs to know besides the slots."""

    settings: Mapping[str, object]
    """The train role's, for joiners."""
    rendezvous: str
    timeout_s: float
    """For each step. Slots have the same one in their settings."""
    leave_s: float
    """How long a slot that left keeps a published version for those that still fetch it."""
    keeps_old: bool = True
    """The old state stays whole until `Settle`; see `ductile.core.cluster.membership.judge`."""


@dataclass(frozen=True, slots=True)
class ResizeResult:
    """What became of a change."""

    change: Change
    outcome: Literal["resized", "rolled_back"]
    reason: str
    """Why it was rolled back; "" when it was not."""
    pause_s: float
    """In which the trainer stood still, for this change alone."""
    seconds: Mapping[str, float]
    """By step of the transaction."""
    slot_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """By phase of the work on the slots: the longest of all slots."""
    num_bytes: int = 0
    """Received by all slots together."""
    carrier: str = ""
    """What moved the bytes, and why."""


class _Unfinished(Exception):
    """A step of the transaction that cannot be followed by the next one."""

    def __init__(self, ruling: Ruling) -> None:
        super().__init__(ruling.reason)
        self.ruling = ruling


class Transaction:
    """Carries one change out, once: `await Transaction(...).run()`."""

    def __init__(
        self,
        mailbox: Mailbox,
        trainer: RemoteTrainer,
        after: Formation,
        terms: Terms,
        kill: Callable[[int, str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """kill(slot, sentence): end a slot that does not answer, and lose it in the mailbox."""
        self._mailbox, self._trainer, self._terms, self._kill, self._clock = mailbox, trainer, terms, kill, clock
        # Every change has a number of its own, and every command from now on carries it.
        mailbox.epoch += 1
        self.change = Change(mailbox.epoch, trainer.formation, after)
        self.phase: Phase = "hold"
        """The step that is under way, or was the last."""
        self._seconds: dict[str, float] = {}
        self._pause_s = 0.0
        self._moved: dict[int, Moved] = {}

    async def run(self) -> ResizeResult:
        """Raises SlotLost when there is no trainer any more; its sentence says what was lost."""
        try:
            await self._hold()
            await self._prepare()
            async with self._boundary():
                await self._freeze_and_move()
                await self._step("commit", Commit(self.change.epoch), Done)
                self._trainer.formation = self.change.after
        except _Unfinished as unfinished:
            await self._drop(self.change.joiners, leave_s=0.0)
            return self._result("rolled_back", str(unfinished))
        try:
            await self._step("settle", Settle(self.change.epoch), Done)
        except _Unfinished as unfinished:
            raise self._lost(str(unfinished)) from None
        await self._drop(self.change.leavers, self._terms.leave_s)
        return self._result("resized")

    async def _hold(self) -> None:
        """Only joiners hear of this: should it fail, there is nothing to take back."""
        members, terms = self.change.after.members, self._terms
        hold = Hold("train", dict(terms.settings), members, terms.rendezvous, joining=True)
        with self._timed("hold"):
            outcomes = await self._ask(dict.fromkeys(self.change.joiners, hold))
        self._judge("hold", outcomes)

    async def _prepare(self) -> None:
        """Joiners are ready when everybody is. Old members answer at once, from a boundary: they must not be asked in
        the middle of a micro-step, which may take longer than any deadline of a change."""
        prepare = Prepare(self.change)
        with self._timed("prepare"):
            async with self._boundary():
                joining = asyncio.create_task(self._ask(dict.fromkeys(self.change.joiners, prepare)))
                try:
                    outcomes = await self._ask(dict.fromkeys(self.change.before.members, prepare))
                except BaseException:
                    joining.cancel()
                    raise
            outcomes |= await joining
            try:
                self._judge("prepare", outcomes)
            except _Unfinished:
                async with self._boundary():
                    raise
            await self._until_ready()

    async def _until_ready(self) -> None:
        """Old members prepare beside training. To freeze them before they have done would be to wait for them then."""
        waiting, began_s = set(self.change.before.members), self._clock()
        while waiting:
            async with self._boundary():
                outcomes = await self._ask(dict.fromkeys(sorted(waiting), Ready(self.change.epoch)))
                self._judge("prepare", outcomes)
                waiting = {slot for slot, said in outcomes.items() if not (isinstance(said, Readiness) and said.ready)}
                waited_s = self._clock() - began_s
                if waiting and waited_s > self._terms.timeout_s:
                    first = self._mailbox.describe(min(waiting))
                    self._complain("prepare", f"{first} did not prepare within {self._terms.timeout_s:g} s")
            if waiting:
                await asyncio.sleep(max(READY_S, READY_SHARE * waited_s))

    async def _freeze_and_move(self) -> None:
        change = self.change
        frozen = await self._step("freeze", Freeze(change.epoch, self._trainer.with_gradient), Frozen)
        progress = {slot: reply.progress for slot, reply in frozen.items() if reply.progress is not None}
        complaint = complaint_about_plans({slot: reply.plan_key for slot, reply in frozen.items()})
        if missing := sorted(set(change.before.members).difference(progress)):
            complaint = complaint or f"slot {missing[0]} does not say how far it is"
        self._complain("freeze", complaint or complaint_about_progress(progress))
        self._moved = await self._step("move", Move(change.epoch, total(progress)), Moved)
        sent = {slot: reply.sent for slot, reply in self._moved.items()}
        received = {slot: reply.received for slot, reply in self._moved.items()}
        self._complain("move", complaint_about_bytes(sent, received))

    @asynccontextmanager
    async def _boundary(self) -> AsyncIterator[None]:
        """The trainer stands still. What is left unfinished is taken back before it goes on."""
        async with self._trainer.boundary():
            began_s = self._clock()
            try:
                yield
            except _Unfinished as unfinished:
                await self._take_back(unfinished.ruling)
                raise
            finally:
                self._pause_s += self._clock() - began_s

    async def _take_back(self, ruling: Ruling) -> None:
        if ruling.verdict == "stop":
            raise self._lost(ruling.reason)
        try:
            await self._step("rollback", Rollback(self.change.epoch), Done)
        except _Unfinished as unfinished:
            raise self._lost(f"{ruling.reason}; {unfinished}") from None

    async def _drop(self, slots: Sequence[int], leave_s: float) -> None:
        """Have slots give the role up that are not in the trainer. One that cannot is not worth keeping."""
        for slot in slots:
            await self._trainer.has_withdrawn(slot, leave_s)
        outcomes = await self._ask(dict.fromkeys(slots, Drop("train")))
        for slot, outcome in outcomes.items():
            if isinstance(outcome, Late):
                self._kill(slot, f"{outcome}; it has been killed")

    async def _step(self, phase: Phase, command: Command, expected: type[R]) -> dict[int, R]:
        """Ask all slots that are left. Raises _Unfinished unless all that matter have done it."""
        with self._timed(phase):
            outcomes = await self._ask(dict.fromkeys(self.change.slots, command))
        for slot, outcome in outcomes.items():
            if not isinstance(outcome, expected | Exception):
                said = f"{type(command).__name__} with {type(outcome).__name__}"
                outcomes[slot] = Refused(f"{self._mailbox.describe(slot)} answered {said}")
        self._judge(phase, outcomes)
        return {slot: outcome for slot, outcome in outcomes.items() if isinstance(outcome, expected)}

    async def _ask(self, commands: Mapping[int, Command]) -> dict[int, Outcome]:
        alive = {slot: command for slot, command in commands.items() if slot not in self._mailbox.lost}
        outcomes = await self._mailbox.ask_all(alive, self._terms.timeout_s + GRACE_S, AFTER_FAILURE_S)
        gone = {slot: SlotLost(self._mailbox.lost[slot]) for slot in commands if slot not in alive}
        return outcomes | gone

    def _judge(self, phase: Phase, outcomes: Mapping[int, Outcome]) -> None:
        dead = {slot: str(outcome) for slot, outcome in outcomes.items() if isinstance(outcome, SlotLost)}
        failed = {slot: str(outcome) for slot, outcome in outcomes.items() if isinstance(outcome, Refused)}
        late = {slot: str(outcome) for slot, outcome in outcomes.items() if isinstance(outcome, Late)}
        silent_s = {slot: self._mailbox.silent_for_s(slot) for slot in late}
        for slot in overdue(late, silent_s, others_failed=bool(dead or failed)):
            dead[slot] = f"{late.pop(slot)}, and has been killed"
            self._kill(slot, dead[slot])
        self._rule(phase, dead, failed | late)

    def _complain(self, phase: Phase, complaint: str) -> None:
        """About all of them together."""
        if complaint:
            self._rule(phase, {}, dict.fromkeys(self.change.slots, complaint))

    def _rule(self, phase: Phase, dead: Mapping[int, str], failed: Mapping[int, str]) -> None:
        ruling = judge(phase, self.change, dead, failed, self._terms.keeps_old)
        if ruling.verdict != "proceed":
            raise _Unfinished(ruling)

    def _lost(self, sentence: str) -> SlotLost:
        lost = SlotLost(sentence)
        self._trainer.lose(lost)
        return lost

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        self.phase, began_s = phase, self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - began_s

    def _result(self, outcome: Literal["resized", "rolled_back"], reason: str = "") -> ResizeResult:
        phases = dict.fromkeys(name for moved in self._moved.values() for name in moved.seconds)
        return ResizeResult(
            change=self.change,
            outcome=outcome,
            reason=reason,
            pause_s=self._pause_s,
            seconds=self._seconds,
            slot_seconds={name: max(moved.seconds.get(name, 0.0) for moved in self._moved.values()) for name in phases},
            num_bytes=sum(moved.num_bytes for moved in self._moved.values()),
            carrier=next((moved.carrier for moved in self._moved.values() if moved.carrier), ""),
        )
