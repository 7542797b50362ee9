"""What the trainer's ranks report of the weight updates that they send, as their slots say it."""

import asyncio
from collections.abc import Iterable

from ductile.concurrency.change_signal import ChangeSignal
from ductile.messages.updates import SendReport
from ductile.messages.workers import UpdateSent
from ductile.roles import SlotLost
from ductile.transport.mailbox import Died, Mailbox, SlotEvent


class SendReports:
    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._expected: dict[str, tuple[int, ...]] = {}
        """Slots that send, by update."""
        self._reports: dict[str, dict[int, SendReport]] = {}
        self._changed = ChangeSignal()
        mailbox.subscribe(self._on_event)

    def expect(self, update_id: str, slots: Iterable[int]) -> None:
        """Take reports of an update from these slots; called before they begin."""
        self._expected[update_id], self._reports[update_id] = tuple(slots), {}

    async def all_of(self, update_id: str) -> list[SendReport]:
        """Wait for the reports of all slots; the caller sees to a deadline. Raises SlotLost."""
        slots = self._expected[update_id]
        reports = self._reports[update_id]
        while lacking := [slot for slot in slots if slot not in reports]:
            for slot in lacking:
                if slot in self._mailbox.lost:
                    raise SlotLost(self._mailbox.lost[slot])
            await self._changed.wait()
            await asyncio.sleep(0)
        return [reports[slot] for slot in slots]

    def forget(self, update_id: str) -> None:
        self._expected.pop(update_id, None)
        self._reports.pop(update_id, None)

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        match event:
            case UpdateSent(report) if report.update_id in self._reports:
                self._reports[report.update_id][slot] = report
                self._changed.notify_all()
            case Died():
                self._changed.notify_all()
            case _:
                pass
