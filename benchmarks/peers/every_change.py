"""A policy for measuring role changes: each kind in turn, while others are at work, whether it pays or not.

Of slots 0 and 1, which train, and 2 and 3, which generate.
"""

from collections.abc import Sequence

from ductile.core.cluster.handoff import change, hand_off
from ductile.core.cluster.orders import Decision, Handoff, Order, complaints, sentence
from ductile.core.cluster.placement import Role
from ductile.core.cluster.state import ClusterState

Roles = tuple[Role, ...]
TURNS: Sequence[tuple[int, Roles]] = (
    (1, ("train", "generate")),
    (1, ("train",)),
    (1, ("generate",)),
    (1, ()),  # rollouts are handed to it
    (3, ("train",)),
    (3, ("generate",)),
    (1, ("train",)),
)
"""A slot and the roles that it takes on."""
REST_S = 1.5
"""Between two changes, so that everybody is at work again."""


class EveryChange:
    def __init__(self) -> None:
        self._turn = 0
        self._not_before_s = 0.0

    def decide(self, state: ClusterState) -> Decision:
        """Only while there is something to train on, and the last two generators have something to do."""
        slot, roles = TURNS[self._turn % len(TURNS)]
        busy = state.batch.ready > 0 and all(state.num_running[generator] for generator in state.of("generate")[-2:])
        everybody = len(state.ready) == len(state.slots)
        if state.now_s < self._not_before_s or not (busy and everybody and state.trainer.at_boundary):
            return Decision()
        orders = change(state, {slot: roles}) if roles else to(state, slot)
        decision = Decision(orders, sentence(orders, "for the sake of measuring it"))
        if not orders or complaints(state, decision):
            return Decision()
        self._turn += 1
        self._not_before_s = state.now_s + REST_S
        return decision


def to(state: ClusterState, slot: int) -> tuple[Order, ...]:
    """Half of each other generator's rollouts, some with their caches and some without."""
    all_of_them = hand_off(state, [other for other in state.of("generate") if other != slot], [slot])
    handoffs = [order for order in all_of_them if isinstance(order, Handoff)][::2]
    return tuple(
        Handoff(order.id, order.source, order.target, with_cache=number % 2 == 0)
        for number, order in enumerate(handoffs)
    )
