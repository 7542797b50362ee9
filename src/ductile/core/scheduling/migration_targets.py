"""Which generators finish the rollouts that another one leaves behind?

Loads are predicted tokens, not rollouts: one that has just begun is not like one that is nearly done. The longest goes
first, each to the generator that then has the least before it, those with room for another sequence first.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from ductile.core.instances.instances import Instance, InstanceId, named
from ductile.core.instances.placement import Role, many
from ductile.core.scheduling.costs.cost import context_transfer
from ductile.core.scheduling.facts.cluster_state import ClusterState, Unfinished
from ductile.core.scheduling.facts.length_estimates import Survival, survival
from ductile.core.scheduling.orders import Decision, Migration, Order, RoleChange, instances_after

Remaining = Mapping[str, float]
"""Predicted tokens still to come, by rollout; each a whole number of `1 / TOKEN_PARTS`."""
TOKEN_PARTS = 1024.0


def length_model(state: ClusterState) -> Survival:
    """What the state says about the lengths of completions."""
    return survival(
        state.max_tokens, state.lengths.ended, state.lengths.cut, [rollout.generated for rollout in state.unfinished]
    )


def remaining_tokens(state: ClusterState, lengths: Survival | None = None) -> dict[str, float]:
    """Predicted tokens still to come, of every unfinished rollout; never more than its limit leaves."""
    lengths = lengths or length_model(state)
    generated = np.array([rollout.generated for rollout in state.unfinished], float)
    room = np.array([rollout.limit for rollout in state.unfinished], float) - generated
    # Rounded to parts of a token that floats add and subtract without error: equal loads are equal in whatever order
    # they were added up.
    left = np.minimum(np.round(lengths.remaining(generated) * TOKEN_PARTS) / TOKEN_PARTS, room).tolist()
    return dict(zip([rollout.id for rollout in state.unfinished], left, strict=True))


def migrate(
    state: ClusterState,
    leaving: Collection[InstanceId],
    receivers: Sequence[InstanceId],
    remaining: Remaining | None = None,
) -> tuple[Migration, ...]:
    """Migrations of every rollout of the `leaving` generators to one of `receivers`; of equal ones to the first.

    Raises ValueError when a rollout is to migrate and there is no receiver.
    """
    orphans = [rollout for rollout in state.unfinished if rollout.instance in leaving] if leaving else []
    if not orphans:
        return ()
    if not receivers:
        raise ValueError(f"there is no generator for {many(len(orphans), 'rollout')} of {named(leaving)}")
    remaining = remaining if remaining is not None else remaining_tokens(state)
    load, count = dict.fromkeys(receivers, 0.0), dict.fromkeys(receivers, 0)
    for rollout in state.unfinished:
        if rollout.instance in load:
            load[rollout.instance] += remaining[rollout.id]
            count[rollout.instance] += 1
    full, near = state.limits.max_num_seqs, _Near(state)
    queue = [(count[name] >= full, load[name], place) for place, name in enumerate(receivers)]
    heapq.heapify(queue)
    migrations: list[Migration] = []
    for rollout in sorted(orphans, key=lambda rollout: (-remaining[rollout.id], rollout.id)):
        _, tokens, place = queue[0]
        target = receivers[place]
        count[target] += 1
        heapq.heapreplace(queue, (count[target] >= full, tokens + remaining[rollout.id], place))
        migrations.append(near.migration(rollout, target))
    return tuple(migrations)


def spread(
    state: ClusterState, generators: Sequence[InstanceId], remaining: Remaining | None = None
) -> tuple[Migration, ...]:
    """Migrations from the generators with the most predicted tokens to those with the least, as long as that evens them
    out; each rollout goes at most once."""
    remaining = remaining if remaining is not None else remaining_tokens(state)
    places, near = {name: place for place, name in enumerate(generators)}, _Near(state)
    here: list[list[Unfinished]] = [[] for _ in generators]
    load = [0.0] * len(generators)
    for rollout in state.unfinished:
        if (place := places.get(rollout.instance)) is not None:
            here[place].append(rollout)
            load[place] += remaining[rollout.id]
    # An entry whose tokens are no longer its generator's is left over from before a migration.
    fullest = [(-tokens, place) for place, tokens in enumerate(load)]
    emptiest = [(tokens, place) for place, tokens in enumerate(load)]
    heapq.heapify(fullest)
    heapq.heapify(emptiest)
    migrations: list[Migration] = []
    while load:
        while -fullest[0][0] != load[fullest[0][1]]:
            heapq.heappop(fullest)
        while emptiest[0][0] != load[emptiest[0][1]]:
            heapq.heappop(emptiest)
        most, least = fullest[0][1], emptiest[0][1]
        gap = load[most] - load[least]
        # Moving `tokens` leaves a difference of |gap - 2 tokens|: the best one is half the gap.
        best = min(
            here[most], key=lambda each: (abs(gap - 2 * remaining[each.id]), remaining[each.id], each.id), default=None
        )
        if best is None or abs(gap - 2 * remaining[best.id]) >= 0.9 * gap:
            break
        here[most].remove(best)
        for place, tokens in ((most, -remaining[best.id]), (least, remaining[best.id])):
            load[place] += tokens
            heapq.heappush(fullest, (-load[place], place))
            heapq.heappush(emptiest, (load[place], place))
        migrations.append(near.migration(best, generators[least]))
    return tuple(migrations)


def change(
    state: ClusterState, roles: Mapping[int, tuple[Role, ...]], generators: Collection[int] | None = None
) -> tuple[Order, ...]:
    """The orders after which the slots hold `roles` (slots that are not named stay as they are): a move for each slot
    that changes, and a migration for each rollout that would be left behind.

    generators: slots whose generators are to work on the rollouts of the slots that are named, as external servers
    are; the others hand theirs over, even where they stay generators. None: all generators.
    """
    before = {slot.slot: slot.roles for slot in state.slots}
    moves = [RoleChange(slot, before[slot], after) for slot, after in sorted(roles.items()) if before[slot] != after]
    if not moves and generators is None:
        return ()
    there = generators_on(instances_after(state, Decision(tuple(moves))), generators)
    concerned = {each.id for each in state.instances_of("generate") if not roles.keys().isdisjoint(each.slots)}
    leaving = concerned.difference(there)
    return (*moves, *migrate(state, leaving, there))


def generators_on(instances: Iterable[Instance], slots: Collection[int] | None) -> list[InstanceId]:
    """The generators on these slots, and the external ones; None: all of them."""
    return [
        each.id
        for each in instances
        if each.role == "generate" and (slots is None or all(slot in slots for slot in each.slots))
    ]


class _Near:
    """Which generators are on the same node: between others a cache travels more slowly."""

    def __init__(self, state: ClusterState) -> None:
        self._state, topology = state, state.topology
        self._nodes: dict[InstanceId, int] = {}
        if topology.nodes:
            self._nodes = {each.id: topology.node(each.slots[0]) for each in state.instances if each.slots}

    def migration(self, rollout: Unfinished, target: InstanceId) -> Migration:
        """A generator that only begins is taken to be on another node."""
        state, nodes = self._state, self._nodes
        is_across = bool(nodes) and nodes.get(rollout.instance, -1) != nodes.get(target, -2)
        costs = state.costs.between(nodes=is_across)
        with_cache = context_transfer(rollout.context_tokens, state.speeds, costs).with_cache
        return Migration(rollout.id, rollout.instance, target, with_cache)
