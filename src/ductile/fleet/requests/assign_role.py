"""Slots get a role: those that train all together, those of each instance together, or alone."""

from collections.abc import Iterable, Mapping

from ductile.core.instances.instances import Instance
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.message import RoleName
from ductile.messages.workers import AssignRole, Done
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


async def begin_instances(
    mailbox: Mailbox,
    instances: Iterable[Instance],
    settings: Mapping[str, object],
    timeout_s: float,
    rendezvous: str = "",
) -> None:
    """Give the slots of each instance its role; each instance loads its weights from disk."""
    commands = {slot: assignment(instance, settings, rendezvous) for instance in instances for slot in instance.slots}
    await ask_each(mailbox, commands, timeout_s, Done)


def assignment(
    instance: Instance, settings: Mapping[str, object], rendezvous: str, joining: bool = False
) -> AssignRole:
    """Return the command to each slot of an instance. They cut each weight matrix among themselves, and find each other
    at `rendezvous`; one slot alone looks for nobody."""
    layout = ParallelLayout.of(instance.slots, tp=len(instance.slots))
    where = rendezvous if len(instance.slots) > 1 else ""
    return AssignRole(instance.role, dict(settings), layout, where, joining, instance.id)
