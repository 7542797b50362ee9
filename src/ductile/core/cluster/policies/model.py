"""Move a slot when it shortens what is left, by a prediction from what this run has measured.

1. Lengths seen so far say how many rollouts are left after how many more tokens (`lengths`), measured speeds how long
   that takes on how many generators, and how fast the others train meanwhile (`forecast`).
2. Candidates are numbers of generators, more or fewer than now, each followed by the same sensible future: as the
   rollouts end, generators get fewer. Slots go both ways: at the start of a step train slots generate.
3. A candidate is taken when it ends the work earlier than leaving the roles as they are does, by more than its own cost
   and a margin, and when doing it now is as good as doing it later. Soon after a change, it has to be worth twice that.
4. The slots that move are those with the fewest predicted tokens to hand off; these go to whoever has the least left.

It is asked after events (a micro-step, a rollout that ended, new weights) and never polls. It keeps no state: the same
`ClusterState` gives the same answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ductile.core.cluster.cost import carriage
from ductile.core.cluster.handoff import Remaining, change, length_model, remaining_tokens, spread
from ductile.core.cluster.orders import Decision, Prediction, complaints, sentence
from ductile.core.cluster.placement import Role
from ductile.core.cluster.policies.arrange import Arrangements
from ductile.core.cluster.policies.forecast import NEVER, Plans, Work, forecast, work
from ductile.core.cluster.state import ClusterState

FILLS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Sequences a generator should have at least, in the futures that are compared."""
WAITS = (1, 3, 9)
"""Rounds after which a change might be better than now."""
TRAIN: tuple[Role, ...] = ("train",)
BOTH: tuple[Role, ...] = ("train", "generate")


@dataclass(frozen=True, slots=True)
class Model:
    margin: float = 0.01
    """A move must gain this share of the time that is left, besides more than it costs."""
    patience: float = 4.0
    """Less than this many resizes after a change, the next one must gain twice as much."""

    def decide(self, state: ClusterState) -> Decision:
        if not state.batch.steps_left:
            return Decision()
        if not state.trainer.at_boundary or not state.ready.issuperset(state.trainer.formation.members):
            return Decision(hold_training=state.trainer.held)
        if (recalled := _recall_scorers(state)).orders:
            return recalled
        pool = tuple(slot.slot for slot in state.slots if slot.ready and "score" not in slot.roles)
        todo = work(state, length_model(state))
        if len(pool) < 2:
            return Decision()
        if not todo.to_generate:
            return self._all_train(state, pool, todo)
        remaining = remaining_tokens(state)
        arrangements = Arrangements(state, pool, remaining)
        best = self._best(state, len(pool), todo, arrangements)
        if best is None:
            return _even_out(state, remaining, self.margin)
        count, prediction = best
        return _decision(state, arrangements, count, prediction, remaining)

    def _best(
        self, state: ClusterState, num_slots: int, todo: Work, arrangements: Arrangements
    ) -> tuple[int, Prediction] | None:
        """The change that pays, if one does."""
        now = arrangements.now
        counts = [count for count in _counts(now, num_slots) if count != now and _keeps_floors(state, num_slots, count)]
        if not counts:
            return None
        delays_s = {count: arrangements.delays_s(count) for count in counts}
        fills = [NEVER, *(fill for fill in FILLS if fill <= state.limits.max_num_seqs)]
        # Columns as in `Plans`: generators now; rounds until there are fewer, and how many then; fill; delays.
        never = [(now, 0, now, NEVER, 0.0, 0.0)]
        flexible = [(now, 0, now, fill, 0.0, 0.0) for fill in fills[1:]]
        fewer = [count for count in counts if count < now]
        later = [(now, wait, count, fill, 0.0, 0.0) for count in fewer for wait in WAITS for fill in (NEVER, 4.0)]
        go = [(count, 0, count, fill, *delays_s[count]) for count in counts for fill in fills]
        columns = np.array([*never, *flexible, *later, *go], float).T
        columns[0], columns[2] = np.maximum(columns[0], 1), np.maximum(columns[2], 1)
        finish_s = forecast(state, todo, Plans(*columns), num_slots)
        num_stays = len(never) + len(flexible) + len(later)
        never_s, later_s = float(finish_s[0]), float(finish_s[:num_stays].min())
        if not now:
            never_s = later_s = float("inf")
        by_count = finish_s[num_stays:].reshape(len(counts), len(fills)).min(1)
        chosen = int(np.argmin(by_count))
        count, go_s = counts[chosen], float(by_count[chosen])
        cost_s = sum(delays_s[count])
        # Generators can always get fewer later: doing so now is compared with never, as long as later is not better.
        # Getting more is compared with the best that can be made of what there is. Both together cannot go in circles.
        stay_s = never_s if count < now else later_s
        in_time = go_s <= later_s * (1 + self.margin / 2)
        least_s = cost_s + self.margin * min(stay_s, go_s)
        if _changed_lately(state, self.patience):
            least_s *= 2
        pays = stay_s - go_s > least_s and in_time
        return (count, Prediction(stay_s, go_s, cost_s)) if pays else None

    def _all_train(self, state: ClusterState, pool: Sequence[int], todo: Work) -> Decision:
        """Nothing is left to generate: the rest is trained on all slots, when it is worth the way there and back.

        Generators stay where there is memory for both: the next step finds them there."""
        members = {*state.trainer.formation.members}
        scorers = [slot for slot in state.of("score") if slot in state.ready and not state.batch.to_score]
        idle = [slot for slot in (*pool, *scorers) if slot not in members]
        tokens, speed = todo.ready_tokens + todo.coming_tokens, state.speeds.train
        cost_s = state.costs.resize_s
        stay_s = tokens / speed.of(len(members))
        go_s = cost_s + tokens / speed.of(len(members) + len(idle))
        if not idle or stay_s - go_s <= cost_s + self.margin * stay_s:
            return Decision()
        generators = state.of("generate") if state.limits.may_share else ()
        after: dict[int, tuple[Role, ...]] = {slot: BOTH if slot in generators else TRAIN for slot in idle}
        orders, prediction = change(state, after), Prediction(stay_s, go_s, cost_s)
        why = sentence(orders, "nothing is left to generate", _figures(prediction))
        return Decision(orders, why, prediction=prediction)


def _decision(
    state: ClusterState, arrangements: Arrangements, count: int, prediction: Prediction, remaining: Remaining
) -> Decision:
    roles = arrangements.roles(count)
    orders = change(state, roles)
    if count > arrangements.now and not state.batch.to_start:
        orders = (*orders, *spread(state, sorted(arrangements.generators(count)), remaining))
    nobody_only_trains = all("generate" in held for held in roles.values() if "train" in held)
    return Decision(orders, sentence(orders, _figures(prediction)), nobody_only_trains, prediction)


def _keeps_floors(state: ClusterState, num_slots: int, count: int) -> bool:
    """With `count` generators, enough slots train, or all of the trainer's may share theirs."""
    enough_train = num_slots - count >= max(1, state.limits.min_train)
    return count >= state.limits.min_generate and (enough_train or (count == num_slots and state.limits.may_share))


def _counts(now: int, most: int) -> list[int]:
    """Numbers of generators worth a thought: all of a small cluster; near and far from now of a large one."""
    if most <= 16:
        return list(range(1, most + 1))
    steps = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    near = {now + sign * step for step in steps for sign in (1, -1)}
    return sorted(count for count in near | {most * part // 8 for part in range(1, 9)} | {1} if 1 <= count <= most)


def _even_out(state: ClusterState, remaining: Remaining, margin: float) -> Decision:
    """The same slots, but no generator has much more before it than the others."""
    decode = state.speeds.decode
    generators = [slot.slot for slot in state.slots if slot.ready and "generate" in slot.roles]
    # Where every train slot generates too, a micro-step would stop its sequences: it was found not to be worth that.
    hold = {*state.trainer.formation.members} <= {*generators}
    handoffs = spread(state, generators, remaining) if not state.batch.to_start else ()
    if not handoffs:
        return Decision(hold_training=hold)
    rollouts = {rollout.id: rollout for rollout in state.unfinished}
    before = dict.fromkeys(generators, 0.0)
    for rollout in state.unfinished:
        if rollout.slot in before:
            before[rollout.slot] += remaining[rollout.id]
    after, stall_s = dict(before), dict.fromkeys(generators, 0.0)
    for order in handoffs:
        rollout = rollouts[order.id]
        after[order.source] -= remaining[order.id]
        after[order.target] += remaining[order.id]
        stall_s[order.target] += carriage(rollout.context_tokens, state.speeds, state.costs).seconds
    context = sum(rollout.context_tokens for rollout in state.unfinished) / len(state.unfinished)
    token_s = decode.per_sequence_s + decode.per_context_s * context
    longest_s = decode.step_s * max(remaining.values())
    stay_s, cost_s = longest_s + token_s * max(before.values()), max(stall_s.values()) + state.costs.handoff_s
    go_s = longest_s + token_s * max(after.values()) + cost_s
    if stay_s - go_s <= cost_s + 5 * margin * stay_s:
        return Decision(hold_training=hold)
    prediction = Prediction(stay_s, go_s, cost_s)
    return Decision(handoffs, sentence(handoffs, _figures(prediction)), hold, prediction)


def _changed_lately(state: ClusterState, patience: float) -> bool:
    since_s = max(slot.since_s for slot in state.slots)
    return since_s > 0 and state.now_s - since_s < patience * state.costs.resize_s


def _recall_scorers(state: ClusterState) -> Decision:
    """Slots that score by configuration do so as soon as there is a new batch to generate."""
    if not state.num_to_generate or state.batch.trained:
        return Decision()
    away = [slot for slot in state.home.score if slot in state.ready and "score" not in state.roles(slot)]
    orders = change(state, {slot: state.home.roles(slot) for slot in away})
    if not orders or complaints(state, Decision(orders)):
        return Decision()
    return Decision(orders, sentence(orders, "a new batch begins"))


def _figures(prediction: Prediction) -> str:
    if prediction.stay_s == float("inf"):
        return f"cost {prediction.cost_s:.2g} s, nothing would be generated otherwise"
    return f"cost {prediction.cost_s:.2g} s, expected gain {prediction.gain_s:.2g} s"
