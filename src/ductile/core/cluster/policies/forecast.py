"""When will all the work in sight be done, if the slots are used like this?

Rollouts are followed as a population: how many have how many tokens by now. Each round, everybody under way gets the
same few tokens more; of those, the share that `Survival` says ends; whoever ends makes room for one that has not
started. The seconds of a round follow from how many sequences a generator has, and from the measured speeds. What ends
is trained on, as soon as its group is whole, by the slots that train meanwhile. When nothing is left to generate, all
slots train what is left.

Many plans are followed at once, as rows of arrays; a decision takes milliseconds.
"""

from dataclasses import dataclass

import numpy as np

from ductile.core.cluster.lengths import Floats, Survival, histogram
from ductile.core.cluster.state import ClusterState

NUM_AGES = 48
NEVER = 0
"""As `Plans.fill`: generators stay as they are until the last rollout ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What is left to do, from a state: generation as a population, training in tokens."""

    ages: Floats
    """[NUM_AGES] rollouts under way, by tokens so far."""
    unstarted: float
    round_tokens: float
    """Tokens that everybody gets in a round: the width of an age."""
    go_on: Floats
    """[NUM_AGES] the share of an age that goes on to the next."""
    members: float
    """Unfinished rollouts of an unfinished group, on average."""
    ready_tokens: float
    """That the trainer could have at once."""
    coming_tokens: float
    """That it will have when everything under way and unstarted is finished."""
    longest_tokens: float
    """Of the sample that will be the longest of those to come: one slot has to train it, while others may wait."""
    batch_tokens: float
    """Of a whole step."""
    prompt_tokens: float

    @property
    def to_generate(self) -> float:
        return float(self.ages.sum()) + self.unstarted


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
    under_way = float(generated.sum() + lengths.remaining(generated).sum()) + prompt * len(generated)
    longest = float((generated + lengths.remaining(generated)).max()) if len(generated) else 0.0
    if batch.to_start:
        longest = max(longest, float(np.interp(-1 / batch.to_start, -lengths.alive, lengths.edges)))
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
    )


@dataclass(frozen=True, slots=True, eq=False)
class Plans:
    """Ways to use the slots from now on, one a row."""

    generators: Floats
    """Slots that generate at first; the others train."""
    hold_rounds: Floats
    """Rounds in which nothing changes."""
    then: Floats
    """After which there are so many generators, or fewer."""
    fill: Floats
    """A generator with fewer sequences than this, on average, makes the generators fewer: `NEVER`, 1, 2, 4 ..."""
    delay_train_s: Floats
    """Until the trainer can go on: what resizing costs now."""
    delay_generate_s: Floats
    """Added to generation: prefill of what is handed off, and new generators that are not there yet."""


def forecast(state: ClusterState, todo: Work, plans: Plans, num_slots: int) -> Floats:
    """By plan: seconds from now until all is generated and trained, on `num_slots` slots that do one or the other."""
    speeds, costs, full = state.speeds, state.costs, float(state.limits.max_num_seqs)
    num_plans = len(plans.generators)
    generators = plans.generators.copy()
    ages = np.repeat(todo.ages[None], num_plans, 0)
    unstarted = np.full(num_plans, todo.unstarted)
    now_s, busy_s = plans.delay_generate_s.copy(), plans.delay_train_s.copy()
    trained, total = np.zeros(num_plans), todo.to_generate
    # Who joins the trainer waits for the end of a micro-step, on average for half of it.
    lag_s = speeds.train.seconds(state.trainer.seq_len, 1) / 2
    mean_age = (np.arange(NUM_AGES) + 0.5) * todo.round_tokens + todo.prompt_tokens
    num_rounds = 0
    while total > 0:
        room = np.maximum(0.0, generators * full - ages.sum(1))
        started = np.minimum(room, unstarted)
        ages[:, 0] += started
        unstarted -= started
        running = ages.sum(1)
        left = running + unstarted
        if num_rounds > 40 * NUM_AGES or float(left.max()) < 0.02:
            break
        each = np.maximum(running / generators, 1.0)
        context = (ages @ mean_age) / generators
        token_s = speeds.decode.seconds(each, context)
        # Once fewer than one is expected to be left, a round counts as much as it is likely to happen.
        seconds = todo.round_tokens * token_s * -np.expm1(-left)
        # Over-full generators take turns.
        seconds *= np.maximum(1.0, running / (generators * full))
        seconds += started * todo.prompt_tokens / speeds.prefill_tokens_per_s / generators
        trained += _trained(state, todo, trained, left / total, seconds, busy_s, num_slots - generators)
        busy_s = np.maximum(0.0, busy_s - seconds)
        now_s += seconds
        going_on = ages * todo.go_on
        ages[:, 1:] = going_on[:, :-1]
        ages[:, 0] = 0.0
        num_rounds += 1
        fewer = _fewer(plans, generators, ages.sum(1) + unstarted, num_rounds)
        released = generators - fewer
        busy_s += costs.resize_s * (released > 0) + lag_s * (generators < num_slots) * released / num_slots
        # What they leave unfinished is prefilled again elsewhere.
        now_s += (ages @ mean_age) * released / generators / speeds.prefill_tokens_per_s / fewer
        generators = fewer
    rest = np.maximum(0.0, todo.ready_tokens + todo.coming_tokens - trained)
    resized = (generators > 0) & (rest > 0) & (total > 0)
    rest_s = np.maximum(rest / speeds.train.of(num_slots), speeds.train.seconds(todo.longest_tokens, num_slots))
    rest_s = np.where(rest > 0, rest_s, 0.0)
    waits_s = lag_s * (generators < num_slots) * generators / num_slots
    return now_s + busy_s + (costs.resize_s + waits_s) * resized + rest_s


def _trained(
    state: ClusterState,
    todo: Work,
    trained: Floats,
    share_left: Floats,
    seconds: Floats,
    busy_s: Floats,
    train_slots: Floats,
) -> Floats:
    """Tokens that a round adds, of those whose groups are whole."""
    whole = np.clip(1.0 - share_left, 0.0, 1.0) ** todo.members
    available = todo.ready_tokens + todo.coming_tokens * whole - trained
    # The trainer takes nothing before it has a full micro-batch for every slot, or a quarter of the batch.
    enough = np.minimum(train_slots * state.trainer.seq_len, todo.batch_tokens / 4)
    available = np.where(available >= np.maximum(1.0, enough), available, 0.0)
    return np.clip(
        np.maximum(0.0, seconds - busy_s) * state.speeds.train.of(train_slots), 0.0, np.maximum(0.0, available)
    )


def _fewer(plans: Plans, generators: Floats, left: Floats, num_rounds: int) -> Floats:
    """The generators of the next round. After `then`, only a quarter fewer at once is worth a resize."""
    capped = np.where(num_rounds > plans.hold_rounds, np.minimum(generators, plans.then), generators)
    wanted = np.maximum(1.0, np.ceil(left / np.maximum(plans.fill, 1.0)))
    may = (plans.fill != NEVER) & (num_rounds > plans.hold_rounds) & (wanted <= 0.75 * capped)
    return np.where(may, wanted, capped)
