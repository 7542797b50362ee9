"""Slots get a role, alone or with others."""

from collections.abc import Iterable, Mapping

from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.messages.workers import AssignRole, Done, RoleName
from ductile.transport.fanout import ask_each
from ductile.transport.mailbox import Mailbox


async def assign_role(
    mailbox: Mailbox,
    role: RoleName,
    settings: Mapping[str, object],
    layouts: Iterable[ParallelLayout],
    timeout_s: float,
    rendezvous: str = "",
) -> None:
    """Give the slots their role; those of one layout hold it together, and find each other at `rendezvous`."""
    commands = {
        slot: AssignRole(role, dict(settings), layout, rendezvous) for layout in layouts for slot in layout.slots
    }
    await ask_each(mailbox, commands, timeout_s, Done)


def each_alone(slots: Iterable[int]) -> list[ParallelLayout]:
    """Layouts of slots that hold a role each by itself."""
    return [ParallelLayout.of((slot,)) for slot in slots]
