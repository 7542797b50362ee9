"""When will all the work in sight be done, if the slots are used like this?

Rollouts are followed as a population: how many have how many tokens by now. Each round, every rollout under way gets
the same few tokens more; of those, the share that `Survival` says ends, and each makes room for one that has not
started. The seconds of a round follow from how many sequences a generator has, and from the measured speeds. What ends
is trained on, as soon as its group is whole, by the slots that train meanwhile. When nothing is left to generate, all
slots train what is left.

Many plans are followed at once, as rows of arrays; a decision takes milliseconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.scheduling.costs.arithmetic import (
    FloatArray,
    chance_of_any,
    dot,
    interpolate,
    mixed_power,
    ordered_sum,
)
from ductile.core.scheduling.costs.cost import context_transfer
from ductile.core.scheduling.costs.train_rates import TrainRates, train_rates
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.facts.length_estimates import Survival, histogram

NUM_AGES = 48
NEVER = 0
"""Value of `Plans.fill` with which generators stay as they are until the last rollout ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What is left to do, from a state: generation as a population, training in tokens."""

    ages: FloatArray
    """[NUM_AGES] rollouts under way, by tokens so far."""
    unstarted: float
    round_tokens: float
    """Tokens that every sequence gets in a round: the width of an age."""
    go_on: FloatArray
    """[NUM_AGES] the share of an age that goes on to the next."""
    members: float
    """Unfinished rollouts of an unfinished group, on average."""
    ready_tokens: float
    """Tokens that the trainer could have at once."""
    coming_tokens: float
    """Further tokens that the trainer will have when everything under way and unstarted is finished."""
    longest_tokens: float
    """Tokens of the sample that will be the longest of those to come: one slot has to train it, while others may
    wait."""
    batch_tokens: float
    """Tokens of a whole step's samples."""
    prompt_tokens: float
    sample_tokens: float
    """Tokens of a prompt and its completion, on average."""

    @property
    def to_generate(self) -> float:
        return float(ordered_sum(self.ages)) + self.unstarted


def work(state: ClusterState, lengths: Survival) -> Work:
    """The work in sight: this step's, and what the staleness bound already admits of the next ones."""
    batch = state.batch
    width = state.max_tokens / NUM_AGES
    edges = width * np.arange(NUM_AGES + 1, dtype=np.float64)
    alive = lengths.more_than(edges)
    generated = np.array([rollout.generated for rollout in state.unfinished], float)
    ages = histogram(generated, edges)
    go_on = np.where(alive[:-1] > 1e-12, alive[1:] / np.maximum(alive[:-1], 1e-12), 0.0)
    prompts = [rollout.prompt_tokens for rollout in state.unfinished]
    prompt = state.lengths.prompt_mean or (sum(prompts) / len(prompts) if prompts else 0.0)
    under_way = float(ordered_sum(generated) + ordered_sum(lengths.remaining(generated))) + prompt * len(generated)
    longest = float((generated + lengths.remaining(generated)).max()) if len(generated) else 0.0
    if batch.to_start:
        # The length that one of so many is expected to exceed.
        longest = max(longest, float(interpolate(np.array(-1 / batch.to_start), -lengths.alive, lengths.edges)))
    groups = len({rollout.group for rollout in state.unfinished}) + batch.to_start / max(1, batch.group_size)
    return Work(
        ages=ages,
        unstarted=float(batch.to_start),
        round_tokens=width,
        go_on=go_on,
        members=max(1.0, state.num_to_generate / groups) if groups else 1.0,
        ready_tokens=float(batch.ready_tokens + batch.to_score_tokens),
        coming_tokens=batch.partial_tokens + under_way + batch.to_start * (prompt + lengths.mean()),
        longest_tokens=prompt + longest,
        batch_tokens=batch.num_rollouts * (prompt + lengths.mean()),
        prompt_tokens=prompt,
        sample_tokens=prompt + lengths.mean(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Plans:
    """Ways to use the slots from now on, one a row: first in one way, and then in another."""

    generators: FloatArray
    """Generators in the first way, external servers among them."""
    trainers: FloatArray
    """Slots that train in the first way; 0 while the trainer is held."""
    until: FloatArray
    """Rollouts that are left when the first way ends; negative when it never does."""
    then: FloatArray
    """Generators in the second way; the slots of no generator train."""
    resize_s: FloatArray
    """Seconds that resizing the trainer for the second way takes."""
    fill: FloatArray
    """Sequences that a generator should have in the second way: with fewer on average, there are fewer generators; or
    `NEVER`."""
    delay_train_s: FloatArray
    """Seconds until the trainer can go on: what resizing costs now."""
    delay_generate_s: FloatArray
    """Seconds added to generation: taking in what migrates, and new generators that are not there yet."""


def forecast(state: ClusterState, todo: Work, plans: Plans, num_slots: int) -> FloatArray:
    """Seconds from now until all is generated and trained on `num_slots` slots, by plan."""
    speeds, full, rates = state.speeds, float(state.limits.max_num_seqs), train_rates(state)
    num_plans = len(plans.generators)
    size, external = state.limits.slots_per_generator, state.num_external
    resize_s = state.resize_s(slot.slot for slot in state.slots)
    stage = _Stage(plans.generators.copy(), plans.trainers.copy(), plans.until < 0, num_slots, size, external, resize_s)
    # While none is left to start, all plans have the same rollouts under way, which are followed once then.
    ages = np.repeat(todo.ages[None], num_plans if todo.unstarted else 1, 0)
    unstarted = np.full(num_plans, todo.unstarted)
    now_s, busy_s, stalled_s = np.zeros(num_plans), plans.delay_train_s.copy(), plans.delay_generate_s.copy()
    # What is ready counts as taken: the trainer has begun with it, or would now.
    taken, trained, total = np.full(num_plans, todo.ready_tokens), np.zeros(num_plans), todo.to_generate
    mean_age = (np.arange(NUM_AGES, dtype=np.float64) + 0.5) * todo.round_tokens + todo.prompt_tokens
    carried_s = context_transfer(1.0, speeds, state.usual_costs).seconds
    num_rounds = 0
    while total > 0:
        running = ordered_sum(ages)
        left = running + unstarted
        context = dot(ages, mean_age)
        moved, paused_s = stage.advance(state, plans, left)
        stalled_s += context * moved * carried_s / stage.generators + moved * state.costs.migration_s
        busy_s += paused_s
        started = np.minimum(np.maximum(0.0, stage.generators * full - running), unstarted)
        if todo.unstarted:
            ages[:, 0] += started
        unstarted -= started
        running = running + started
        generated = left < 0.02
        if num_rounds > 40 * NUM_AGES or generated.all():
            break
        if num_rounds % 8 == 0 and generated.any():
            # Plans that still generate when others are long done need not be followed to their end.
            done_s = now_s + busy_s + _rest_s(state, todo, rates, trained, stage)
            if (now_s > 1.5 * done_s[generated].min())[~generated].all():
                break
        each = np.maximum(running / stage.generators, 1.0)
        token_s = speeds.decode.seconds(each, context / stage.generators)
        # Once fewer than one is expected to be left, a round counts as much as it is likely to happen.
        seconds = todo.round_tokens * token_s * chance_of_any(left)
        # Over-full generators take turns.
        seconds *= np.maximum(1.0, running / (stage.generators * full))
        seconds += started * todo.prompt_tokens / speeds.prefill_tokens_per_s / stage.generators
        # Others train while generators take in what has migrated.
        seconds += stalled_s
        stalled_s = np.zeros(num_plans)
        taken = _taken(state, todo, taken, left / total, rates.num_micro_batches(stage.trainers))
        tokens = np.maximum(0.0, seconds - busy_s) * _tokens_per_s(state, todo, rates, stage.trainers)
        trained += np.minimum(np.maximum(0.0, tokens), np.maximum(0.0, taken - trained))
        busy_s = np.maximum(0.0, busy_s - seconds)
        now_s += seconds
        going_on = ages * todo.go_on
        ages[:, 1:] = going_on[:, :-1]
        ages[:, 0] = 0.0
        num_rounds += 1
    return now_s + busy_s + _rest_s(state, todo, rates, trained, stage)


def _rest_s(state: ClusterState, todo: Work, rates: TrainRates, trained: FloatArray, stage: "_Stage") -> FloatArray:
    """Seconds that training takes when nothing is left to generate, by plan: the trainer goes on as it is, or takes all
    slots, if that is worth the way there and, when there is another step, back."""
    trainers, num_slots = stage.trainers, stage.num_slots
    rest = np.maximum(0.0, todo.ready_tokens + todo.coming_tokens - trained)
    # A trainer that was held trains on the slots that it has.
    stay = np.where(trainers > 0, trainers, float(len(state.trainer.layout.slots)))
    way_s = stage.resize_s * (2 if state.batch.steps_left > 1 else 1)
    longest = np.where(rest > 0, todo.longest_tokens, 0.0)

    def seconds(slots: FloatArray) -> FloatArray:
        whole = longest * rates.num_ranks(slots) / rates.tokens_per_s(slots)
        return np.maximum(rest / _tokens_per_s(state, todo, rates, slots), whole)

    most = np.full_like(stay, float(num_slots))
    # So does one that waits for its state, if its slots lend their devices.
    return_s = np.where(trainers > 0, 0.0, state.return_s)
    return return_s + np.minimum(seconds(stay), seconds(most) + np.where(stay < most, way_s, 0.0))


@dataclass(slots=True, eq=False)
class _Stage:
    """How many generators there are and how many slots train in this round, by plan."""

    generators: FloatArray
    trainers: FloatArray
    second: npt.NDArray[np.bool_]
    num_slots: int
    size: int
    """Slots of a generator."""
    external: int
    """Generators that are on no slot."""
    resize_s: float
    """Seconds of a resize onto any of the slots."""

    def advance(self, state: ClusterState, plans: Plans, left: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Go on to the round in which so many rollouts are left. Returns the share of contexts that migrate, and
        for how long the trainer pauses."""
        before, paused_s = self.generators, np.zeros_like(left)
        change = ~self.second & (left <= plans.until)
        # A slot that joins a trainer at work waits for the end of a micro-step, on average for half of it.
        now = state.trainer.layout
        tokens = state.trainer.seq_len * PipelineShape.of(now).full_message
        lag_s = state.speeds.train.seconds(tokens, 1, now.dims.rank_shape) / 2
        if change.any():
            paused_s += np.where(change, plans.resize_s + lag_s * (self.trainers > 0) * (plans.resize_s > 0), 0.0)
            self.generators = np.where(change, plans.then, self.generators)
            self.trainers = np.where(change, self._others(plans.then), self.trainers)
            self.second = self.second | change
        fewer = self._fewer(plans, left)
        if fewer is not None:
            released = self.generators - fewer
            paused_s += (self.resize_s + lag_s * self.size * released / self.num_slots) * (released > 0)
            self.generators, self.trainers = fewer, np.where(released > 0, self._others(fewer), self.trainers)
        return np.maximum(0.0, before - self.generators) / before, paused_s

    def _others(self, generators: FloatArray) -> FloatArray:
        """Slots of none of so many generators."""
        return self.num_slots - self.size * (generators - self.external)

    def _fewer(self, plans: Plans, left: FloatArray) -> FloatArray | None:
        """Generators by plan after releases in this round; None when there are none. Only a quarter fewer at once is
        worth a resize."""
        wanted = np.maximum(float(max(1, self.external)), np.ceil(left / np.maximum(plans.fill, 1.0)))
        may = (plans.fill != NEVER) & self.second & (wanted <= 0.75 * self.generators)
        return np.where(may, wanted, self.generators) if may.any() else None


def _taken(
    state: ClusterState, todo: Work, taken: FloatArray, share_left: FloatArray, num_micro_batches: FloatArray
) -> FloatArray:
    """Tokens that the trainer has taken by now, of those whose groups are whole."""
    whole = mixed_power(np.minimum(np.maximum(0.0, 1.0 - share_left), 1.0), todo.members)
    there = todo.ready_tokens + todo.coming_tokens * whole
    # It takes all there is, but not before there is a message of full micro-batches, or a quarter of the update with a
    # sample for each micro-batch: on average, half of that waits.
    quarter = np.maximum(todo.batch_tokens / (4 * state.batch.num_updates), num_micro_batches * todo.sample_tokens)
    enough = np.minimum(num_micro_batches * state.trainer.seq_len, quarter)
    return np.maximum(taken, there - enough / 2)


def _tokens_per_s(state: ClusterState, todo: Work, rates: TrainRates, slots: FloatArray) -> FloatArray:
    """Tokens that a trainer of so many slots takes per second. Its micro-batches have room left that is too small for
    another sample, and each message of them costs something."""
    per_s, num_micro_batches = rates.tokens_per_s(slots), rates.num_micro_batches(slots)
    seq_len = float(state.trainer.seq_len)
    filled = max(seq_len / 2, seq_len - todo.sample_tokens / 2)
    micro_step_s = seq_len * num_micro_batches / np.maximum(per_s, 1e-12) + state.speeds.train.micro_step_s
    return np.where(per_s > 0, filled * num_micro_batches / np.maximum(micro_step_s, 1e-12), 0.0)
