"""A policy that moves slots everywhere at given moments: what a test of the moving needs, and nobody else."""

from ductile.core.cluster.handoff import change
from ductile.core.cluster.orders import Decision, complaints, sentence

T, G, S, B = ("train",), ("generate",), ("score",), ("train", "generate")


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
