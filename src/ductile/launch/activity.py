"""Who does what: from what slots say in their heartbeats to what a person is shown."""

from ductile.core.cluster.ledger import Activity
from ductile.core.cluster.placement import Placement
from ductile.dashboard.show import View
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Event, Heartbeat

ACTIVITIES: dict[str, Activity] = {
    **dict.fromkeys(("ForwardBackward", "OptimStep"), "train"),
    **dict.fromkeys(("Generate", "Abort", "a step of generate"), "generate"),
    "Score": "score",
    **dict.fromkeys(("Publish", "Receive", "Withdraw"), "publish"),
    **dict.fromkeys(("Hold", "Drop", "LoadState", "SaveState", "ExportModel"), "switch"),
}


def follow_slots(mailbox: Mailbox, placement: Placement, view: View) -> None:
    """Keep `view` told, as long as the mailbox lives."""

    def listen(slot: int, event: Event) -> None:
        if isinstance(event, Heartbeat):
            view.on_slot(slot, placement.roles(slot), ACTIVITIES.get(event.busy_with, "idle"))

    mailbox.subscribe(listen)
