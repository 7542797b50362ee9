"""So many generators: which slots would that be, and what does it cost to get there?

Slots that train keep their generator beside the trainer's state where there is memory for both, so that the next step
finds it there: from all generating to some of them training takes migrations alone, and back again nothing.

Where there is not, and slots may lend their devices (`Limits.offloads`), the trainer's state is parked when all
generate, and is back before any of them trains; the generators of its slots end then.

The other slots train, as many of them as the trainer may have (`train_sizes`); the rest have nothing to do.

Over several nodes, generators become trainers node by node, and trainers generators, so that both have whole nodes, and
tp groups stay inside one (`node_order.chosen`).

A generator takes a whole group of slots (`ClusterState.groups`). Groups are ordered once a decision; every number of
generators is then a slice of one order and a difference of running sums. External servers generate beside all of them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from ductile.core.instances.instances import InstanceId
from ductile.core.instances.placement import Role
from ductile.core.layout.geometry.node_order import chosen
from ductile.core.scheduling.costs.cost import context_transfer
from ductile.core.scheduling.costs.train_sizes import TrainSizes
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.migration_targets import Remaining, generators_on

BOTH: tuple[Role, ...] = ("train", "generate")


class Arrangements:
    """Which of the slots in `pool` train or generate, for every number of generators among them."""

    def __init__(self, state: ClusterState, pool: Sequence[int], remaining: Remaining) -> None:
        """pool: slots that may change roles, with whole generators only."""
        held = {slot.slot: slot.roles for slot in state.slots}
        trainers = state.trainer.layout.slots
        rank = {slot: place for place, slot in enumerate(trainers)}
        at_home, free = {*state.home.generate}, {*pool}
        self._state, self._held = state, {slot: held[slot] for slot in pool}
        self.trainers_now = frozenset(trainers).intersection(pool)
        self._sizes, self._num_other_trainers = TrainSizes(state), len({*trainers} - free)
        # Slots in the order in which they train: those that do, then those that do nothing.
        self._train_order = sorted(pool, key=lambda slot: (slot not in rank, bool(held[slot]), rank.get(slot, slot)))
        self.generators_now = frozenset(slot for slot in pool if "generate" in held[slot])
        groups = [group for group in state.groups("generate") if free.issuperset(group)]
        here = {each.id: each.slots for each in state.instances_of("generate") if free.issuperset(each.slots)}
        left, context = dict.fromkeys(here, 0.0), dict.fromkeys(groups, 0.0)
        for rollout in state.unfinished:
            if rollout.instance in left:
                left[rollout.instance] += remaining[rollout.id]
                if slots := here[rollout.instance]:
                    context[slots] += rollout.prompt_tokens + rollout.generated
        self.tokens_left: Mapping[InstanceId, float] = left
        """Predicted tokens still to come, by generator."""
        tokens = {slots: left[name] for name, slots in here.items()}
        # Groups that only generate come first, then those that have the most to migrate; of the trainer's slots, those
        # that joined last leave it first.
        # Of equal ones those on nodes with few trainers, and then with most to migrate: nodes go as a whole.
        nodes = _node_order(state, tokens, groups) if state.topology.nodes else {}
        self._order = sorted(
            groups,
            key=lambda group: (
                any(slot in rank for slot in group),
                self.generators_now.isdisjoint(group),
                nodes.get(group, ()),
                -tokens.get(group, 0.0),
                at_home.isdisjoint(group),
                -max(rank.get(slot, 0) for slot in group),
                group,
            ),
        )
        self._context = [0.0, *accumulate(context[group] for group in self._order)]
        self.num_external = state.num_external
        sharing = [group for group in groups if not self.trainers_now.isdisjoint(group) and self._generates(group)]
        # A micro-step would stop sequences of these slots: while there are such, the trainer is held, or they are
        # migrated.
        self.shared = bool(sharing) and (
            state.limits.offloads or state.batch.to_start > 0 or any(context[group] for group in sharing)
        )
        self._carried_s = context_transfer(1.0, state.speeds, state.usual_costs).seconds
        self._resize_wait_s, self._patience_s = state.resize_wait_s, state.patience_s
        self._trainers: dict[int, frozenset[int]] = {}
        """The slots that train, by the number of generators."""
        several_turns = any(rollout.num_turns for rollout in state.unfinished)
        self._keeps = state.limits.may_share and not state.batch.to_start and not several_turns

    @property
    def most(self) -> int:
        """Most generators that the slots can hold."""
        return len(self._order)

    @property
    def most_apart(self) -> int:
        """Most generators beside the trainer of now. A slot that lends its device cannot go on generating without the
        trainer: where slots may lend, there are no more than these once it trains again."""
        if not self._state.limits.offloads:
            return self.most
        return sum(self.trainers_now.isdisjoint(group) for group in self._order)

    @property
    def working(self) -> list[InstanceId]:
        """Generators that have or get sequences now."""
        slots = self.generators_now if self.shared else self.generators_now - self.trainers_now
        return generators_on(self._state.instances, slots)

    @property
    def num_generators(self) -> int:
        """Number of generators on these slots that have or get sequences now."""
        return len(self.working) - self.num_external

    def generators(self, count: int) -> frozenset[int]:
        """The slots that only generate, when `count` generators do."""
        return frozenset(slot for group in self._order[:count] for slot in group)

    def trainers(self, count: int) -> frozenset[int]:
        """The slots that train, when `count` generators generate; none where the trainer may not have so few."""
        if count not in self._trainers:
            generators = self.generators(count)
            others = [slot for slot in self._train_order if slot not in generators]
            number = self._sizes.at_most(len(others) + self._num_other_trainers) - self._num_other_trainers
            tp = self._sizes.tp(number + self._num_other_trainers)
            staying = [slot for slot in others if slot in self.trainers_now]
            joining = [slot for slot in others if slot not in self.trainers_now]
            self._trainers[count] = frozenset(chosen(staying, joining, max(0, number), tp, self._state.topology))
        return self._trainers[count]

    def resizes(self, count: int) -> bool:
        return self.trainers(count) != self.trainers_now

    def resize_s(self, count: int) -> float:
        """Seconds of the resize with which `count` generators generate; 0 where there is none."""
        return self._state.resize_s(self.trainers(count)) if self.resizes(count) else 0.0

    def split(self, count: int) -> Mapping[int, tuple[Role, ...]]:
        """Roles with which `count` generators generate and the other slots train. These have nothing to do with what is
        generated: where new sequences may come up, they give their generators up."""
        trainers = self.trainers(count)
        roles: dict[int, tuple[Role, ...]] = dict.fromkeys(self._held, ())
        roles |= dict.fromkeys(self.generators(count), ("generate",)) | dict.fromkeys(trainers, ("train",))
        if self._keeps:
            kept = [group for group in self._order if trainers.issuperset(group) and self._generates(group)]
            roles |= {slot: BOTH for group in kept for slot in group}
        return roles

    def all_generate(self) -> Mapping[int, tuple[Role, ...]]:
        """Roles with which all slots generate; the trainer's slots keep its state beside their generator, and nothing
        is moved for it."""
        return {slot: BOTH if slot in self.trainers_now else ("generate",) for slot in self.generators(self.most)}

    def moved_context(self, count: int) -> float:
        """Context tokens that migrate when `count` generators generate."""
        return self._context[-1] - self._context[count]

    def split_delays_s(self, count: int) -> tuple[float, float]:
        """What `split` costs now, in seconds: of the trainer, and of generation."""
        generators = self._order[:count]
        return_s = self._state.return_s if self._state.lending else 0.0
        resize_s = return_s + self.resize_s(count)
        new = [group for group in generators if not self._generates(group)]
        # A slot that leaves the trainer waits for the resize before it generates.
        stopped = sum(not self.trainers_now.isdisjoint(group) for group in generators)
        left_s = self._resize_wait_s + resize_s
        generate_s = self._joining_s(self._assign_s(new), len(new), count) + self._joining_s(left_s, stopped, count)
        return resize_s, generate_s + self._migrating_s(self.moved_context(count), count)

    def everybody_delays_s(self) -> tuple[float, float]:
        """What `all_generate` costs now, in seconds: of the trainer, and of generation."""
        state, joining = self._state, [group for group in self._order if not self._generates(group)]
        new = len(joining)
        moved = 0.0 if state.batch.to_start else self._context[-1] * new / self.most
        park_s = state.costs.park_s if state.limits.offloads and not state.lending else 0.0
        join_s = self._assign_s(joining) + park_s
        return 0.0, self._joining_s(join_s, new, self.most) + self._migrating_s(moved, new)

    def _assign_s(self, groups: Sequence[Collection[int]]) -> float:
        """Seconds until the last of these groups generates: longer where its node has no weights yet."""
        far = any(not self._state.has_weights_near(group) for group in groups)
        return self._state.costs.between(nodes=far).assign_s

    def _generates(self, group: Collection[int]) -> bool:
        return not self.generators_now.isdisjoint(group)

    def _migrating_s(self, context: float, num_targets: int) -> float:
        """Seconds that migrations cost generation, on average over all sequences: messages stop only those that they
        are about."""
        if not context:
            return 0.0
        num_targets += self.num_external
        return self._state.costs.migration_s * context / self._context[-1] + self._carried_s * context / num_targets

    def _joining_s(self, seconds: float, new: int, count: int) -> float:
        """Seconds that generation loses because `new` of `count` generators come so much later. Before a step's first
        rollout new weights wait for them, and the other generators wait for the weights."""
        share = new / max(1, count + self.num_external)
        if self._state.unfinished or not new:
            return seconds * share
        wait_s = min(seconds, self._patience_s)
        return wait_s + (seconds - wait_s) * share


def _node_order(
    state: ClusterState, tokens: Mapping[tuple[int, ...], float], groups: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[float, ...]]:
    """Return by group where its node comes: those with few trainers first, then those with most tokens to migrate."""
    topology = state.topology
    trainers, left = Counter(map(topology.node, state.trainer.layout.slots)), Counter[int]()
    for group in groups:
        left[topology.node(group[0])] += round(tokens.get(group, 0.0))
    nodes = {group: topology.node(group[0]) for group in groups}
    return {group: (trainers[node], -left[node], node) for group, node in nodes.items()}
