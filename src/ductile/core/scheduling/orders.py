"""What a policy decides: orders, and why.

A `Decision` is one change of the cluster, carried out as a whole: rollouts migrate, slots give roles up, the
trainer resizes once to `layout_after`, slots take roles on. `violations` says what is wrong with one; it is
asked before a decision is carried out, so that a policy with a bug is refused and not obeyed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ductile.core.instances.instances import NOUNS, Instance, InstanceGroups, InstanceId, named, regrouped
from ductile.core.instances.placement import SPELLED, Role, many, slots_of
from ductile.core.layout.choice.layout_rules import NoLayout, layout_for, nearest_allowed
from ductile.core.layout.choice.layout_text import compact
from ductile.core.layout.geometry.node_order import arranged, split_groups
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.facts.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The slot holds `before`, and is to hold `after`."""

    slot: int
    before: tuple[Role, ...]
    after: tuple[Role, ...]


@dataclass(frozen=True, slots=True)
class Migration:
    """The unfinished rollout leaves its generator and goes on at another, with all it has so far."""

    id: str
    source: InstanceId
    target: InstanceId
    """A generator that is there, or that the decision's role changes begin (`instances_after`)."""
    with_cache: bool = False
    """Whether the rollout's cache travels too; otherwise the target prefills its context again."""


@dataclass(frozen=True, slots=True)
class Release:
    """Rollouts that migrate to generators that are there, and instances that end after that. A resize has it done once
    all is prepared."""

    migrations: tuple[Migration, ...] = ()
    instances: tuple[Instance, ...] = ()


Order = RoleChange | Migration
ORDERS = (
    'RoleChange(slot, before, after), whose roles are tuples like ("train", "generate"), or '
    'Migration(id, source, target), with ids of generators such as "generator-3"'
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the policy expected when it decided. Seconds from now until all the work in sight is done."""

    stay_s: float
    """Seconds without the decision."""
    go_s: float
    """Seconds with the decision, its cost included."""
    cost_s: float = 0.0
    """Seconds that carrying the decision out costs: pauses of the trainer, prefill of what migrates."""

    @property
    def gain_s(self) -> float:
        return self.stay_s - self.go_s


@dataclass(frozen=True, slots=True)
class Decision:
    orders: tuple[Order, ...] = ()
    reason: str = ""
    """Why the policy decided so, in a sentence for people; empty when there is nothing to say."""
    hold_training: bool = False
    """The trainer begins no micro-step until a later decision says otherwise."""
    prediction: Prediction | None = None
    topic: str = ""
    """What stays of the reason while the numbers in it change: a decision without orders is told of once a topic.
    Empty: the reason itself is the topic."""

    @property
    def moves(self) -> tuple[RoleChange, ...]:
        return tuple(order for order in self.orders if isinstance(order, RoleChange))

    @property
    def migrations(self) -> tuple[Migration, ...]:
        return tuple(order for order in self.orders if isinstance(order, Migration))


@runtime_checkable
class Policy(Protocol):
    def decide(self, state: ClusterState) -> Decision:
        """What should change now. Asked after every event that may matter; the same state gives the same decision."""
        ...


def roles_after(state: ClusterState, decision: Decision) -> dict[int, tuple[Role, ...]]:
    """Every slot's roles once the decision is carried out."""
    return {slot.slot: slot.roles for slot in state.slots} | {move.slot: move.after for move in decision.moves}


def instances_after(state: ClusterState, decision: Decision) -> tuple[Instance, ...]:
    """The instances once the decision is carried out."""
    before = {slot.slot: slot.roles for slot in state.slots}
    groups: InstanceGroups = {role: state.groups(role) for role in NOUNS}
    return regrouped(state.instances, before, roles_after(state, decision), groups, state.change)


def layout_after(state: ClusterState, decision: Decision) -> ParallelLayout:
    """The trainer's layout after the decision, as the layout rules have it for the number of slots: those that stay
    keep their order, those that join come last; over several nodes, node by node (`node_order.arranged`). As many slots
    as now always have a layout: that of now, if no other.
    Raises NoLayout where the rules have none, and ValueError where no slot is left."""
    trainer, roles = state.trainer, roles_after(state, decision)
    before = trainer.layout.slots
    staying = [slot for slot in before if "train" in roles.get(slot, ())]
    joining = sorted(slot for slot, held in roles.items() if "train" in held and slot not in before)
    slots = (*staying, *joining)
    try:
        return layout_for(slots, trainer.rules)
    except NoLayout:
        if len(slots) != len(before):
            raise
        return replace(trainer.layout, slots=arranged(slots, trainer.layout.dims, state.topology))


def violations(state: ClusterState, decision: Decision) -> list[str]:
    """What is wrong with the decision, a sentence for each defect; none when it may be carried out."""
    if not decision.orders:
        # All stays as it is: what else is wrong with that is not the decision's.
        return [*_wrong_lending(state, decision, roles_after(state, decision))]
    after, instances = roles_after(state, decision), instances_after(state, decision)
    found = [*_wrong_moves(state, decision), *_split_instances(state, decision, after)]
    found += _wrong_migrations(state, decision, instances)
    return found or [
        *_wrong_lending(state, decision, after),
        *_broken_floors(state, after, instances),
        *_wrong_layout(state, decision),
    ]


def malformed(decision: object) -> str:
    """What a policy returned, when it is not a `Decision` made of what it should be made of; else empty."""
    match decision:
        case Decision(orders=tuple(), reason=str(), prediction=None | Prediction(), topic=str()):
            for order in decision.orders:
                if not _is_order(order):
                    return f"the order {order!r}: write {ORDERS}"
            return ""
        case Decision():
            return f"{decision!r}: orders must be a tuple, reason and topic texts, prediction a Prediction or None"
        case None:
            return "None, and not with a Decision: does a branch of `decide` lack its `return`?"
        case _:
            return f"a {type(decision).__name__}, and not with a Decision: write `return Decision(orders, reason)`"


def _is_order(order: object) -> bool:
    match order:
        case RoleChange(before=tuple(), after=tuple()):
            return {*order.before, *order.after} <= SPELLED.keys()
        case _:
            return isinstance(order, Migration)


def _wrong_moves(state: ClusterState, decision: Decision) -> Iterator[str]:
    known = {slot.slot: slot for slot in state.slots}
    for slot, times in Counter(move.slot for move in decision.moves).items():
        if times > 1:
            yield f"slot {slot} is moved {times} times"
    for move in decision.moves:
        slot = known.get(move.slot)
        if slot is None:
            yield f"there is no slot {move.slot}"
        elif not slot.ready:
            yield f"slot {move.slot} is not ready for another order"
        elif move.before != slot.roles:
            yield f"slot {move.slot} holds {spelled(slot.roles)}, not {spelled(move.before)}"
        elif move.before == move.after:
            yield f"slot {move.slot} holds {spelled(move.after)} already"
        elif len(set(move.after)) < len(move.after):
            yield f"slot {move.slot} is given a role twice: {spelled(move.after)}"
        elif {"train", "generate"} <= {*move.after} and not (
            state.limits.may_share or state.limits.offloads or {"train", "generate"} <= {*move.before}
        ):
            yield f"slot {move.slot} has no memory for a generator beside the trainer's state"


def lending_after(state: ClusterState, after: Mapping[int, tuple[Role, ...]]) -> tuple[int, ...]:
    """The slots that lend their devices where slots have these roles (`ClusterState.lending`)."""
    if not state.limits.offloads:
        return ()
    return tuple(sorted(slot for slot, roles in after.items() if {"train", "generate"} <= {*roles}))


def _wrong_lending(state: ClusterState, decision: Decision, after: Mapping[int, tuple[Role, ...]]) -> Iterator[str]:
    """A device that is lent has none of the trainer on it: nothing is trained until all are given back, and nothing of
    it moves. A generator cannot stay where the trainer's state has to come back to, be it to leave the slot at once."""
    if not state.limits.offloads:
        return
    lending, before = lending_after(state, after), {*state.lending}
    if leaving := [slot for slot in sorted(before) if "generate" in after[slot] and "train" not in after[slot]]:
        yield f"{slots_of(leaving)} cannot leave the trainer and go on generating: it is to get its state back first"
    if not lending:
        return
    if not decision.hold_training:
        yield f"{slots_of(lending)} would lend the trainer's devices while training goes on"
    if not before.issuperset(lending) and not state.batch.missing:
        yield f"{slots_of(lending)} would lend the trainer's devices, and training waits for no rollout"
    if {slot for slot, roles in after.items() if "train" in roles} != {*state.trainer.layout.slots}:
        yield f"the trainer cannot be resized while {slots_of(lending)} would lend its devices"


def _split_instances(state: ClusterState, decision: Decision, after: Mapping[int, tuple[Role, ...]]) -> Iterator[str]:
    """Slots of one instance take its role on together, and give it up together."""
    for role, noun in NOUNS.items():
        if (size := state.limits.slots_per(role)) == 1:
            continue
        moved = {move.slot for move in decision.moves if (role in move.before) != (role in move.after)}
        groups = [group for group in state.groups(role) if moved.intersection(group)]
        for group in groups:
            holding = [slot for slot in group if role in after.get(slot, ())]
            if 0 < len(holding) < size:
                yield f"the {noun} of {slots_of(group)} would be split: only {slots_of(holding)} would {role}"
        alone = sorted(slot for slot in moved.difference(*groups) if role in after.get(slot, ()))
        if alone:
            yield f"{slots_of(alone)} cannot {role}: a {noun} takes {size} slots of one group, and there is none"


def _wrong_migrations(state: ClusterState, decision: Decision, instances: Iterable[Instance]) -> Iterator[str]:
    generators = {each.id for each in instances if each.role == "generate"}
    migrating = {order.id for order in decision.migrations}
    if len(migrating) < len(decision.migrations):
        yield "a rollout migrates twice"
    where = {rollout.id: rollout.instance for rollout in state.unfinished}
    for order in decision.migrations:
        if where.get(order.id) != order.source:
            yield f"rollout {order.id} is not on {order.source}"
        elif order.target not in generators or order.target == order.source:
            yield f"rollout {order.id} cannot go to {order.target}, which does not generate afterwards"
    for name, instance in where.items():
        if instance not in generators and name not in migrating:
            yield f"rollout {name} would be left behind on {instance}"


def _broken_floors(
    state: ClusterState, after: Mapping[int, tuple[Role, ...]], instances: Iterable[Instance]
) -> Iterator[str]:
    """A floor that was broken before, as a lost instance is being started again, need not be mended by the decision."""
    limits, num_train = state.limits, sum("train" in roles for roles in after.values())
    held, before = Counter(each.role for each in instances), Counter(each.role for each in state.instances)
    min_generate, min_score = min(limits.min_generate, before["generate"]), min(limits.min_score, before["score"])
    if num_train < max(1, limits.min_train):
        yield f"{many(num_train, 'slot')} would train, and {max(1, limits.min_train)} is the least"
    if state.num_to_generate and held["generate"] < min_generate:
        yield f"{many(held['generate'], 'generator')} would be left, and {min_generate} is the least"
    if (state.num_to_generate or state.batch.to_score) and held["score"] < min_score:
        yield f"{many(held['score'], 'scorer')} would be left, and {min_score} is the least"


def _wrong_layout(state: ClusterState, decision: Decision) -> Iterator[str]:
    if not any("train" in roles for roles in roles_after(state, decision).values()):
        return  # a floor is broken
    try:
        layout = layout_after(state, decision)
    except NoLayout as error:
        number = sum("train" in roles for roles in roles_after(state, decision).values())
        nearest = " or ".join(map(str, nearest_allowed(number, len(state.slots), state.trainer.rules)))
        yield f"the trainer cannot go on so: {error}{f'; it may have {nearest}' if nearest else ''}"
    except ValueError as error:
        yield f"the trainer cannot go on so: {error}"
    else:
        if layout != state.trainer.layout and not state.trainer.at_boundary:
            yield "the trainer is being resized already: one resize at a time"


def sentence(orders: Iterable[Order], *further: str) -> str:
    """The orders in words: "slot 2 generate → train: 3 rollouts left, migrated to generator-3; cost 0.4 s"; `further`
    parts come last."""
    kinds: dict[tuple[str, str], list[int]] = {}
    migrations: list[Migration] = []
    for order in orders:
        if isinstance(order, RoleChange):
            kinds.setdefault((spelled(order.before), spelled(order.after)), []).append(order.slot)
        else:
            migrations.append(order)
    said = ", ".join(f"{slots_of(slots)} {before} → {after}" for (before, after), slots in kinds.items())
    if migrations:
        what = many(len(migrations), "rollout")
        to = named({order.target for order in migrations})
        said = f"{said}: {what} left, migrated to {to}" if said else f"{what} migrated to {to}"
    return "; ".join(part for part in (said, *further) if part)


def explained(state: ClusterState, orders: Iterable[Order], *further: str) -> str:
    """The orders in words (`sentence`), with what they mean for nodes: "slots 8-15 generate → train: all of node 1;
    tp groups stay inside nodes; cost 0.4 s"."""
    orders = tuple(orders)
    return sentence(orders, *_of_nodes(state, orders), *further)


def _of_nodes(state: ClusterState, orders: tuple[Order, ...]) -> Iterator[str]:
    """Which nodes change as a whole, and which groups of the trainer are on several; nothing where all slots share a
    node."""
    moved = {order.slot for order in orders if isinstance(order, RoleChange)}
    if not moved or not state.topology.nodes:
        return
    if whole := state.topology.whole_nodes(moved):
        yield f"all of {'node' if len(whole) == 1 else 'nodes'} {compact(whole)}"
    try:
        layout = layout_after(state, Decision(orders))
    except ValueError:  # `violations` says it
        return
    if layout.dims.tp == 1 or layout == state.trainer.layout:
        return
    split = split_groups(layout, state.topology)
    if split:
        groups = "a tp group is" if len(split) == 1 else f"{len(split)} tp groups are"
        yield f"{groups} on several nodes: {', '.join(slots_of(group) for group in split[:3])}"
    else:
        yield "tp groups stay inside nodes"


def spelled(roles: tuple[Role, ...]) -> str:
    return "+".join(roles) or "nothing"
