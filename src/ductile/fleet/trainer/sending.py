"""A weight update as the trainer's ranks are at it: who sends, and who is through."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.messages.outgoing_updates import FinishUpdate, LeaveOut, UpdateSent
from ductile.messages.updates import SendReport, WeightUpdate
from ductile.roles import Late, SlotLost, TrainerLost
from ductile.transport.fanout import raise_worst
from ductile.transport.mailbox import Died, Mailbox, SlotEvent

SAYS_S = 5.0
"""Seconds after its update's deadline within which a rank has said that it failed."""


class Sending:
    """Hears of the ranks from the beginning of an update until `end`."""

    def __init__(self, mailbox: Mailbox, update: WeightUpdate, slots: Sequence[int]) -> None:
        self.update, self.slots = update, tuple(slots)
        self._mailbox = mailbox
        self._reports: dict[int, SendReport] = {}
        self._ends_at_s = asyncio.get_running_loop().time() + update.total_timeout_s + SAYS_S
        self._heard = ChangeSignal()
        self._is_over = False
        self._error: TrainerLost | None = None
        self._forget: Callable[[], None] = mailbox.subscribe(self._on_event)

    @property
    def is_under_way(self) -> bool:
        """A rank that lives may still read its weights."""
        is_late = asyncio.get_running_loop().time() >= self._ends_at_s
        return not self._is_over and not is_late and any(slot not in self._mailbox.lost for slot in self._unheard)

    async def reports(self) -> list[SendReport]:
        """Return what each rank says, in their order, once all are through. Raises SlotLost for one that is gone, Late
        for one that says nothing though the update's time is over, TrainerLost where the trainer is given up."""
        await self._until(lambda: self._is_over or not self._unheard or bool(self._lost))
        if self._error is not None:
            raise self._error
        if lost := self._lost:
            raise SlotLost(self._mailbox.lost[lost[0]], lost[0])
        if unheard := self._unheard:
            late = f"did not send its weights within {said(self.update.total_timeout_s)}"
            raise Late(f"{self._mailbox.describe(unheard[0])} {late} (update {self.update.update_id})", unheard[0])
        return [self._reports[slot] for slot in self.slots]

    async def end_of_reading(self) -> None:
        """Return once no rank reads its weights any more, at the latest when each has ended by itself."""
        await self._until(lambda: not self.is_under_way)

    async def tell(self, command: FinishUpdate | LeaveOut, slots: Collection[int], deadline_s: float) -> None:
        """Tell all ranks that live and are among `slots`, the trainer's by now, beside what they do. Raises Refused or
        Late for one that cannot."""
        live = [slot for slot in self.slots if slot in slots and slot not in self._mailbox.lost]
        outcomes = await self._mailbox.ask_all(dict.fromkeys(live, command), deadline_s)
        raise_worst({slot: outcome for slot, outcome in outcomes.items() if not isinstance(outcome, SlotLost)})

    def end(self, error: TrainerLost | None = None) -> None:
        """Hear no more: the ranks have been told that the update is over. error: there is no trainer any more."""
        self._is_over, self._error = True, self._error or error
        self._forget()
        self._heard.notify_all()

    async def _until(self, condition: Callable[[], bool]) -> None:
        left_s = self._ends_at_s - asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            await self._heard.wait_for(condition, max(0.0, left_s))

    @property
    def _unheard(self) -> list[int]:
        return [slot for slot in self.slots if slot not in self._reports]

    @property
    def _lost(self) -> list[int]:
        """Ranks that are gone and had not said that they were through."""
        return [slot for slot in self._unheard if slot in self._mailbox.lost]

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, UpdateSent) and event.report.update_id == self.update.update_id and slot in self.slots:
            self._reports[slot] = event.report
            self._heard.notify_all()
        elif isinstance(event, Died):
            self._heard.notify_all()
