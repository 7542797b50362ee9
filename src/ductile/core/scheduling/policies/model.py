"""Move a slot when it shortens what is left, by a prediction from what this run has measured.

1. Lengths seen so far say how many rollouts are left after how many more tokens (`lengths`), measured speeds how long
   that takes on how many generators, and how fast the others train meanwhile (`forecast`).
2. Candidates: so many generators, and the other slots train, for every number; or all generate and the trainer waits.
   Each is followed to the end of the work, with what may sensibly come after it. Leaving things as they are is followed
   in the same way, and so are the two plain ways to use slots: a split that never changes, and turns (all generate
   until the last rollout ends, then the trainer trains).
3. A candidate is taken when it ends the work earlier than leaving the roles as they are does, its cost counted, by more
   than a margin, and when doing it now is as good as doing it later. Soon after a change, it has to gain twice that.
4. The slots that move are those with the fewest predicted tokens to migrate; these go to the generators with the
   least left. Slots that need not give up a role keep it: a step that generates on all slots and then trains on most
   of them takes migrations, and no resize. Over several nodes, they go node by node, and tp groups stay inside nodes;
   what goes over the network costs more (`SwitchCosts`).

Before anything is measured, a run's first step begins on all slots: there is nothing to train yet.

Where a slot has no memory for two roles, that all generate means that the trainer's slots lend their devices: what
parking its state and taking it back costs is counted (`Arrangements`), nothing is trained meanwhile, and all are given
back at once when training may not wait any more, or has nothing to wait for.

Two permissions say whether training may wait for what train slots generate: `pre_process` until the batch's last part,
`wait_before_last_iter` in it.

It is asked after events (a micro-step, a rollout that ended, new weights) and never polls. It keeps no state: the same
`ClusterState` gives the same decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from ductile.core.instances.instances import slots_on
from ductile.core.instances.placement import Role
from ductile.core.scheduling.costs.arithmetic import EQUAL
from ductile.core.scheduling.costs.cost import context_transfer
from ductile.core.scheduling.costs.train_rates import train_rates
from ductile.core.scheduling.costs.train_sizes import fitted
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.migration_targets import (
    Remaining,
    change,
    generators_on,
    length_model,
    remaining_tokens,
    spread,
)
from ductile.core.scheduling.orders import Decision, Prediction, explained, instances_after, sentence, violations
from ductile.core.scheduling.policies.arrange import Arrangements
from ductile.core.scheduling.policies.forecast import NEVER, Plans, Work, forecast, work

FILLS = (NEVER, 2.0, 8.0, 32.0)
"""Sequences that a generator should have at least, in the futures that are compared."""
LATER = (0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Shares of the rollouts that may be left when a change that is not made now is made."""
TRAIN: tuple[Role, ...] = ("train",)
BOTH: tuple[Role, ...] = ("train", "generate")
ALL = -1
"""Number of generators that stands for all slots, while training waits. `ALL - n`: so many leave the trainer first."""
MOST_APART = 3
"""Numbers of generators that are compared which may leave the trainer first."""
WAITS = "training waits while its slots generate"


@dataclass(frozen=True, slots=True)
class Model:
    margin: float = 0.01
    """A move must gain this share of the time that is left, its cost taken off."""
    caution: float = 0.25
    """A move must gain this share of its cost besides."""
    patience: float = 4.0
    """Time after a change, in resizes, in which the next one must gain twice as much."""
    pre_process: bool = True
    """Train slots may generate, and training wait for it, while more than the batch's last part is left to train."""
    wait_before_last_iter: bool = True
    """Train slots may generate in the batch's last part: before it is trained, training may wait until all slots can
    train it."""

    def decide(self, state: ClusterState) -> Decision:
        is_lending = bool(state.lending)
        if not (state.batch.steps_left or is_lending):
            return Decision()
        if not state.trainer.at_boundary or not state.ready.issuperset(state.trainer.layout.slots):
            return Decision(hold_training=state.trainer.held or is_lending)
        if is_lending and not (state.knows_generation and state.batch.steps_left):
            return _unpark(state) if self._must_give_back(state) else Decision(hold_training=True)
        if not state.knows_generation:
            return self._unmeasured(state)
        if (recalled := _recall_scorers(state)).orders:
            return recalled
        pool = _pool(state)
        lengths = length_model(state)
        todo = work(state, lengths)
        if len(pool) < 2:
            return _unpark(state) if is_lending else Decision()
        if is_lending and not todo.to_generate and not self._must_give_back(state):
            return Decision(hold_training=True, reason=WAITS)
        if not todo.to_generate:
            return self._all_train(state, pool, todo)
        remaining = remaining_tokens(state, lengths)
        arrangements = Arrangements(state, pool, remaining)
        best = self._best(state, len(pool), todo, arrangements)
        if best is None and self._must_give_back(state):
            return _unpark(state)
        if best is None:
            return _even_out(state, arrangements, remaining, self.margin, may_wait=self._may_wait(state))
        count, prediction = best
        return _decision(state, arrangements, count, prediction, remaining)

    def _best(
        self, state: ClusterState, num_slots: int, todo: Work, arrangements: Arrangements
    ) -> tuple[int, Prediction] | None:
        """The change that pays, if one does."""
        now, external = arrangements.num_generators, arrangements.num_external
        least = 0 if external else 1
        counts = [
            count
            for count in _counts(now, least, arrangements.most)
            if not (state.lending and count > arrangements.most_apart)
            and count + external >= state.limits.min_generate
            and len(arrangements.trainers(count)) >= max(1, state.limits.min_train)
        ]
        changes = [count for count in counts if arrangements.shared or count != now or arrangements.resizes(count)]
        rows: list[tuple[float, ...]] = []
        first: dict[int, int] = {}
        # The columns are those of `Plans`.
        trainers = 0 if arrangements.shared else len(arrangements.trainers_now)
        rows += _futures(state, todo, arrangements, counts, (max(1, now + external), trainers), (0.0, 0.0))
        num_stays = len(rows)
        for count in changes:
            first[count] = len(rows)
            delays_s = arrangements.split_delays_s(count)
            first_way = count + external, len(arrangements.trainers(count))
            rows += [(*first_way, np.inf, first_way[0], 0.0, fill, *delays_s) for fill in FILLS]
        more = not arrangements.generators_now.issuperset(arrangements.all_generate())
        if self._may_share(state) and more:
            first[ALL] = len(rows)
            all_generate = arrangements.most + external, 0
            then = [count for count in counts if count <= arrangements.most_apart]
            rows += _futures(state, todo, arrangements, then, all_generate, arrangements.everybody_delays_s())
            for count in _apart_first(state, arrangements, counts):
                first[ALL - count] = len(rows)
                rows += _apart_futures(state, todo, arrangements, counts, count)
        stays = len(rows)
        if ALL in first and trainers:
            kept = max(1, now + external)
            rows += [(kept, trainers, np.inf, kept, 0.0, fill, 0.0, 0.0) for fill in FILLS]
        if not first:
            return None
        finish_s = forecast(state, todo, Plans(*np.array(rows, float).T), num_slots)
        never_s, later_s = float(finish_s[0]), float(finish_s[:num_stays].min())
        # All generating is compared with letting generators end one by one as well: else it would be undone at once.
        fewer_s = float(finish_s[[int(finish_s[:num_stays].argmin()), *range(stays, len(rows))]].min())
        if not now + external or self._must_give_back(state):
            never_s = later_s = fewer_s = float("inf")
        last = dict(zip(first, [*[*first.values()][1:], stays], strict=True))
        best: tuple[int, Prediction] | None = None
        for count, start in first.items():
            go_s = float(finish_s[start : last[count]].min())
            cost_s = fsum(_delays_s(arrangements, count))
            # Generators can always get fewer later: doing so now is compared with never, as long as later is not
            # better. Getting more is compared with the best that can be made of what there is. Both together cannot go
            # in circles.
            stay_s = fewer_s if count <= ALL else never_s if count < now else later_s
            least_s = self.caution * cost_s + self.margin * min(stay_s, go_s)
            if _changed_lately(state, self.patience):
                least_s *= 2
            pays = stay_s - go_s > least_s and go_s <= later_s * (1 + self.margin / 2)
            # Of candidates that are equally good the first one is taken, not the one that rounding favours.
            if pays and (best is None or go_s < best[1].go_s * (1 - EQUAL)):
                best = count, Prediction(stay_s, go_s, cost_s)
        return best

    def _unmeasured(self, state: ClusterState) -> Decision:
        """A decision for when no generator has told how fast it is: a run's first step begins with nothing to train, so
        that all slots generate, where that is permitted."""
        begins = not state.unfinished and state.batch.to_start > len(state.instances_of("generate"))
        if not (begins and self._may_share(state)):
            return Decision(hold_training=state.trainer.held)
        arrangements = Arrangements(state, _pool(state), {})
        orders = change(state, arrangements.all_generate(), arrangements.generators(arrangements.most))
        why = "nothing is measured yet, and there is nothing to train" if orders else WAITS
        return Decision(orders, explained(state, orders, why), hold_training=True, topic="" if orders else WAITS)

    def _may_wait(self, state: ClusterState) -> bool:
        """Return whether training may wait for what train slots generate meanwhile."""
        return self.wait_before_last_iter if state.batch.last_update else self.pre_process

    def _may_share(self, state: ClusterState) -> bool:
        """True where train slots may generate, while training waits: beside the trainer's state, or in its place."""
        may_lend = state.limits.offloads and state.batch.missing > 0 and not state.trainer.wanted
        return self._may_wait(state) and (state.limits.may_share or may_lend)

    def _must_give_back(self, state: ClusterState) -> bool:
        """True where slots lend their devices, and training may not wait for what they generate any more. It waits on
        where the step's next rollouts have not been asked for yet."""
        return bool(state.lending) and not self._may_share(state)

    def _all_train(self, state: ClusterState, pool: Sequence[int], todo: Work) -> Decision:
        """A decision for when nothing is left to generate: the rest is trained on all slots, when it is worth the way
        there and back.

        Generators stay where there is memory for both: the next step finds them there.
        """
        trainers = {*state.trainer.layout.slots}
        whole = [each for each in state.instances_of("score") if state.ready.issuperset(each.slots)]
        scorers = slots_on(whole) if state.batch.all_scored else ()
        generators = state.of("generate") if state.limits.may_share else ()
        idle = [slot for slot in (*pool, *scorers) if slot not in trainers]
        after = fitted(state, {slot: BOTH if slot in generators else TRAIN for slot in idle})
        back: dict[int, tuple[Role, ...]] = dict.fromkeys(state.lending, TRAIN)
        tokens, rates = todo.ready_tokens + todo.coming_tokens, train_rates(state)
        cost_s = state.resize_s(after)
        back_s = cost_s if state.batch.steps_left > 1 else 0.0
        stay_s = tokens / rates.tokens_per_s_on(len(trainers))
        go_s = cost_s + tokens / rates.tokens_per_s_on(len(trainers) + len(after))
        if not after or stay_s - go_s <= back_s + self.caution * cost_s + self.margin * stay_s:
            return _unpark(state) if back else Decision()
        orders, prediction = change(state, back | after), Prediction(stay_s, go_s, cost_s)
        why = explained(state, orders, "nothing is left to generate", _figures(prediction))
        return Decision(orders, why, prediction=prediction)


def _apart_first(state: ClusterState, arrangements: Arrangements, counts: Sequence[int]) -> list[int]:
    """Numbers of generators that may leave the trainer before its devices are lent. A slot that lends cannot go on
    generating when the others train again: where all slots train as a step begins, some leave the trainer for that."""
    begins = state.limits.offloads and not state.unfinished and state.batch.to_start > 0
    return [count for count in counts if count > arrangements.most_apart][:MOST_APART] if begins else []


def _apart_futures(
    state: ClusterState, todo: Work, arrangements: Arrangements, counts: Sequence[int], apart: int
) -> list[tuple[float, ...]]:
    """Rows of `Plans`: `apart` generators leave the trainer, then the others' devices are lent, too, until it is time
    for a change."""
    everybody, delays_s = (arrangements.most + arrangements.num_external, 0), _delays_s(arrangements, ALL - apart)
    rows: list[tuple[float, ...]] = [(*everybody, -1.0, everybody[0], 0.0, NEVER, *delays_s)]
    for count in counts:
        if count <= apart:
            then = count + arrangements.num_external
            resize_s = state.return_s + (arrangements.resize_s(count) if count < apart else 0.0)
            rows += [(*everybody, share * todo.to_generate, then, resize_s, NEVER, *delays_s) for share in LATER]
    return rows


def _delays_s(arrangements: Arrangements, count: int) -> tuple[float, float]:
    """Costs of a candidate now, in seconds: of the trainer, and of generation."""
    if count == ALL:
        return arrangements.everybody_delays_s()
    if count > ALL:
        return arrangements.split_delays_s(count)
    both = (arrangements.split_delays_s(ALL - count), arrangements.everybody_delays_s())
    return 0.0, fsum(generate_s for _, generate_s in both)


def _futures(
    state: ClusterState,
    todo: Work,
    arrangements: Arrangements,
    counts: Sequence[int],
    now: tuple[int, int],
    delays_s: tuple[float, float],
) -> list[tuple[float, ...]]:
    """Rows of `Plans`: so many generate and train now, for good (the first row) or until it is time for a change."""
    generators, trainers = now
    # A trainer that waits has its state to take back first, if its slots lend their devices.
    return_s = 0.0 if trainers else state.return_s
    rows: list[tuple[float, ...]] = [(generators, trainers, -1.0, generators, 0.0, NEVER, *delays_s)]
    for count in counts:
        if (then := count + arrangements.num_external) < generators:
            resize_s = return_s + arrangements.resize_s(count)
            rows += [
                (generators, trainers, share * todo.to_generate, then, resize_s, NEVER, *delays_s) for share in LATER
            ]
    return rows


def _decision(
    state: ClusterState, arrangements: Arrangements, count: int, prediction: Prediction, remaining: Remaining
) -> Decision:
    if count < ALL:  # the devices of the others are lent by the next decision
        count = ALL - count
        roles, pauses = arrangements.split(count), True
    elif count == ALL:
        count, roles = arrangements.most, arrangements.all_generate()
        pauses = state.batch.missing > 0
    else:
        roles = arrangements.split(count)
        # A trainer that waits goes on waiting until it has its new slots: a micro-step would only delay them.
        pauses = state.trainer.held and arrangements.resizes(count)
    generators = arrangements.generators(count)
    orders = change(state, roles, generators)
    if count > arrangements.num_generators and not state.batch.to_start:
        there = generators_on(instances_after(state, Decision(orders)), generators)
        orders = (*orders, *spread(state, there, remaining))
    alone = "" if orders else WAITS if pauses else "training goes on"
    reason = explained(state, orders, alone, _figures(prediction))
    return Decision(orders, reason, pauses, prediction, topic=alone)


def _unpark(state: ClusterState) -> Decision:
    """A decision that gives lent devices back to the trainer, which goes on as it was; or that waits, where rollouts
    would have nowhere to go."""
    wait = Decision(hold_training=True, reason=WAITS)
    lending = {*state.lending}
    apart = [each.id for each in state.instances_of("generate") if lending.isdisjoint(each.slots)]
    if state.unfinished and not apart:
        return wait
    orders = change(state, dict.fromkeys(sorted(lending), TRAIN))
    why = "training goes on" if state.num_to_generate else "nothing is left to generate"
    decision = Decision(orders, explained(state, orders, why))
    return wait if violations(state, decision) else decision


def _pool(state: ClusterState) -> tuple[int, ...]:
    """Slots that may be ordered about and do not score. A generator is among them as a whole or not at all."""
    free = {slot.slot for slot in state.slots if slot.ready and "score" not in slot.roles}
    busy = slots_on(each for each in state.instances_of("generate") if not free.issuperset(each.slots))
    return tuple(sorted(free.difference(busy)))


def _counts(now: int, least: int, most: int) -> list[int]:
    """Numbers of generators worth a thought: all of a small cluster; near and far from now of a large one."""
    if most <= 16:
        return list(range(least, most + 1))
    steps = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    near = {now + sign * step for step in steps for sign in (1, -1)}
    far = {least, 1, *(most * part // 8 for part in range(1, 9))}
    return sorted(count for count in near | far if least <= count <= most)


def _even_out(
    state: ClusterState, arrangements: Arrangements, remaining: Remaining, margin: float, *, may_wait: bool
) -> Decision:
    """A decision that leaves the roles as they are and evens out what generators have before them, where that pays."""
    decode = state.speeds.decode
    # Where train slots generate too, a micro-step would stop their sequences: it was found not to be worth that.
    pauses = may_wait and arrangements.shared and state.batch.missing > 0
    stay = Decision(reason=WAITS if pauses else "", hold_training=pauses)
    generators = arrangements.working
    before = {name: arrangements.tokens_left[name] for name in generators}
    if state.batch.to_start or not before:
        return stay
    context = arrangements.moved_context(0) / len(state.unfinished)
    token_s = decode.per_sequence_s + decode.per_context_s * context
    longest_s = decode.step_s * max(remaining.values())
    stay_s, even = longest_s + token_s * max(before.values()), fsum(before.values()) / len(before)
    # The fullest generator cannot get below the average. Most often that does not pay, and no spread need be found.
    if token_s * (max(before.values()) - even) < state.costs.migration_s + 5 * margin * stay_s:
        return stay
    migrations = spread(state, generators, remaining)
    if not migrations:
        return stay
    rollouts = {rollout.id: rollout for rollout in state.unfinished}
    after, stall_s = dict(before), dict.fromkeys(generators, 0.0)
    for order in migrations:
        rollout = rollouts[order.id]
        after[order.source] -= remaining[order.id]
        after[order.target] += remaining[order.id]
        stall_s[order.target] += context_transfer(rollout.context_tokens, state.speeds, state.costs).seconds
    cost_s = max(stall_s.values()) + state.costs.migration_s
    go_s = longest_s + token_s * max(after.values()) + cost_s
    if stay_s - go_s <= cost_s + 5 * margin * stay_s:
        return stay
    prediction = Prediction(stay_s, go_s, cost_s)
    return Decision(migrations, sentence(migrations, _figures(prediction)), pauses, prediction)


def _changed_lately(state: ClusterState, patience: float) -> bool:
    since_s = max(slot.since_s for slot in state.slots)
    return since_s > 0 and state.now_s - since_s < patience * state.costs.resize_s


def _recall_scorers(state: ClusterState) -> Decision:
    """Slots that score by configuration do so as soon as there is a new batch to generate; and whenever something
    waits for a score and none of them would give it one, as when a short batch was generated while they were away."""
    if state.lending:
        return Decision()  # first the trainer gets its devices back
    unscored = state.batch.to_score > 0 and not state.of("score")
    if not unscored and not (state.num_to_generate and state.step_begins):
        return Decision()
    whole = [slot for group in state.scorer_groups if state.ready.issuperset(group) for slot in group]
    away = [slot for slot in whole if "score" not in state.roles(slot)]
    orders = change(state, {slot: state.home.roles(slot) for slot in away})
    if away and violations(state, Decision(orders)):
        # The trainer may have no layout on the slots that are left: it goes back to those that it has at home.
        joined = state.ready.intersection(state.trainer.layout.slots).difference(state.home.train)
        orders = change(state, {slot: state.home.roles(slot) for slot in sorted(joined.union(away))})
    if not orders or violations(state, Decision(orders)):
        return Decision()
    why = "rollouts wait for their scores" if unscored else "a new batch begins"
    return Decision(orders, explained(state, orders, why))


def _figures(prediction: Prediction) -> str:
    if prediction.stay_s == float("inf"):
        return f"cost {prediction.cost_s:.2g} s, nothing would go on otherwise"
    return f"cost {prediction.cost_s:.2g} s, net gain {prediction.gain_s:.2g} s"
