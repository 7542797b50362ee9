"""A policy for measuring role changes: each kind in turn, while others are at work, whether it pays or not.

Of slots 0 and 1, which train, and 2 and 3, which generate. First at any time, then as steps begin, before weights are
published.
"""

from collections.abc import Sequence

from ductile.core.instances.placement import Role
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.migration_targets import change, migrate
from ductile.core.scheduling.orders import Decision, Migration, Order, sentence, violations

Roles = tuple[Role, ...]
SETTLING = "as a step begins"
TURNS: Sequence[tuple[int, Roles, str]] = (
    (1, ("train", "generate"), ""),
    (1, ("train",), ""),
    (1, ("generate",), ""),
    (1, (), ""),  # rollouts are handed to it
    (3, ("train",), ""),
    (3, ("generate",), ""),
    (1, ("train",), ""),
    (1, ("generate",), SETTLING),
    (1, ("train",), SETTLING),
    (1, ("train", "generate"), SETTLING),
    (1, ("train",), SETTLING),
)
"""A slot, the roles that it takes on, and when."""
REST_S = 1.5
"""Between two changes, so that everybody is at work again."""


class EveryChange:
    def __init__(self) -> None:
        self._turn = 0
        self._not_before_s = 0.0

    def decide(self, state: ClusterState) -> Decision:
        """Only while there is something to train on, and the last two generators have something to do or are about to
        get new weights."""
        slot, roles, when = TURNS[self._turn % len(TURNS)]
        begins = not state.asked
        generate = begins or all(state.num_running[each.id] for each in state.instances_of("generate")[-2:])
        busy, everybody = state.batch.ready > 0 and generate, len(state.ready) == len(state.slots)
        if begins != (when == SETTLING) or state.now_s < self._not_before_s:
            return Decision()
        if not (busy and everybody and state.trainer.at_boundary):
            return Decision()
        orders = change(state, {slot: roles}) if roles else to(state, slot)
        decision = Decision(orders, sentence(orders, "for the sake of measuring it", when))
        if not orders or violations(state, decision):
            return Decision()
        self._turn += 1
        self._not_before_s = state.now_s + REST_S
        return decision


def to(state: ClusterState, slot: int) -> tuple[Order, ...]:
    """Half of each other generator's rollouts, some with their caches and some without."""
    generators = state.instances_of("generate")
    targets = [each.id for each in generators if slot in each.slots]
    others = {each.id for each in generators}.difference(targets)
    migrations = migrate(state, others, targets)[::2] if targets else ()
    return tuple(
        Migration(order.id, order.source, order.target, with_cache=number % 2 == 0)
        for number, order in enumerate(migrations)
    )
