"""A resize of the live trainer: one change, from the first `AssignRole` to the last `ReleaseRole`.

    AssignRole      joiners build what needs no state          training goes on
    Prepare         groups, skeleton, buffers, plan            training goes on, old slots are told in the middle of it;
                                                               all prepare beside what they do, and say when they have
    (release)       joiners' other roles (`RunRoles.release`)     ┐
    Freeze          all say their plan's key and progress      │
    TransferState   all say what they sent and received        ├ the pause, at a boundary
    Commit          the new state is the state                 │
    Finalize        what taking back would need is let go of   ┘ of slots that left: training goes on
    ReleaseRole     slots that left give the role up           training goes on

Each is a fan-out with a deadline and one outcome a slot. `ductile.core.scheduling.resize_rulings` says what becomes of
a bad one: `Rollback`, and the old layout goes on, or the end of the trainer. A slot that is late and silent, too, is
killed; one that is only slow is not, unless it must give the role up and does not within `patience_s`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from ductile.concurrency.background import finish, start
from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.concurrency.structured import undisturbed
from ductile.core.layout.geometry.parallel_layout import ParallelLayout, ResizeOrder
from ductile.core.scheduling.orders import Release
from ductile.core.scheduling.resize_rulings import (
    Phase,
    Ruling,
    describe,
    judge,
    total,
    violation_in_bytes,
    violation_in_plans,
    violation_in_progress,
)
from ductile.elastic.participants import LOOK_S, Participants
from ductile.error_text import error_text
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.trainer.remote_trainer import RemoteTrainer
from ductile.messages.control import Resized
from ductile.messages.resizes import (
    Commit,
    Finalize,
    Freeze,
    Frozen,
    Prepare,
    Rollback,
    SlotPhase,
    StateTransferred,
    TransferState,
)
from ductile.messages.workers import AssignRole, Command, Done, PreparationEnded, ReleaseRole, Reply
from ductile.observe import timed
from ductile.roles import Late, Refused, SlotLost, TrainerLost
from ductile.transport.mailbox import Died, Mailbox, Outcome, SlotEvent

CAUSES_S = 2.0
"""Seconds in which other slots may say why they cannot prepare, once one of them has: theirs may be the cause."""

R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, slots=True)
class ResizeOptions:
    """Settings of a change, besides its slots."""

    settings: Mapping[str, object]
    """Settings of the train role, for joiners."""
    rendezvous: str
    timeout_s: float
    """Seconds that each step of the transaction may take. Slots have the same deadline in their settings."""
    leave_s: float
    """Seconds at most that a slot which left keeps a published version for slots that still fetch it."""
    keeps_old: bool = True
    """The old state stays whole until `Finalize`; see `ductile.core.scheduling.resize_rulings.judge`."""
    patience_s: float = 600.0
    """Seconds for what a slot must do in any case, behind other work that it is busy with: roll back, give the role
    up."""


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
        after: ParallelLayout,
        options: ResizeOptions,
        kill: Callable[[int, str], None],
        clock: Callable[[], float] = time.perf_counter,
        release: Release | None = None,
        fleet: RunRoles | None = None,
    ) -> None:
        """kill(slot, sentence): end a slot that does not reply, and lose it in the mailbox. release: what the fleet
        releases when all is prepared and the trainer stands still, such as the joiners' other roles. fleet: may be None
        where there is nothing to release.

        Raises ValueError for a release without a fleet.
        """
        if release is not None and fleet is None:
            raise ValueError(f"{release} cannot be released: this trainer belongs to no fleet")
        self._mailbox, self._trainer, self._options, self._clock = mailbox, trainer, options, clock
        self._release_first, self._fleet = release, fleet
        self._not_released: tuple[str, ...] = ()
        self.order = ResizeOrder(mailbox.next_epoch(), trainer.layout, after)
        self._participants = Participants(mailbox, self.order.slots, kill, options.timeout_s)
        self.phase: Phase | Literal["release"] = "assign"
        """The step that is under way, or was the last."""
        self._seconds: dict[str, float] = {}
        self._pause_s = 0.0
        self._moved: dict[int, StateTransferred] = {}
        self._preparations: dict[int, Refused | None] = {}
        """Slots whose preparing has ended, with why they cannot take part; None where they can."""
        self._heard = ChangeSignal()
        self._is_over = False
        """The change is committed or taken back."""
        self._end: TrainerLost | None = None
        """Error that the change has ended the trainer with."""
        self._with_role = set(self.order.before.slots)
        """Slots that are known to hold the role."""

    def judges(self, slot: int) -> bool:
        """True when this transaction rules on what the slot's death means. It does not after the change is committed or
        taken back: joiners and leavers may still give roles up, and the slots that train are needed as ever."""
        return not self._is_over and slot in self.order.slots

    async def run(self) -> Resized:
        """Raises TrainerLost when there is no trainer any more, also to a caller that is cancelled; its sentence says
        what was lost.

        A caller that is cancelled, or gets another error, has the trainer as it was; after the commit, in its new
        layout (`resized`), and what is left of the change is done first, as far as it does not take longer than a step.
        """
        forget = self._mailbox.subscribe(self._on_event)
        leaving: asyncio.Task[None] | None = None
        try:
            with self._trainer.expecting_change():
                await self._assign()
                async with AsyncExitStack() as still:
                    async with self._as_before_unless_done():
                        await self._prepare()
                        await still.enter_async_context(self._boundary())
                        await self._release_other_roles()
                        await self._freeze_and_transfer()
                        await self._step("commit", Commit(self.order.epoch), Done)
                    self._trainer.go_on_in(self.order.after, self.order.epoch)
                    self._is_over = True
                    leaving = start(self._leave())
                    # Before the next micro-step, which would otherwise find the slots at it.
                    await undisturbed(self._finalize())
            await finish(leaving)
            return self.resized()
        except TrainerLost:
            raise
        except BaseException as error:
            if leaving is not None:
                try:
                    await asyncio.wait([leaving], timeout=self._participants.step_s)
                finally:
                    if self._end is not None:
                        raise self._end from error
                raise
            self._go_on_as_before(error)
            await finish(self._dismiss_joiners())
            if not isinstance(error, _Unfinished):
                raise
            return self._result("rolled_back", str(error))
        finally:
            forget()

    def resized(self) -> Resized:
        """The result of a change that is committed."""
        return self._result("resized")

    async def _finalize(self) -> None:
        """Have the slots that train on free what taking back would need."""
        with self._timed("finalize"):
            outcomes = await self._participants.ask(dict.fromkeys(self.order.after.slots, Finalize(self.order.epoch)))
        try:
            await self._judge("finalize", outcomes)
        except _Unfinished as unfinished:
            raise self._lost(str(unfinished)) from None

    async def _leave(self) -> None:
        """Have the slots that left free it, too, and give the role up. Training does not wait for them."""
        leavers = self.order.leavers
        outcomes = await self._participants.ask(dict.fromkeys(leavers, Finalize(self.order.epoch)))
        await self._participants.kill_late(outcomes)
        await self._release_train_role(leavers, self._options.leave_s)

    async def _assign(self) -> None:
        """Have joiners take the role. Only they hear of this: should it fail, there is nothing to take back."""
        options = self._options
        assign = AssignRole("train", dict(options.settings), self.order.after, options.rendezvous, joining=True)
        with self._timed("assign"):
            outcomes = await self._participants.ask(dict.fromkeys(self.order.joiners, assign))
        self._with_role |= {slot for slot, outcome in outcomes.items() if isinstance(outcome, Done)}
        await self._judge("assign", outcomes)

    async def _prepare(self) -> None:
        """Have all slots prepare; they reply at once, also in the middle of a micro-step, and prepare beside what they
        do. Old slots come first: joiners wait for them as soon as they have begun."""
        self._trainer.check()
        prepare = Prepare(self.order)
        with self._timed("prepare"):
            waits_end_at_s = asyncio.get_running_loop().time() + self._options.timeout_s
            outcomes = await self._participants.ask(dict.fromkeys(self.order.before.slots, prepare))
            await self._judge("prepare", outcomes)
            await self._judge("prepare", await self._participants.ask(dict.fromkeys(self.order.joiners, prepare)))
            await self._until_prepared(waits_end_at_s)

    async def _until_prepared(self, waits_end_at_s: float) -> None:
        """Wait until all slots have prepared. If they were frozen earlier, the trainer would stand still meanwhile. A
        slot of the change that dies, also one that had prepared, is judged at once.

        waits_end_at_s: when the slots that were asked first begin to say that they have waited in vain for another, on
        the event loop's clock.
        """
        slots, lost, outcomes = self.order.slots, self._mailbox.lost, dict[int, Outcome]()

        def unheard() -> list[int]:
            return [slot for slot in slots if slot not in self._preparations and slot not in lost]

        def all_have_said() -> bool:
            return not unheard()

        def is_decided() -> bool:
            return not lost.keys().isdisjoint(slots) or any(self._preparations.values()) or all_have_said()

        try:
            await self._heard.wait_for(is_decided, self._participants.step_s)
            if any(self._preparations.values()):
                failed_at_s = asyncio.get_running_loop().time()
                with suppress(TimeoutError):
                    await self._heard.wait_for(all_have_said, CAUSES_S)
                # Slots that have waited in vain for a stopped one say so before it is late here. Where one has failed
                # earlier than that, those that are still at it are only told to stop.
                if failed_at_s >= waits_end_at_s:
                    awaited = {slot: f"{self._mailbox.describe(slot)} did not prepare" for slot in unheard()}
                    outcomes |= await self._participants.kill_silent(awaited)
        except TimeoutError:
            await asyncio.sleep(LOOK_S)  # what was said in time is read first, also if this process was suspended
            late = f"did not prepare within {said(self._options.timeout_s)}"
            outcomes |= {slot: Late(f"{self._mailbox.describe(slot)} {late}", slot) for slot in unheard()}
        for slot in slots:
            if slot in lost:
                outcomes[slot] = SlotLost(lost[slot], slot)
            elif refused := self._preparations.get(slot):
                outcomes[slot] = refused
        await self._judge("prepare", outcomes)

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, PreparationEnded) and event.epoch == self.order.epoch and slot in self.order.slots:
            self._preparations[slot] = self._mailbox.refused(slot, event.failure) if event.failure else None
            self._heard.notify_all()
        elif isinstance(event, Died):
            self._heard.notify_all()

    async def _release_other_roles(self) -> None:
        """Release what must be released before the freeze. What cannot be stays as it is, and the resize goes on."""
        if self._fleet and self._release_first:
            with self._timed("release"):
                self._not_released = tuple(await self._fleet.release(self._release_first))

    async def _freeze_and_transfer(self) -> None:
        order = self.order
        frozen = await self._step("freeze", Freeze(order.epoch, self._trainer.with_gradient), Frozen)
        progress = {slot: reply.progress for slot, reply in frozen.items() if reply.progress is not None}
        violation = violation_in_plans({slot: reply.plan_key for slot, reply in frozen.items()})
        if missing := sorted(set(order.before.slots).difference(progress)):
            violation = violation or f"slot {missing[0]} does not say how far it is"
        self._rule_on_violation("freeze", violation or violation_in_progress(progress))
        self._moved = await self._step("transfer", TransferState(order.epoch, total(progress)), StateTransferred)
        sent = {slot: reply.sent for slot, reply in self._moved.items()}
        received = {slot: reply.received for slot, reply in self._moved.items()}
        self._rule_on_violation("transfer", violation_in_bytes(sent, received))

    @asynccontextmanager
    async def _boundary(self) -> AsyncGenerator[None]:
        """Keep the trainer still, and count the time as pause."""
        async with self._trainer.boundary(moves_weights=True):
            began_s = self._clock()
            try:
                yield
            finally:
                self._pause_s += self._clock() - began_s

    @asynccontextmanager
    async def _as_before_unless_done(self) -> AsyncGenerator[None]:
        """Take the change back when the block is left unfinished, for whatever reason."""
        try:
            yield
        except TrainerLost:
            raise  # there is nothing to go back to
        except BaseException as error:
            await finish(self._roll_back(self._ruling_of(error)))
            raise

    def _ruling_of(self, error: BaseException) -> Ruling:
        if isinstance(error, _Unfinished):
            return error.ruling
        why = f"the change was given up in {self.phase}: {error_text(error)}"
        # A release is the fleet's: to the trainer the slots are as they were when they had prepared.
        phase = "prepare" if self.phase == "release" else self.phase
        return judge(phase, self.order, {}, dict.fromkeys(self.order.slots, why), self._options.keeps_old)

    async def _roll_back(self, ruling: Ruling) -> None:
        """Roll the change back. Only the slots that train are waited for: no other slot's part is needed."""
        if ruling.verdict == "stop":
            raise self._lost(ruling.reason)
        rollback = dict.fromkeys(self.order.before.slots, Rollback(self.order.epoch))
        with self._timed("rollback"):
            outcomes = await self._participants.ask(rollback, self._options.patience_s)
        try:
            self._rule_on("rollback", outcomes)
        except _Unfinished as unfinished:
            raise self._lost(f"{ruling.reason}; {unfinished}") from None

    def _go_on_as_before(self, error: BaseException) -> None:
        """Have the run depend on the old slots again. One may have died since it did its part of taking back,
        or while joiners alone were asked. Raises TrainerLost then."""
        why = error.ruling.reason if isinstance(error, _Unfinished) else error_text(error)
        if isinstance(error, _Unfinished) and error.ruling.verdict == "stop":
            raise self._lost(why)
        try:
            self._rule_on("rollback", self._participants.dead(self.order.before.slots))
        except _Unfinished as unfinished:
            raise self._lost(f"{why}; {unfinished}") from None
        self._is_over = True

    async def _dismiss_joiners(self) -> None:
        await self._have_done(self.order.joiners, Rollback(self.order.epoch))
        await self._release_train_role(self.order.joiners, leave_s=0.0)

    async def _release_train_role(self, slots: Sequence[int], leave_s: float) -> None:
        """Have slots that are not in the trainer give the role up."""
        for slot in slots:
            await self._trainer.has_withdrawn(slot, leave_s)
        await self._have_done(slots, ReleaseRole("train"))

    async def _have_done(self, slots: Sequence[int], command: Command) -> None:
        asked = dict.fromkeys(slots, command)
        await self._participants.ask_until_done(asked, self._options.patience_s, self._with_role)

    async def _step(self, phase: Phase, command: Command, expected: type[R]) -> dict[int, R]:
        """Ask all slots that are left. Raises _Unfinished unless all that matter have done it."""
        with self._timed(phase):
            outcomes = await self._participants.ask(dict.fromkeys(self.order.slots, command))
        for slot, outcome in outcomes.items():
            if not isinstance(outcome, expected | Exception):
                exchange = f"{type(command).__name__} with {type(outcome).__name__}"
                outcomes[slot] = Refused(f"{self._mailbox.describe(slot)} replied to {exchange}")
        await self._judge(phase, outcomes)
        return {slot: outcome for slot, outcome in outcomes.items() if isinstance(outcome, expected)}

    async def _judge(self, phase: Phase, outcomes: Mapping[int, Outcome]) -> None:
        """Rule on the outcomes of a step, once it is known which slots are dead: of late ones those that stay silent,
        which are killed, and those whose deaths other slots hear of first. That takes up to 3.5 s."""
        dead = await self._participants.kill_late(outcomes)
        if any(isinstance(outcome, Refused) for outcome in outcomes.values()):
            dead |= await self._participants.deaths()
        self._rule_on(phase, {**outcomes, **dead})

    def _rule_on(self, phase: Phase, outcomes: Mapping[int, Outcome]) -> None:
        dead = {slot: str(outcome) for slot, outcome in outcomes.items() if isinstance(outcome, SlotLost)}
        failed = {slot: str(outcome) for slot, outcome in outcomes.items() if isinstance(outcome, Refused | Late)}
        self._rule(phase, dead, failed)

    def _rule_on_violation(self, phase: Phase, violation: str) -> None:
        """Rule on a violation about all slots together; "" is none."""
        if violation:
            self._rule(phase, {}, dict.fromkeys(self.order.slots, violation))

    def _rule(self, phase: Phase, dead: Mapping[int, str], failed: Mapping[int, str]) -> None:
        ruling = judge(phase, self.order, dead, failed, self._options.keeps_old)
        if ruling.verdict != "proceed":
            raise _Unfinished(ruling)

    def _lost(self, sentence: str) -> TrainerLost:
        self._end = TrainerLost(sentence)
        self._trainer.lose(self._end)
        return self._end

    def _timed(self, phase: Phase | Literal["release"]) -> AbstractContextManager[None]:
        self.phase = phase
        return timed(self._seconds, phase, self._clock)

    def _result(self, outcome: Literal["resized", "rolled_back"], reason: str = "") -> Resized:
        phases: dict[SlotPhase, None] = dict.fromkeys(name for moved in self._moved.values() for name in moved.seconds)
        return Resized(
            outcome=outcome,
            sentence=self._sentence(outcome, reason),
            epoch=self.order.epoch,
            before=self.order.before,
            after=self.order.after,
            reason=reason,
            not_released=self._not_released,
            pause_s=self._pause_s,
            seconds=self._seconds,
            slot_seconds={name: max(moved.seconds.get(name, 0.0) for moved in self._moved.values()) for name in phases},
            beside=tuple(dict.fromkeys(name for moved in self._moved.values() for name in moved.beside)),
            num_bytes=sum(moved.num_bytes for moved in self._moved.values()),
            carrier=next((moved.carrier for moved in self._moved.values() if moved.carrier), ""),
        )

    def _sentence(self, outcome: Literal["resized", "rolled_back"], reason: str) -> str:
        """ "Trainer resized from slots 0-1 to slots 0-3 in 0.21 s: 412.0 MiB moved."."""
        before, after = describe(self.order.before), describe(self.order.after)
        if outcome == "rolled_back":
            return f"Trainer stays on {before} and not {after}: {reason}."
        num_bytes = sum(moved.num_bytes for moved in self._moved.values())
        return f"Trainer resized from {before} to {after} in {self._pause_s:.2f} s: {num_bytes / 2**20:.1f} MiB moved."
