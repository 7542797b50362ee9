"""Policies that move slots everywhere: what a test of the moving needs, and nobody else."""

import os
import random
from dataclasses import replace

from ductile.core.instances.placement import Role
from ductile.core.scheduling.costs.cost import DecodeSpeed, SwitchCosts, TrainSpeed
from ductile.core.scheduling.migration_targets import change
from ductile.core.scheduling.orders import Decision, Migration, sentence, violations
from ductile.core.scheduling.policies.model import Model

Roles = tuple[Role, ...]
T: Roles = ("train",)
G: Roles = ("generate",)
S: Roles = ("score",)
B: Roles = ("train", "generate")


class EverywhereInTurn:
    """Of slots 0 (train), 1-2 (generate) and 3 (score). In the last step they stay, so that no change is under way at
    the end."""

    def decide(self, state):
        batch = state.batch
        if batch.steps_left < 2:
            return Decision()
        if batch.step % 2 == 0:
            # The train slot is lent until completions end; then a generator comes to the trainer, while it works.
            ended = batch.trained + batch.ready + batch.to_score + batch.partial > 0
            busy = any(state.num_running[each.id] for each in state.instances_of("generate") if 2 in each.slots)
            roles = {0: T, 1: G, 2: T, 3: S} if ended and busy else {0: B, 1: G, 2: G, 3: S}
            if state.roles(2) == T:
                return Decision()
        else:
            # A generator scores; then the first train slot generates and another one trains for it.
            roles = {0: T, 1: G, 2: S, 3: S} if not batch.trained else {0: G, 1: T, 2: S, 3: S}
        roles = {slot: held for slot, held in roles.items() if held != state.roles(slot)}
        if not roles:
            return Decision()
        # Held, or there may be no instant between two micro-steps at which it is asked.
        if not state.trainer.at_boundary or not roles.keys() <= state.ready:
            return Decision(hold_training=True)
        orders = change(state, roles)
        return Decision(orders, sentence(orders, f"step {batch.step}"))


class Restless:
    """Whenever it is asked, it sends the slots somewhere else, with caches or without: any way that can be carried out,
    drawn by RESTLESS_SEED."""

    def __init__(self):
        self._chance = random.Random(int(os.environ.get("RESTLESS_SEED", "0")))

    def decide(self, state):
        for _ in range(20):
            roles = {slot: self._chance.choice((T, T, G, G, B, S)) for slot in sorted(state.ready)}
            if not any(
                "generate" in held for held in ({slot.slot: slot.roles for slot in state.slots} | roles).values()
            ):
                continue
            orders = tuple(
                replace(order, with_cache=self._chance.random() < 0.5) if isinstance(order, Migration) else order
                for order in change(state, roles)
            )
            decision = Decision(orders, sentence(orders, "restless")) if orders else Decision()
            if orders and not violations(state, decision):
                return decision
        return Decision()


class Keen:
    """`model`, told that work takes long and changes cost nothing: in a run as small as a test's none would pay."""

    def decide(self, state):
        speeds = replace(state.speeds, decode=DecodeSpeed(0.005, 0.005), train=TrainSpeed(200.0))
        return Model().decide(replace(state, speeds=speeds, costs=SwitchCosts()))


class OnceAStep:
    """Of four slots. It moves once in each step, when as many of its rollouts as it drew are finished, or are trained:
    one slot each trains, generates and scores, and one does either of the first two, or both. By RESTLESS_SEED."""

    def __init__(self):
        self._chance = random.Random(int(os.environ.get("RESTLESS_SEED", "0")))
        self._step = -1
        self._due = 0
        self._while_generating = False

    def decide(self, state):
        batch = state.batch
        if not batch.num_rollouts:
            return Decision()
        if batch.step > self._step:
            self._step, self._due = batch.step, self._chance.randrange(1, batch.num_rollouts)
            self._while_generating = self._chance.random() < 0.5
        finished = batch.trained + batch.ready + batch.to_score + batch.partial
        if (finished if self._while_generating else batch.trained) < self._due:
            return Decision()
        if not state.trainer.at_boundary or len(state.ready) < len(state.slots):
            return Decision(hold_training=True)
        self._due = batch.num_rollouts + 1
        slots = sorted(state.ready)
        roles = zip(self._chance.sample(slots, len(slots)), (T, G, S, self._chance.choice((T, G, B))), strict=True)
        orders = tuple(
            replace(order, with_cache=self._chance.random() < 0.5) if isinstance(order, Migration) else order
            for order in change(state, dict(roles))
        )
        return Decision(orders, sentence(orders, f"{batch.trained} rollouts are trained")) if orders else Decision()


class ThroughLayouts:
    """Of four slots, of which the first trains as configured, in a run on-policy. Each step begins so. Once all of its
    rollouts are generated and scored, two, three or four slots train them, in turns from step to step, and another
    number as soon as some are trained."""

    def decide(self, state):
        batch, home = state.batch, {slot: state.home.roles(slot) for slot in state.home.slots}
        hold = not batch.trained and bool(batch.missing or batch.unscored)
        others = state.num_to_generate or batch.to_score  # of an evaluation, or of the next step
        at_home = hold or others or not batch.num_rollouts or not batch.steps_left
        num = 1 if at_home else 2 + (batch.step + bool(batch.trained)) % 3
        roles = {slot: T if slot < num else held for slot, held in home.items()}
        if all(state.roles(slot) == held for slot, held in roles.items()):
            return Decision(hold_training=hold)
        if not state.trainer.at_boundary or not roles.keys() <= state.ready:
            return Decision(hold_training=True)
        orders = change(state, roles)
        return Decision(orders, sentence(orders, f"{batch.trained} rollouts are trained"), hold_training=hold)


class Lends:
    """As long as more than half of a step's rollouts are missing, all slots that train lend their devices."""

    def decide(self, state):
        batch, trainers = state.batch, state.trainer.layout.slots
        may_wait = batch.missing > batch.num_rollouts // 2 and not state.trainer.wanted
        if not state.trainer.at_boundary or not state.ready.issuperset(trainers):
            return Decision(hold_training=bool(state.lending))
        if bool(state.lending) == may_wait or not (batch.steps_left or state.lending):
            return Decision(hold_training=bool(state.lending))
        orders = change(state, dict.fromkeys(trainers, B if may_wait else T))
        return Decision(orders, sentence(orders, f"{batch.missing} rollouts are missing"), hold_training=may_wait)


class Endless:
    """It never decides."""

    def decide(self, state):
        print("asked", flush=True)
        while True:
            pass
