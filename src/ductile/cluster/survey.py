"""What slots say of their devices: how fast, and how much of their memory has been used."""

from collections.abc import Sequence

from ductile.core.layout.model.peak import Arithmetic
from ductile.messages.workers import Survey, Surveyed
from ductile.roles import SlotLost
from ductile.transport.fanout import ask_each
from ductile.transport.mailbox import Mailbox


async def survey(
    mailbox: Mailbox, slots: Sequence[int], timeout_s: float, measure: Arithmetic | None = None
) -> dict[int, Surveyed]:
    """Replies of all slots that are not lost. Those that measure do so one after the other: they may share processors.

    Raises SlotLost, Refused or Late.
    """
    asked = [slot for slot in slots if slot not in mailbox.lost]
    if measure is None:
        return await ask_each(mailbox, dict.fromkeys(asked, Survey()), timeout_s, Surveyed)
    found: dict[int, Surveyed] = {}
    for slot in asked:
        if slot in mailbox.lost:
            raise SlotLost(mailbox.lost[slot])
        found |= await ask_each(mailbox, {slot: Survey(measure)}, timeout_s, Surveyed)
    return found
