"""Policies that move slots everywhere: what a test of the moving needs, and nobody else."""

import os
import random
from dataclasses import replace

from ductile.core.cluster.handoff import change
from ductile.core.cluster.orders import Decision, Handoff, complaints, sentence
from ductile.core.cluster.placement import Role

Roles = tuple[Role, ...]
T: Roles = ("train",)
G: Roles = ("generate",)
S: Roles = ("score",)
B: Roles = ("train", "generate")


class EverywhereInTurn:
    """Of slots 0 (train), 1-2 (generate) and 3 (score)."""

    def decide(self, state):
        batch = state.batch
        begun = batch.trained > 0
        if batch.step % 2 == 0:
            # The train slot is lent until something is trained; then a generator comes to the trainer.
            roles = {0: T, 1: G, 2: T, 3: S} if begun else {0: B, 1: G, 2: G, 3: S}
        else:
            # A generator scores; then the first train slot generates and another one trains for it.
            roles = {0: T, 1: G, 2: S, 3: S} if not begun else {0: G, 1: T, 2: S, 3: S}
        if not batch.steps_left:
            return Decision()
        orders = change(state, {slot: held for slot, held in roles.items() if slot in state.ready})
        decision = Decision(orders, sentence(orders, f"step {batch.step}"))
        return Decision() if complaints(state, decision) else decision


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
                replace(order, with_cache=self._chance.random() < 0.5) if isinstance(order, Handoff) else order
                for order in change(state, roles)
            )
            decision = Decision(orders, sentence(orders, "restless")) if orders else Decision()
            if orders and not complaints(state, decision):
                return decision
        return Decision()
