"""What becomes of the roles of slots that are to be gone by a deadline, and of slots that come back.

    slot       generates, not the last one     its rollouts go to the other generators, with the tokens that they have
    slots      train, others train on          the trainer is resized onto the largest number of these that is a layout
    slots      are the whole trainer           other slots take it over: one without a role; where there is memory for
                                               two roles, one that generates; else one of several generators
    slots      are the last of a serving role  another group of slots takes it on, chosen in the same order

Cannot be: none of that is there. Then the reason says what lacks, and the slots stay as they are.

Slots that are to be gone by other notices are emptied in the same step, where that can be: one resize instead of two.
Else a step is about its own slots alone: the others keep what they hold, and get nothing more.

It knows no clock: how often a step is tried, and until when, is for `ductile.elastic.drains`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ductile.core.instances.instances import NOUNS, InstanceGroups, Serving
from ductile.core.instances.placement import SPELLED, Placement, Role, slots_of
from ductile.core.layout.choice.layout_rules import dims_allowed
from ductile.core.layout.geometry.node_order import chosen
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.migration_targets import change
from ductile.core.scheduling.orders import Decision, explained, violations

ROLES_IN_ORDER: tuple[Role, ...] = ("train", "generate", "score")
Roles = Mapping[int, tuple[Role, ...]]
DrainVerdict = Literal["done", "change", "wait", "cannot"]


@dataclass(frozen=True, slots=True)
class Notice:
    """These slots will be gone by then."""

    slots: tuple[int, ...]
    deadline_s: float
    """Seconds that are left when the notice comes."""
    source: str
    """How it came, as in "SIGTERM to its process"."""


class CannotDrain(Exception):
    """Slots cannot be emptied. The text is a clause that says why."""


@dataclass(frozen=True, slots=True)
class DrainStep:
    """What to do next about slots that are to be gone, or have come back."""

    verdict: DrainVerdict
    """done: they hold nothing, or what they are to hold. change: carry the decision out, and look again. wait: until
    what the reason says is over. cannot: it cannot be."""
    reason: str = ""
    decision: Decision = field(default_factory=Decision)


@dataclass(frozen=True, slots=True)
class RoleMoves:
    """What a drain changed: the roles of each slot before and after."""

    before: Roles
    after: Roles
    leaving: frozenset[int]
    """Slots among them that were to be gone."""


@dataclass(slots=True)
class _Slots:
    """Roles in the making, of the slots that are there."""

    after: dict[int, tuple[Role, ...]]
    leaving: frozenset[int]
    closed: frozenset[int]
    """Slots that keep what they hold, and get nothing more."""
    train_order: tuple[int, ...]
    sizes: Sequence[int]
    """Numbers of slots that the trainer may have, ascending."""
    groups: InstanceGroups
    may_share: bool
    num_external: int = 0
    tp: int = 1
    """Size of the trainer's tp groups, which stay inside nodes as far as they can."""
    topology: Topology = ONE_NODE
    there: tuple[int, ...] = field(init=False)
    """Slots that may hold something."""
    order: tuple[int, ...] = field(init=False)
    """Those of them that may get something."""

    def __post_init__(self) -> None:
        self.there = tuple(slot for slot in sorted(self.after) if slot not in self.leaving)
        self.order = tuple(slot for slot in self.there if slot not in self.closed)

    @property
    def trainers(self) -> list[int]:
        """Slots that train, those last that are the first to do without."""
        held = [slot for slot in self.there if "train" in self.after[slot]]
        return sorted(held, key=lambda slot: (slot in self.closed, slot not in self.train_order, self._rank(slot)))

    def _rank(self, slot: int) -> int:
        return self.train_order.index(slot) if slot in self.train_order else slot

    def give(self, slots: Collection[int], role: Role) -> None:
        for slot in slots:
            self.after[slot] = tuple(each for each in SPELLED if each in (*self.after[slot], role))

    def take(self, slots: Collection[int], role: Role) -> None:
        for slot in slots:
            self.after[slot] = tuple(each for each in self.after[slot] if each != role)

    def instances(self, role: Serving) -> list[tuple[int, ...]]:
        """Groups of slots that hold the role and stay."""
        there = (group for group in self.groups[role] if all(slot in self.there for slot in group))
        return [group for group in there if all(role in self.after[slot] for slot in group)]

    def _open(self, role: Serving) -> Iterator[tuple[int, ...]]:
        return (group for group in self.groups[role] if all(slot in self.order for slot in group))

    def end_split_instances(self) -> None:
        """An instance on several slots ends with any of them."""
        for role in NOUNS:
            whole = {slot for group in self.instances(role) for slot in group}
            self.take([slot for slot in self.there if role in self.after[slot] and slot not in whole], role)

    def train_on(self) -> None:
        """Have the largest number of the trainer's slots train that is a layout; or, where it has none left, the
        smallest that others make up. Raises CannotDrain."""
        staying = self.trainers
        number = next((size for size in reversed(self.sizes) if size <= len(staying)), 0)
        if number:
            kept = chosen(staying, (), number, self.tp, self.topology)
            self.take([slot for slot in staying if slot not in kept], "train")
            return
        number = next((size for size in self.sizes if size > len(staying)), 0)
        among = chosen(staying, self._may_train(), number, self.tp, self.topology)
        others = [slot for slot in among if slot not in staying]
        if not number or len(among) < number:
            raise CannotDrain("no other slot can take the trainer's state over")
        self.take([slot for slot in staying if slot not in among], "train")
        if not self.may_share:
            for role in NOUNS:
                self.take(others, role)
        self.give(others, "train")

    def _may_train(self) -> list[int]:
        """Slots that may join the trainer, the best first."""
        free = [slot for slot in self.order if not self.after[slot]]
        serving = [slot for slot in self.order if self.after[slot] and "train" not in self.after[slot]]
        if self.may_share:
            return [*free, *sorted(serving, key=lambda slot: "generate" not in self.after[slot])]
        alone = [slot for (slot, *others) in self.instances("generate") if not others]
        spare = [slot for slot in alone if self.after[slot] == ("generate",)]
        return [*free, *(spare if self.num_external else spare[1:])]

    def serve(self, role: Serving) -> None:
        """Have an instance of the role begin, as its last one ends. Raises CannotDrain."""
        if self.instances(role) or (role == "generate" and self.num_external):
            return
        group = next(self._may_serve(role), None)
        if group is None:
            raise CannotDrain(f"no other slot can {role}")
        if not self.may_share:
            self.take(group, "train")
            self.take(group, "generate")
        self.give(group, role)

    def _may_serve(self, role: Serving) -> Iterator[tuple[int, ...]]:
        """Groups of slots on which an instance may begin, the best first."""
        there = list(self._open(role))
        yield from (group for group in there if not any(self.after[slot] for slot in group))
        if self.may_share:
            best: tuple[Role, ...] = ("train",) if role == "generate" else ("generate",)
            yield from (group for group in there if all(self.after[slot] == best for slot in group))
            yield from there
        elif role == "generate":
            yield from filter(self._trainer_spares, there)
        else:
            generators = self.instances("generate")
            spare = generators if self.num_external else generators[1:]
            yield from (group for group in there if group in spare)

    def _trainer_spares(self, group: tuple[int, ...]) -> bool:
        trainers = self.trainers
        return {*group} <= {*trainers} and len(trainers) - len(group) in self.sizes


def plan_drain(
    state: ClusterState, leaving: Collection[int], others: Collection[int] = (), *, merged: bool = True
) -> DrainStep:
    """Return the next step of emptying slots.

    others: slots that are to be gone as well, by other notices. merged: these are emptied in the same step, where
    that can be.
    """
    if merged and others and any(slot.slot in leaving and slot.roles for slot in state.slots):
        step = _plan_drain(state, {*leaving, *others}, ())
        if step.verdict == "change":
            return step
    return _plan_drain(state, leaving, others)


def _plan_drain(state: ClusterState, leaving: Collection[int], closed: Collection[int]) -> DrainStep:
    """closed: slots that keep what they hold, and get nothing more."""
    held = {slot.slot: slot.roles for slot in state.slots}
    going = [slot for slot in held if slot in leaving and held[slot]]
    if not going:
        return DrainStep("done")
    if not state.trainer.at_boundary:
        return DrainStep("wait", "the trainer is being resized")
    why = f"{slots_of(going)} {'is' if len(going) == 1 else 'are'} to be gone"
    if state.lending:
        return _step(state, dict.fromkeys(state.lending, ("train",)), f"{why}: first the trainer gets its devices back")
    try:
        after = _roles_without(held, leaving, state, closed)
    except CannotDrain as error:
        return DrainStep("cannot", str(error))
    resizes = any(("train" in after[slot]) != ("train" in held[slot]) for slot in held)
    return _step(state, after, why, hold_training=resizes)  # the resize waits for no micro-step


def plan_return(state: ClusterState, drained: Sequence[RoleMoves], back: Collection[int]) -> DrainStep:
    """Return the step by which slots that have come back get what they held before the drains that emptied them, and
    those that stood in for them go back to what they held. drained: drains in their order."""
    held = {slot.slot: slot.roles for slot in state.slots}
    if not state.trainer.at_boundary:
        return DrainStep("wait", "the trainer is being resized")
    own, others = dict[int, tuple[Role, ...]](), dict[int, tuple[Role, ...]]()
    for moves in drained:
        own |= {slot: moves.before[slot] for slot in moves.leaving.intersection(back, held)}
        if not moves.leaving.isdisjoint(back) and moves.leaving.issubset(held):
            stood_in = moves.after.keys() - moves.leaving
            others |= {slot: moves.before[slot] for slot in stood_in if held.get(slot) == moves.after[slot]}
    why = f"{slots_of(own)} {'is' if len(own) == 1 else 'are'} back" if own else ""
    step = _step(state, held | others | own, why)
    # Who stood in may be needed where it is by now.
    return _step(state, held | own, why) if step.verdict == "cannot" else step


def moves_of(decision: Decision, leaving: Collection[int]) -> RoleMoves:
    """Return what the decision of a drain changes."""
    before = {move.slot: move.before for move in decision.moves}
    after = {move.slot: move.after for move in decision.moves}
    return RoleMoves(before, after, frozenset(before).intersection(leaving))


def home_without(state: ClusterState, gone: Collection[int]) -> Placement:
    """Return the placement to which policies return slots while some are gone: as configured, but for what others do
    in their place."""
    home = state.home
    there = {slot.slot for slot in state.slots}
    held = {slot: home.roles(slot) for slot in home.slots} | {slot: () for slot in there - {*home.slots}}
    if not any(held.get(slot) for slot in gone):
        return home
    try:
        after = _roles_without(held, gone, state)
    except CannotDrain:  # not by these alone: somebody has found another way
        return home
    train, generate, score = (
        _in_order(home.of(role), [slot for slot, roles in sorted(after.items()) if role in roles])
        for role in ROLES_IN_ORDER
    )
    return Placement(train, generate, score, f"{home.reason}, without {slots_of(gone)}")


def _in_order(first: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
    """Slots in the order that they had: groups that stay whole are the same."""
    return (*(slot for slot in first if slot in slots), *(slot for slot in slots if slot not in first))


def _roles_without(
    held: Roles, leaving: Collection[int], state: ClusterState, closed: Collection[int] = ()
) -> dict[int, tuple[Role, ...]]:
    """Roles of all slots once those that leave have none. closed: as `_plan_drain` has it. Raises CannotDrain."""
    after = {slot: () if slot in leaving else roles for slot, roles in held.items()}
    slots = _Slots(
        after,
        frozenset(leaving),
        frozenset(closed),
        state.trainer.layout.slots,
        _sizes(len(held), state),
        {role: state.groups(role) for role in NOUNS},
        state.limits.may_share,
        state.num_external,
        state.trainer.layout.dims.tp,
        state.topology,
    )
    slots.end_split_instances()
    slots.train_on()
    for role in NOUNS:
        if any(role in roles for roles in held.values()):
            slots.serve(role)
    return slots.after


def _sizes(most: int, state: ClusterState) -> list[int]:
    least = max(1, state.limits.min_train)
    now = len(state.trainer.layout.slots)
    allowed = dims_allowed(max(most, now), state.trainer.rules)
    return sorted({now}.union(size for size in allowed if size >= least))


def _step(state: ClusterState, roles: Roles, why: str, *, hold_training: bool = False) -> DrainStep:
    """Return the step that gives slots these roles, if it can be."""
    held = {slot.slot: slot.roles for slot in state.slots}
    changed = {slot: after for slot, after in roles.items() if slot in held and after != held[slot]}
    if not changed:
        return DrainStep("done")
    if busy := changed.keys() - state.ready:
        verb = "is" if len(busy) == 1 else "are"
        return DrainStep("wait", f"{slots_of(busy)} {verb} not ready for another role")
    try:
        orders = change(state, changed)
    except ValueError as error:  # rollouts have nowhere to go
        return DrainStep("cannot", str(error))
    decision = Decision(orders, explained(state, orders, why), hold_training=hold_training)
    wrong = violations(state, decision)
    return DrainStep("cannot", "; ".join(wrong)) if wrong else DrainStep("change", why, decision)
