"""So many generators: which slots would that be, and what does it cost to get there?

Looked at once a decision; every number of generators is then a slice of two orders and a difference of running sums.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from ductile.core.cluster.handoff import Remaining
from ductile.core.cluster.placement import Role
from ductile.core.cluster.state import ClusterState


class Arrangements:
    """Of the slots in `pool`, which train or generate."""

    def __init__(self, state: ClusterState, pool: Sequence[int], remaining: Remaining) -> None:
        held = {slot.slot: slot.roles for slot in state.slots}
        members = state.trainer.formation.members
        rank = {slot: place for place, slot in enumerate(members)}
        at_home = {*state.home.generate}
        left, context = dict.fromkeys(pool, 0.0), dict.fromkeys(pool, 0.0)
        for rollout in state.unfinished:
            if rollout.slot in left:
                left[rollout.slot] += remaining[rollout.id]
                context[rollout.slot] += rollout.context_tokens
        now = [slot for slot in pool if "generate" in held[slot]]
        others = [slot for slot in pool if "generate" not in held[slot]]
        self._state, self._pool = state, tuple(pool)
        self._members = frozenset(members).intersection(pool)
        # Who holds the trainer's state goes back to it first: it costs no transfer. Then who has the least to hand off.
        self._leaving = sorted(now, key=lambda slot: (slot not in rank, left[slot], slot))
        self._joining = sorted(others, key=lambda slot: (slot in rank, slot not in at_home, -rank.get(slot, 0)))
        self._context = [0.0, *accumulate(context[slot] for slot in self._leaving)]

    @property
    def now(self) -> int:
        """Slots that generate."""
        return len(self._leaving)

    def generators(self, count: int) -> frozenset[int]:
        if count <= self.now:
            return frozenset(self._leaving[self.now - count :])
        return frozenset([*self._leaving, *self._joining[: count - self.now]])

    def trainers(self, count: int) -> frozenset[int]:
        """The others. When there are none, the trainer's slots keep its state beside their generator: nothing is moved
        then, and nothing when they go back."""
        return frozenset(self._pool).difference(self.generators(count)) or self._members

    def roles(self, count: int) -> Mapping[int, tuple[Role, ...]]:
        held: tuple[tuple[Role, frozenset[int]], ...]
        held = ("train", self.trainers(count)), ("generate", self.generators(count))
        return {slot: tuple(role for role, slots in held if slot in slots) for slot in self._pool}

    def delays_s(self, count: int) -> tuple[float, float]:
        """What the change costs now: seconds of the trainer, and of generation."""
        state, costs = self._state, self._state.costs
        resize_s = costs.resize_s if self.trainers(count) != self._members else 0.0
        if count > self.now:
            return resize_s, costs.grant_s * (count - self.now) / count
        return resize_s, self._context[self.now - count] / state.speeds.prefill_tokens_per_s / max(1, count)
