"""So many generators: which slots would that be, and what does it cost to get there?

Slots that train keep their generator beside the trainer's state where there is memory for both, so that the next step
finds it there: from all generating to some of them training takes migrations alone, and back again nothing.

Slots are ordered once a decision; every number of generators is then a slice of one order and a difference of running
sums.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from ductile.core.cluster.cost import carriage
from ductile.core.cluster.migration import Remaining
from ductile.core.cluster.placement import Role
from ductile.core.cluster.state import ClusterState

BOTH: tuple[Role, ...] = ("train", "generate")


class Arrangements:
    """Which of the slots in `pool` train or generate, for every number of generators."""

    def __init__(self, state: ClusterState, pool: Sequence[int], remaining: Remaining) -> None:
        held = {slot.slot: slot.roles for slot in state.slots}
        members = state.trainer.formation.members
        rank = {slot: place for place, slot in enumerate(members)}
        at_home = {*state.home.generate}
        left, context = dict.fromkeys(pool, 0.0), dict.fromkeys(pool, 0.0)
        for rollout in state.unfinished:
            if rollout.slot in left:
                left[rollout.slot] += remaining[rollout.id]
                context[rollout.slot] += rollout.prompt_tokens + rollout.generated
        self.tokens_left: Mapping[int, float] = left
        """Predicted tokens still to come, by slot."""
        self._state, self._held = state, {slot: held[slot] for slot in pool}
        self.members = frozenset(members).intersection(pool)
        self.generators_now = frozenset(slot for slot in pool if "generate" in held[slot])
        # Slots that only generate come first, then those that have the most to migrate; of the trainer's slots, those
        # that joined last leave it first.
        self._order = sorted(
            pool,
            key=lambda slot: (
                slot in rank,
                slot not in self.generators_now,
                -left[slot],
                slot not in at_home,
                -rank.get(slot, 0),
                slot,
            ),
        )
        self._context = [0.0, *accumulate(context[slot] for slot in self._order)]
        sharing = self.members & self.generators_now
        # A micro-step would stop sequences of these slots: while there are such, the trainer is held, or they are
        # migrated.
        self.shared = bool(sharing) and (state.batch.to_start > 0 or any(context[slot] for slot in sharing))
        self._carried_s = carriage(1.0, state.speeds, state.costs).seconds
        several_turns = any(rollout.num_turns for rollout in state.unfinished)
        self._keeps = state.limits.may_share and not state.batch.to_start and not several_turns

    @property
    def num_generators(self) -> int:
        """Number of generators that have or get sequences now."""
        return len(self.generators_now if self.shared else self.generators_now - self.members)

    def generators(self, count: int) -> frozenset[int]:
        """The slots that only generate, when `count` do."""
        return frozenset(self._order[:count])

    def trainers(self, count: int) -> frozenset[int]:
        return frozenset(self._order[count:])

    def resizes(self, count: int) -> bool:
        return self.trainers(count) != self.members

    def split(self, count: int) -> Mapping[int, tuple[Role, ...]]:
        """Roles with which `count` slots generate and the others train. These have nothing to do with what is
        generated: where new sequences may come up, they give their generators up."""
        roles: dict[int, tuple[Role, ...]] = {slot: ("generate",) for slot in self.generators(count)}
        for slot in self.trainers(count):
            roles[slot] = BOTH if self._keeps and slot in self.generators_now else ("train",)
        return roles

    def everybody(self) -> Mapping[int, tuple[Role, ...]]:
        """Roles with which all slots generate; the trainer's slots keep its state beside their generator, and nothing
        is moved for it."""
        return {slot: BOTH if slot in self.members else ("generate",) for slot in self._held}

    def moved_context(self, count: int) -> float:
        """Context tokens that migrate when `count` slots generate."""
        return self._context[-1] - self._context[count]

    def split_delays_s(self, count: int) -> tuple[float, float]:
        """What `split` costs now, in seconds: of the trainer, and of generation."""
        costs = self._state.costs
        resize_s = costs.resize_s if self.resizes(count) else 0.0
        new = len(self.generators(count) - self.generators_now)
        # A slot that leaves the trainer waits for the resize before it generates.
        stopped, left_s = len(self.generators(count) & self.members), self._state.resize_wait_s + resize_s
        generate_s = self._joining_s(costs.grant_s, new, count) + self._joining_s(left_s, stopped, count)
        return resize_s, generate_s + self._migrating_s(self.moved_context(count), count)

    def everybody_delays_s(self) -> tuple[float, float]:
        """What `everybody` costs now, in seconds: of the trainer, and of generation."""
        num_slots = len(self._held)
        new = num_slots - len(self.generators_now)
        moved = 0.0 if self._state.batch.to_start else self._context[-1] * new / num_slots
        return 0.0, self._joining_s(self._state.costs.grant_s, new, num_slots) + self._migrating_s(moved, new)

    def _migrating_s(self, context: float, num_targets: int) -> float:
        """Seconds that migrations cost generation, on average over all sequences: messages stop only those that they
        are about."""
        if not context:
            return 0.0
        return self._state.costs.handoff_s * context / self._context[-1] + self._carried_s * context / num_targets

    def _joining_s(self, seconds: float, new: int, count: int) -> float:
        """Seconds that generation loses because `new` of `count` generators come so much later. Before a step's first
        rollout new weights wait for them, and the other generators wait for the weights."""
        share = new / max(1, count)
        if self._state.unfinished or not new:
            return seconds * share
        wait_s = min(seconds, self._state.patience_s)
        return wait_s + (seconds - wait_s) * share
