"""Generators and scorers are instances: each has an id, and is on one slot, on several, or on none (external servers).

1. The slots are parted into groups of as many as an instance of the role takes (`slot_groups`), the same ones for the
   whole run: first those that the configuration gave the role, then the others. An instance is on one whole group, so
   an instance that comes never takes a part of another.
2. An instance begins when all slots of a group take its role on, and ends when they give it up (`regrouped`).
3. Its id says its role, its slots and the change that made it: "generator-2" was there when the run began, and
   "generator-2.7" began in the run's seventh change; "generator-2+1" is the first one that began there because another
   was lost. A slot takes a role on at most once in a change, so no id is used again in a run; and policy, controller,
   simulator and a replay come to the same ids without asking each other. An external server's id is what its owner
   calls it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType

from ductile.core.instances.placement import Role
from ductile.core.layout.choice.layout_text import compact

InstanceId = NewType("InstanceId", str)
Serving = Literal["generate", "score"]
"""Roles whose instances work each for itself, with a whole model."""
NOUNS: dict[Serving, str] = {"generate": "generator", "score": "scorer"}
InstanceGroups = Mapping[Serving, Sequence[tuple[int, ...]]]
"""Slots that an instance of the role may be on: one group or another."""

SortKey = tuple[bool, tuple[int, ...], InstanceId]


@dataclass(frozen=True, slots=True)
class Instance:
    """One generator or one scorer.

    Example: Instance(InstanceId("generator-2-3.7"), "generate", (2, 3)) began on slots 2 and 3 in the seventh change.
    """

    id: InstanceId
    role: Serving
    slots: tuple[int, ...]
    """Slots that it is on, ascending. Empty for an external server."""

    @property
    def asked(self) -> tuple[int, ...]:
        """Slots that are asked what is asked of the instance; the first one's reply is the instance's. All slots of a
        scorer are asked, as they work in step; for a generator the first one speaks."""
        return self.slots if self.role == "score" else self.slots[:1]


def instance_on(role: Serving, slots: tuple[int, ...], birth: int = 0, restart: int = 0) -> Instance:
    """Return the instance that begins on these slots in the change of this number; 0 is the start of the run. restart:
    number of the instance that begins there because the one before it was lost; 0 for one that a change begins."""
    suffix = f"+{restart}" if restart else f".{birth}" if birth else ""
    return Instance(InstanceId(f"{NOUNS[role]}-{compact(slots)}{suffix}"), role, slots)


def slot_groups(first: Sequence[int], others: Iterable[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Return the slots of `first`, and then those of `others` that are not among them, in groups of `size`. Slots that
    are left over are in no group."""
    later = sorted({*others}.difference(first))
    return tuple(
        tuple(slots[start : start + size])
        for slots in (first, later)
        for start in range(0, len(slots) - size + 1, size)
    )


def regrouped(
    living: Iterable[Instance],
    before: Mapping[int, Collection[Role]],
    after: Mapping[int, Collection[Role]],
    groups: InstanceGroups,
    birth: int,
) -> tuple[Instance, ...]:
    """Return the instances once slots that had the roles `before` have those of `after`, by their slots; those without
    slots come last.

    birth: number of the change, for those that begin.
    """
    staying = [each for each in living if all(each.role in after.get(slot, ()) for slot in each.slots)]
    new = [
        instance_on(role, group, birth)
        for role, parts in groups.items()
        for group in parts
        if all(role in after.get(slot, ()) and role not in before.get(slot, ()) for slot in group)
    ]
    return in_order([*staying, *new])


def sort_key(instance: Instance) -> SortKey:
    return not instance.slots, instance.slots, instance.id


def in_order(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return the instances in the order of their slots; those without slots come last."""
    return tuple(sorted(instances, key=sort_key))


def slots_on(instances: Iterable[Instance]) -> tuple[int, ...]:
    """Return all slots of the instances, ascending."""
    return tuple(sorted({slot for each in instances for slot in each.slots}))


def instances_from(rows: Iterable[Mapping[str, Any]]) -> tuple[Instance, ...]:
    """Return the instances of an event, which has each as its fields. Raises KeyError or TypeError when something is
    missing."""
    return tuple(Instance(InstanceId(row["id"]), row["role"], tuple(row["slots"])) for row in rows)


def named(ids: Collection[InstanceId]) -> str:
    """Return the instances in words: "generator-2, generator-3"; "7 instances" where there are more than four."""
    names = sorted({*ids}, key=lambda name: (len(name), name))
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} instances"
