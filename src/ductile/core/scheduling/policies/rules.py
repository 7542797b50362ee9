"""Rules of thumb: generators that the rollouts no longer need are given to the trainer.

Whenever something has happened in a step that has begun to train, and no resize is under way:

1. Nothing is left to generate: all generators train. Nothing left to score either: so do the scorers.
2. The rollouts that are left fit on fewer generators: the others hand theirs over, and all their slots train. Fit is by
   number alone: as many to a generator as it may have at once, but no more than double the time of its decode step.
   (Where sequences cost time, the tail of generation would pay for every slot that is freed.)
3. Slots without a role train.

Where the trainer has no layout on so many slots, it gets as many of them as it can have, and the others keep what they
do (`train_sizes`).

When the next step begins every slot returns to what the configuration gave it. Two further rules, each on request:

- `pre_process`: until half of the step's rollouts are finished, the train slots generate too, and the trainer waits.
  Where a slot has no memory for two roles, it lends its device, or, where that is forbidden, the trainer waits for
  nothing.
- `wait_before_last_iter`: before its last optimizer step (of a batch with one: before its last quarter) the trainer
  waits until generation and scoring are done, and then takes all slots.

There is no estimate of what a move costs or gains: `model` is for that. What the rules never break is said in
tests/core/scheduling/policies/test_properties.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from ductile.core.instances.instances import Instance, slots_on
from ductile.core.instances.placement import Role, many
from ductile.core.scheduling.costs.arithmetic import whole_times
from ductile.core.scheduling.costs.train_sizes import fitted
from ductile.core.scheduling.facts.cluster_state import BatchProgress, ClusterState
from ductile.core.scheduling.migration_targets import change, remaining_tokens
from ductile.core.scheduling.orders import Decision, Order, explained, lending_after, roles_after, violations

TRAIN: tuple[Role, ...] = ("train",)


@dataclass(frozen=True, slots=True)
class Rules:
    pre_process: bool = False
    wait_before_last_iter: bool = False

    def decide(self, state: ClusterState) -> Decision:
        if not (state.batch.steps_left or state.lending):
            return Decision()
        if not state.trainer.at_boundary:
            return Decision(hold_training=state.trainer.held or bool(state.lending))
        if state.step_begins or state.lending:
            return self._before_the_step(state)
        if self.wait_before_last_iter and state.batch.last_update and (awaited := _awaited(state.batch)):
            why = f"the last part of the batch waits for {awaited}, to train on all slots"
            return Decision(hold_training=True, reason=why, topic="rollouts" if state.batch.missing else "scores")
        return self._during_the_step(state)

    def _before_the_step(self, state: ClusterState) -> Decision:
        home = _home(state)
        missing, half = state.batch.missing, state.batch.num_rollouts // 2
        early = self.pre_process and not (state.batch.trained or state.trainer.wanted) and missing > half
        at_home = dict(home)
        if early:
            home |= {slot: _with_generate(home[slot]) for slot in _can_share(state, home)}
        # No device is lent while the trainer is resized: first it returns.
        orders = _orders(state, home) or (
            _orders(state, at_home) if state.limits.offloads and not state.lending else ()
        )
        # Where no train slot can generate, nothing is generated sooner because the trainer waits.
        shares = early and any({"train", "generate"} <= {*roles} for roles in home.values())
        if shares:
            why = f"train slots generate until half of the step's rollouts ({state.batch.num_rollouts}) are finished"
        elif early:
            why = "training does not wait: no train slot has memory for a generator besides"
        elif self.pre_process and state.trainer.held:
            why = f"training starts: {many(missing, 'rollout')} missing, at most half of the step's"
        else:
            why = "every slot returns to what the configuration gave it"
        waits = shares or _lends_after(state, orders)
        return Decision(
            orders, explained(state, orders, why) if orders or early else "", hold_training=waits, topic=why
        )

    def _during_the_step(self, state: ClusterState) -> Decision:
        to_generate, may_move = state.num_to_generate, state.ready
        generators = [each for each in state.instances_of("generate") if each.slots and may_move.issuperset(each.slots)]
        needed = ceil(to_generate / _carries(state))
        if to_generate:
            needed = max(needed, state.limits.min_generate)
        # Generators that cannot be ordered about, such as external servers, go on, and count.
        num_others = len(state.instances_of("generate")) - len(generators)
        surplus = len(generators) - max(0, needed - num_others)
        freed = _cheapest_to_free(state, generators)[:surplus] if surplus > 0 else []
        roles = dict.fromkeys(slots_on(freed), TRAIN)
        if not to_generate and state.batch.all_scored:
            roles |= {slot: TRAIN for slot in state.of("score") if slot in may_move}
        roles |= {slot.slot: TRAIN for slot in state.slots if slot.ready and not slot.roles}
        orders = _orders(state, roles)
        why = "nothing is left to generate"
        if to_generate:
            why = f"{many(to_generate, 'rollout')} to generate, {many(needed, 'generator')} needed"
        return Decision(orders, explained(state, orders, why) if orders else "")


@dataclass(frozen=True, slots=True)
class Home:
    """Every slot returns to what the configuration gave it, as soon as it can, and stays there."""

    def decide(self, state: ClusterState) -> Decision:
        orders = _orders(state, _home(state)) if state.trainer.at_boundary else ()
        waits = _lends_after(state, orders)
        return Decision(orders, explained(state, orders, "as configured") if orders else "", hold_training=waits)


def _lends_after(state: ClusterState, orders: tuple[Order, ...]) -> bool:
    """True where slots lend their devices once these orders are carried out: then training has to wait."""
    return bool(lending_after(state, roles_after(state, Decision(orders))))


def _awaited(batch: BatchProgress) -> str:
    """What the step trains on and the trainer cannot have yet: "3 rollouts and the scores of 8 rollouts"."""
    missing = many(batch.missing, "rollout") if batch.missing else ""
    unscored = f"the scores of {many(batch.unscored, 'rollout')}" if batch.unscored else ""
    return " and ".join(part for part in (missing, unscored) if part)


def _home(state: ClusterState) -> dict[int, tuple[Role, ...]]:
    """What the configuration gave each slot. One that joined later keeps what it has: it has no other home. Nor has one
    that scored with others of which one is gone."""
    scoring = {slot for group in state.scorer_groups for slot in group}
    configured = {slot: state.home.roles(slot) for slot in state.home.slots}
    home = {slot: roles for slot, roles in configured.items() if slot in scoring or "score" not in roles}
    return {slot.slot: home.get(slot.slot, slot.roles) for slot in state.slots}


def _can_share(state: ClusterState, home: Mapping[int, tuple[Role, ...]]) -> list[int]:
    """Train slots that can hold a generator besides: their trainer's state stays with them."""
    groups = state.groups("generate") if state.limits.may_share or state.limits.offloads else ()
    return [slot for group in groups if all(home.get(slot) == TRAIN for slot in group) for slot in group]


def _with_generate(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    return tuple(role for role in ("train", "generate", "score") if role in roles or role == "generate")


def _carries(state: ClusterState) -> int:
    """Sequences that a generator takes on from others."""
    decode, most = state.speeds.decode, state.limits.max_num_seqs
    context = sum(rollout.context_tokens for rollout in state.unfinished) / max(1, len(state.unfinished))
    each_s = decode.per_sequence_s + decode.per_context_s * context
    return max(1, min(most, whole_times(decode.step_s, each_s))) if each_s > 0 else most


def _cheapest_to_free(state: ClusterState, generators: Sequence[Instance]) -> list[Instance]:
    """The generators in the order in which they are freed: those that train already (they only stop generating), then
    those with the fewest predicted tokens to migrate. Over several nodes, node by node: first those that have most of
    the trainer."""
    left = dict.fromkeys((each.id for each in generators), 0.0)
    remaining = remaining_tokens(state)
    for rollout in state.unfinished:
        if rollout.instance in left:
            left[rollout.instance] += remaining[rollout.id]
    trains, topology = {*state.trainer.layout.slots}, state.topology
    num_trains, left_on = Counter(map(topology.node, trains)), Counter[int]()
    nodes = {each.id: topology.node(each.slots[0]) for each in generators}
    for each in generators:
        left_on[nodes[each.id]] += round(left[each.id])

    def order(each: Instance) -> tuple[object, ...]:
        node = nodes[each.id]
        of_node = (-num_trains[node], left_on[node], node)
        return not trains.issuperset(each.slots), of_node, left[each.id], each.slots

    return sorted(generators, key=order)


def _orders(state: ClusterState, roles: Mapping[int, tuple[Role, ...]]) -> tuple[Order, ...]:
    """The orders that change slots to `roles`, of those slots that may be ordered about; none while others are still
    needed where they are, because the slots that should take their place are not ready. The slots of one generator or
    scorer change together."""
    held = {slot.slot: slot.roles for slot in state.slots}
    changing = {slot: after for slot, after in roles.items() if after != held[slot]}
    if not changing:
        return ()
    busy = held.keys() - state.ready
    groups = (*state.groups("generate"), *state.scorer_groups)
    busy |= {slot for group in groups if not busy.isdisjoint(group) for slot in group}
    moved = fitted(state, {slot: after for slot, after in changing.items() if slot not in busy})
    after = held | moved
    if state.unfinished and not any("generate" in then for then in after.values()) and not state.num_external:
        return ()
    orders = change(state, moved)
    waits = _lends_after(state, orders)
    return () if violations(state, Decision(orders, hold_training=waits)) else orders
