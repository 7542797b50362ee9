"""Which generators finish the rollouts that another one leaves behind?

Loads are predicted tokens, not rollouts: one that has just begun is not like one that is nearly done. The longest goes
first, each to the generator that then has the least before it, those with room for another sequence first.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ductile.core.cluster.cost import carriage
from ductile.core.cluster.lengths import Survival, survival
from ductile.core.cluster.orders import Migration, Order, RoleChange
from ductile.core.cluster.placement import Role, many, slots_of
from ductile.core.cluster.state import ClusterState, Unfinished

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
    state: ClusterState, leaving: Collection[int], receivers: Sequence[int], remaining: Remaining | None = None
) -> tuple[Migration, ...]:
    """Migrations of every rollout of the `leaving` slots to one of `receivers`.

    Raises ValueError when a rollout is to migrate and there is no receiver.
    """
    orphans = [rollout for rollout in state.unfinished if rollout.slot in leaving] if leaving else []
    if not orphans:
        return ()
    if not receivers:
        raise ValueError(f"there is no generator for {many(len(orphans), 'rollout')} of {slots_of(leaving)}")
    remaining = remaining if remaining is not None else remaining_tokens(state)
    load, count = dict.fromkeys(receivers, 0.0), dict.fromkeys(receivers, 0)
    for rollout in state.unfinished:
        if rollout.slot in load:
            load[rollout.slot] += remaining[rollout.id]
            count[rollout.slot] += 1
    full = state.limits.max_num_seqs
    queue = [(count[slot] >= full, load[slot], slot) for slot in receivers]
    heapq.heapify(queue)
    migrations: list[Migration] = []
    for rollout in sorted(orphans, key=lambda rollout: (-remaining[rollout.id], rollout.id)):
        _, tokens, target = queue[0]
        count[target] += 1
        heapq.heapreplace(queue, (count[target] >= full, tokens + remaining[rollout.id], target))
        migrations.append(_migration(state, rollout, target))
    return tuple(migrations)


def spread(state: ClusterState, generators: Sequence[int], remaining: Remaining | None = None) -> tuple[Migration, ...]:
    """Migrations from the generators with the most predicted tokens to those with the least, as long as that evens them
    out; each rollout goes at most once."""
    remaining = remaining if remaining is not None else remaining_tokens(state)
    here: dict[int, list[Unfinished]] = {slot: [] for slot in generators}
    load = dict.fromkeys(generators, 0.0)
    for rollout in state.unfinished:
        if rollout.slot in here:
            here[rollout.slot].append(rollout)
            load[rollout.slot] += remaining[rollout.id]
    # An entry whose tokens are no longer its slot's is left over from before a migration.
    fullest = [(-tokens, slot) for slot, tokens in load.items()]
    emptiest = [(tokens, slot) for slot, tokens in load.items()]
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
        for slot, tokens in ((most, -remaining[best.id]), (least, remaining[best.id])):
            load[slot] += tokens
            heapq.heappush(fullest, (-load[slot], slot))
            heapq.heappush(emptiest, (load[slot], slot))
        migrations.append(_migration(state, best, least))
    return tuple(migrations)


def change(
    state: ClusterState, roles: Mapping[int, tuple[Role, ...]], generators: Collection[int] | None = None
) -> tuple[Order, ...]:
    """The orders after which the slots hold `roles` (slots that are not named stay as they are): a move for each slot
    that changes, and a migration for each rollout that would be left behind.

    generators: slots that are to work on the rollouts of the slots that are named; the others hand theirs over, even
    where they stay generators. None: all that generate.
    """
    before = {slot.slot: slot.roles for slot in state.slots}
    moves = [RoleChange(slot, before[slot], after) for slot, after in sorted(roles.items()) if before[slot] != after]
    after = before | {move.slot: move.after for move in moves}
    receivers = [slot for slot in before if "generate" in after[slot]]
    leaving = {slot for slot in before if "generate" in before[slot] and "generate" not in after[slot]}
    if generators is not None:
        receivers = [slot for slot in receivers if slot in generators]
        leaving.update(slot for slot in roles if slot not in generators)
    return (*moves, *migrate(state, leaving, receivers))


def _migration(state: ClusterState, rollout: Unfinished, target: int) -> Migration:
    with_cache = carriage(rollout.context_tokens, state.speeds, state.costs).with_cache
    return Migration(rollout.id, rollout.slot, target, with_cache)
