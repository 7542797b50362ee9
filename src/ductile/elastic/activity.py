"""Activity of the slots: the command that each is at, its engine's own work, or nothing, and why. Kept in a ledger."""

import time
from collections.abc import Callable, Collection, Sequence

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.listeners import Listeners
from ductile.core.scheduling.facts.ledger import Activity, IdleCause, Ledger, SlotLedger, Span, idle_cause
from ductile.elastic.situation import Situation
from ductile.messages.outgoing_updates import BeginUpdate, FinishUpdate, LeaveOut
from ductile.messages.resizes import Commit, Finalize, Freeze, Prepare, Rollback, TransferState
from ductile.messages.workers import (
    Abort,
    AssignRole,
    Command,
    DigestWeights,
    EndOffer,
    EngineStats,
    ExportModel,
    Forget,
    ForwardBackward,
    Generate,
    LoadState,
    MigrateOut,
    OfferWeights,
    OptimStep,
    Park,
    Publish,
    Receive,
    ReleaseRole,
    SaveState,
    Score,
    Unpark,
    Withdraw,
)
from ductile.transport.mailbox import Mailbox, SlotEvent

ACTIVITIES: dict[type[Command], Activity] = {
    **dict.fromkeys((ForwardBackward, OptimStep), "train"),
    **dict.fromkeys((Generate, Abort), "generate"),
    Score: "score",
    **dict.fromkeys(
        (
            Publish,
            Receive,
            Withdraw,
            BeginUpdate,
            LeaveOut,
            FinishUpdate,
            DigestWeights,
            SaveState,
            LoadState,
            ExportModel,
        ),
        "publish",
    ),
    **dict.fromkeys((AssignRole, ReleaseRole, Park, Unpark, MigrateOut, Forget, OfferWeights, EndOffer), "switch"),
    **dict.fromkeys((Prepare, Freeze, TransferState, Commit, Rollback, Finalize), "switch"),
}


class SlotActivity:
    """Keeps the ledger as long as the mailbox lives."""

    def __init__(self, mailbox: Mailbox, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_slot = Listeners[[Sequence[str], SlotLedger]]()
        """Told a slot's roles and its account with everything that it begins."""
        self.on_span = Listeners[[Span]]()
        """Told of each closed stretch of one activity."""
        self._situation: Callable[[], Situation] = Situation
        self.ledger = Ledger()
        self._mailbox, self._clock = mailbox, clock
        self._opened: set[int] = set()
        self._command: dict[int, type[Command] | None] = {}
        self._generating: set[int] = set()
        self._changing: frozenset[int] = frozenset()
        self._changed = ChangeSignal()
        self._known = Situation(), False
        mailbox.watch(self._on_command)
        mailbox.subscribe(self._on_event)

    def explain_by(self, situation: Callable[[], Situation]) -> None:
        """Have `situation` say why slots may have nothing to do; it is asked after everything that happens."""
        self._situation = situation

    def begin(self, slots: Collection[int]) -> float:
        """The slots have their roles: from now on everything counts, and what was before does not. Returns when."""
        now_s = self._clock()
        self.ledger, self._opened = Ledger(self.on_span), {*slots}
        for slot in slots:  # before others are told, which takes time
            self.ledger.open(slot, now_s)
        for slot in slots:
            self._tell(slot)
        return now_s

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that have accounts."""
        return tuple(sorted(self._opened))

    def account(self, slot: int) -> SlotLedger:
        """The account of a slot since it got its first role."""
        return self.ledger.account(slot) if slot in self._opened else SlotLedger.opened(slot, self._clock())

    def changing(self, slots: Collection[int]) -> None:
        """These slots, and no others, change roles: if they do nothing, that is part of the change."""
        concerned, self._changing = self._changing.union(slots), frozenset(slots)
        self._changed.notify_all()
        for slot in concerned:
            self._tell(slot)

    async def change_over(self, slot: int) -> None:
        """Returns when the slot does not change roles."""
        while slot in self._changing:
            await self._changed.wait()

    def look_again(self) -> None:
        """Why slots are idle may have changed."""
        known = self._situation(), bool(self._generating)
        if known != self._known:
            self._known = known
            for slot in self._opened:
                self._write(slot)

    def _on_command(self, slot: int, command: type[Command] | None) -> None:
        self._command[slot] = command
        if command is Generate:
            self._generating.add(slot)
        elif "generate" not in self._mailbox.roles(slot):
            self._generating.discard(slot)  # dropped before its engine said that it had nothing left
        self._tell(slot)
        self.look_again()

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, EngineStats):
            self._on_stats(slot, event.num_running + event.num_waiting > 0)
        if slot in self._mailbox.lost:
            self._generating.discard(slot)
            self._command.pop(slot, None)
        self._tell(slot)
        self.look_again()

    def _on_stats(self, slot: int, works: bool) -> None:
        """An engine sends its statistics when it runs out of work, too. While it is being sent new work they are from
        before it."""
        if works:
            self._generating.add(slot)
        elif self._command.get(slot) is not Generate:
            self._generating.discard(slot)

    def _tell(self, slot: int) -> None:
        self._write(slot)
        self.on_slot(self._mailbox.roles(slot), self.ledger.account(slot))

    def _write(self, slot: int) -> None:
        activity, cause = self._doing(slot)
        now_s = self._clock()
        if slot not in self._opened:
            self._opened.add(slot)
            self.ledger.open(slot, now_s)
        self.ledger.switch(slot, activity, now_s, cause)

    def _doing(self, slot: int) -> tuple[Activity, IdleCause]:
        if slot in self._mailbox.lost:
            return "idle", "lost"
        command = self._command.get(slot)
        if command and (activity := ACTIVITIES.get(command)):
            return activity, "other"
        if slot in self._generating:
            return "generate", "other"
        if slot in self._changing:
            return "switch", "other"
        situation, others_decode = self._known
        roles = self._mailbox.roles(slot)
        return "idle", idle_cause(
            roles,
            others_decode=others_decode,
            may_start=int(situation.may_start),
            samples_ready=int(situation.samples_ready),
            held=situation.held,
        )
