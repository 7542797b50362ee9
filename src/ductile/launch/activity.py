"""Who does what: the command that a slot is at, or its engine's own work, or nothing. Kept in a ledger a slot."""

import time
from collections.abc import Callable

from ductile.core.cluster.ledger import Activity, SlotLedger
from ductile.dashboard.show import View
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import EngineStats, Event

ACTIVITIES: dict[str, Activity] = {
    **dict.fromkeys(("ForwardBackward", "OptimStep"), "train"),
    **dict.fromkeys(("Generate", "Abort"), "generate"),
    "Score": "score",
    **dict.fromkeys(("Publish", "Receive", "Withdraw"), "publish"),
    **dict.fromkeys(("Hold", "Drop", "LoadState", "SaveState", "ExportModel"), "switch"),
    **dict.fromkeys(("Prepare", "Ready", "Freeze", "Move", "Commit", "Rollback", "Settle"), "switch"),
}


class SlotActivity:
    """Keeps the ledgers, and `view` told, as long as the mailbox lives."""

    def __init__(self, mailbox: Mailbox, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._mailbox, self._view, self._clock = mailbox, view, clock
        self._command: dict[int, str] = {}
        self._generating: set[int] = set()
        self._ledgers: dict[int, SlotLedger] = {}
        mailbox.watch(self._on_command)
        mailbox.subscribe(self._on_event)

    def ledger(self, slot: int) -> SlotLedger:
        """The slot's account since it was first heard of."""
        return self._ledgers.get(slot) or SlotLedger.opened(slot, self._clock())

    def _on_command(self, slot: int, command: str) -> None:
        self._command[slot] = command
        if command == "Generate":
            self._generating.add(slot)
        self._tell(slot)

    def _on_event(self, slot: int, event: Event) -> None:
        # An engine sends its statistics when it runs out of work, too.
        if isinstance(event, EngineStats) and event.num_running + event.num_waiting == 0:
            self._generating.discard(slot)
        self._tell(slot)

    def _tell(self, slot: int) -> None:
        otherwise: Activity = "generate" if slot in self._generating else "idle"
        activity = ACTIVITIES.get(self._command.get(slot, ""), otherwise)
        self._ledgers[slot] = self.ledger(slot).switch(activity, self._clock())
        self._view.on_slot(slot, self._mailbox.roles(slot), activity)
