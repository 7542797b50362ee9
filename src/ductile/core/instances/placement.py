"""Which slot does what when a run starts.

1. Each entry of `component_placement` gives one or several roles a set of slots: `actor: 0`, `rollout: 1-2,5`,
   `actor,rollout: all`. Without entries, `deployment` numbers do it: generate slots first, train slots next.
2. Roles that name the same slot share it; nothing else makes them share.
3. The slots used must be 0, 1, ... n-1, a train slot must be among them, and every role that the run needs.

Whatever is wrong is found in one go, and each violation says what to write instead.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from ductile.core.layout.choice.layout_text import compact

Role = Literal["train", "generate", "score"]
SlotsGiven = str | int | Sequence[str | int]

ROLES: dict[str, Role] = {
    "actor": "train",
    "train": "train",
    "trainer": "train",
    "rollout": "generate",
    "generate": "generate",
    "generator": "generate",
    "inference": "score",
    "score": "score",
    "scorer": "score",
}
"""Role of every accepted spelling: the users' words are actor, rollout, inference; ours are train, generate, score."""

SPELLED: dict[Role, str] = {"train": "actor", "generate": "rollout", "score": "inference"}

SERVERS_GENERATE = " A run needs none where servers generate: orchestrator.client.base_url, inference.registry."
_ITEM = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
MAX_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots of each role, ascending, and why they are these."""

    train: tuple[int, ...]
    generate: tuple[int, ...]
    score: tuple[int, ...]
    reason: str

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train, *self.generate, *self.score}))

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def shares(self) -> bool:
        """True when some slot holds both the trainer's state and a generator."""
        return bool({*self.train} & {*self.generate})

    @property
    def by_role(self) -> dict[Role, tuple[int, ...]]:
        return {"train": self.train, "generate": self.generate, "score": self.score}

    def of(self, role: Role) -> tuple[int, ...]:
        return self.by_role[role]

    def roles(self, slot: int) -> tuple[Role, ...]:
        """Return the roles of the slot, in the order train, generate, score."""
        return tuple(role for role, slots in self.by_role.items() if slot in slots)


class PlacementError(ValueError):
    """A placement that cannot be. `violations` are sentences, each with what to write instead."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__(" ".join(self.violations))


def place(
    entries: Mapping[str, SlotsGiven] | None,
    *,
    num_train: int = 1,
    num_generate: int = 1,
    needs: Sequence[Role] = ("train", "generate"),
    num_all: int | None = None,
) -> Placement:
    """Give every role its slots.

    Args:
        entries: `cluster.component_placement`, or None to go by the two numbers.
        num_train: `deployment.num_train_gpus`. With entries, it only says what `all` means where nothing else does.
        num_generate: `deployment.num_infer_gpus`, likewise.
        needs: roles without which the run makes no sense.
        num_all: what `all` means where it is known: the slots of all nodes.

    Raises:
        PlacementError: with every violation at once.
    """
    if entries is None:
        if "score" in needs:
            raise PlacementError([_no_scorer(num_train, num_generate)])
        generate = tuple(range(num_generate))
        train = tuple(range(len(generate), len(generate) + num_train))
        placement = Placement(train, generate, (), "as the deployment numbers say")
    else:
        placement = _from_entries(entries, num_train + num_generate, num_all)
    violations = [*_missing(placement, needs), *_gaps(placement)]
    if violations:
        raise PlacementError(violations)
    return placement


def _from_entries(entries: Mapping[str, SlotsGiven], num_wanted: int, of_nodes: int | None) -> Placement:
    violations: list[str] = []
    named: dict[Role, str] = {}
    slots: dict[str, tuple[int, ...] | None] = {}
    for names, entry in entries.items():
        for name in names.split(","):
            role = ROLES.get(name.strip().lower())
            if role is None:
                violations.append(_unknown_role(name.strip()))
            elif role in named:
                violations.append(
                    f"{role} slots are named twice, by `{named[role]}` and by `{names}`: keep one of them, with all of "
                    f'its slots in it ("0-1,3"). A flag can change an entry of a file, and remove none.'
                )
            else:
                named[role] = names
        try:
            slots[names] = None if is_all(entry) else slot_numbers(names, entry)
        except PlacementError as error:
            violations.extend(error.violations)
    if violations:
        raise PlacementError(violations)
    listed = {slot for chosen in slots.values() if chosen is not None for slot in chosen}
    if of_nodes is not None:
        num_all, because = of_nodes, "the nodes have"
    elif listed:
        num_all, because = max(listed) + 1, "the other roles name"
    else:
        num_all, because = num_wanted, "the deployment numbers add up to"
    reason = "as component_placement says"
    if None in slots.values():
        reason += f"; `all` is {many(num_all, 'slot')}, because {because} so many"
    everything = tuple(range(num_all))
    chosen = {names: everything if held is None else held for names, held in slots.items()}
    by_role = {role: chosen[names] for role, names in named.items()}
    return Placement(by_role.get("train", ()), by_role.get("generate", ()), by_role.get("score", ()), reason)


def is_all(entry: SlotsGiven) -> bool:
    return isinstance(entry, str) and entry.strip().lower() == "all"


def slot_numbers(names: str, entry: SlotsGiven) -> tuple[int, ...]:
    """Return `"0-1,3"`, `3` or `[0, "1-2"]` as slot numbers, ascending. names: what to call the entry. Raises
    PlacementError."""
    words = [str(item) for item in entry] if not isinstance(entry, str | int) else str(entry).split(",")
    violations: list[str] = []
    slots: list[int] = []
    for word in words:
        shown = f"`{names}: {word.strip()}`"
        found = _ITEM.fullmatch(word)
        if ":" in word:
            violations.append(
                f"{shown} gives processes to devices; here a slot is one process on one device: write "
                f"`{names}: {word.split(':')[0].strip()}`."
            )
        elif found is None:
            violations.append(
                f"{shown} is not a slot. Write a number from 0 (0), a range (0-3), a list of them (0-1,3) or all."
            )
        else:
            first, last = int(found[1]), int(found[2] or found[1])
            if last < first:
                violations.append(f"{shown} runs backwards: write `{names}: {last}-{first}`.")
            elif last >= MAX_SLOTS:
                violations.append(f"{shown} goes past slot {MAX_SLOTS - 1}, the highest there can be.")
            else:
                slots.extend(range(first, last + 1))
    twice = sorted({slot for slot in slots if slots.count(slot) > 1}) if len(slots) != len(set(slots)) else []
    if twice:
        violations.append(f"`{names}` names {slots_of(twice)} twice: write `{names}: {compact(sorted(set(slots)))}`.")
    if not words:
        violations.append(f"`{names}` has no slots: leave it out, or give it some.")
    if violations:
        raise PlacementError(violations)
    return tuple(sorted(slots))


def _unknown_role(name: str) -> str:
    close = get_close_matches(name.lower(), ROLES, n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return f"`{name}` is not a role: the roles are actor (train), rollout (generate) and inference (score).{hint}"


def _missing(placement: Placement, needs: Sequence[Role]) -> list[str]:
    free = placement.num_slots
    return [
        f"No slot has the role {role}, which this run needs: add `{SPELLED[role]}: {free}`, or let it share a slot "
        f"(`{_sharing(placement, role)}`).{SERVERS_GENERATE if role == 'generate' else ''}"
        for role in needs
        if not placement.of(role)
    ]


def _no_scorer(num_train: int, num_generate: int) -> str:
    first, last = num_generate, num_generate + num_train
    generate, train = compact(range(first)), compact(range(first, last))
    return (
        "This run needs a slot with the role score, and the deployment numbers have none: write "
        f"cluster.component_placement with `rollout: {generate}, actor: {train}, inference: {last}`."
    )


def _gaps(placement: Placement) -> list[str]:
    slots = placement.slots
    unused = sorted(set(range(max(slots, default=-1) + 1)) - set(slots))
    if not unused:
        return []
    number = {slot: index for index, slot in enumerate(slots)}
    renumbered = ", ".join(
        f"{SPELLED[role]}: {compact([number[slot] for slot in held])}"
        for role, held in placement.by_role.items()
        if held
    )
    return [
        f"{slots_of(unused).capitalize()} would do nothing: slots are numbered from 0 without gaps. Write "
        f"`{renumbered}`; CUDA_VISIBLE_DEVICES chooses the physical devices."
    ]


def _sharing(placement: Placement, role: Role) -> str:
    """Return an entry that puts `role` on the slots of another role."""
    for other, name in SPELLED.items():
        if placement.of(other):
            return f"{name},{SPELLED[role]}: {compact(placement.of(other))}"
    return f"{SPELLED[role]}: 0"


def slots_of(slots: Collection[int]) -> str:
    """Return the slots in words, in ascending order: "slot 3", "slots 0-2,5"."""
    return f"slot{'' if len(slots) == 1 else 's'} {compact(sorted(slots))}"


def many(number: int, noun: str) -> str:
    """Return the number with its noun: "1 rollout", "3 rollouts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
