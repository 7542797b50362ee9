"""How many slots the trainer may be given: not every number of them is a layout
(`ductile.core.layout.choice.layout_rules`).

tp 2, and 4 of 7 slots train     it may have 2, 4 or 6
`fitted` of orders for 3 more    2 more; the third keeps what it does
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ductile.core.instances.instances import NOUNS
from ductile.core.instances.placement import Role
from ductile.core.layout.choice.layout_rules import dims_allowed
from ductile.core.layout.geometry.node_order import chosen, in_whole_groups
from ductile.core.scheduling.facts.cluster_state import ClusterState


class TrainSizes:
    """Numbers of slots that the trainer may have: those on which it has a layout, and the number that it has now."""

    def __init__(self, state: ClusterState) -> None:
        now, least = len(state.trainer.layout.slots), max(1, state.limits.min_train)
        self._allowed = dims_allowed(max(now, len(state.slots)), state.trainer.rules)
        self._sizes = sorted({now}.union(number for number in self._allowed if number >= least))
        self._now = state.trainer.layout.dims

    def __contains__(self, number: int) -> bool:
        return number in self._sizes

    def at_most(self, number: int) -> int:
        """The largest that is no more than `number`; 0 where there is none."""
        place = bisect_right(self._sizes, number)
        return self._sizes[place - 1] if place else 0

    def tp(self, number: int) -> int:
        """The size of tp on so many slots."""
        return self._allowed.get(number, self._now).tp


def fitted(state: ClusterState, roles: Mapping[int, tuple[Role, ...]]) -> dict[int, tuple[Role, ...]]:
    """Returns as many of these roles as leave the trainer a number of slots that it may have. Slots that join it keep
    what they hold, where it cannot have them all: first the last ones of those that do something, or of those that make
    no whole tp group on their node. Where that is not enough, slots that leave it stay. The slots of one instance go
    together."""
    now, sizes = state.trainer.layout.slots, TrainSizes(state)
    held = {slot.slot: slot.roles for slot in state.slots}
    joining = [slot for slot, after in roles.items() if "train" in after and slot not in now]
    joining.sort(key=lambda slot: bool(held[slot]))
    leaving = [slot for slot, after in roles.items() if "train" not in after and slot in now]
    if state.topology.nodes:
        staying, tp = [slot for slot in now if slot not in leaving], state.trainer.layout.dims.tp
        order = chosen(staying, joining, len(staying) + len(joining), tp, state.topology)
        joining = [slot for slot in order if slot not in staying]
        leaving = [*in_whole_groups(leaving, (tp,), state.topology)]
    several: list[tuple[Role, dict[int, tuple[int, ...]]]] = [
        (role, {slot: group for group in state.groups(role) for slot in group})
        for role in NOUNS
        if state.limits.slots_per(role) > 1
    ]

    def units(slots: Sequence[int]) -> list[list[int]]:
        """The slots, those of one instance in one list."""
        found: dict[tuple[int, ...], list[int]] = {}
        for slot in slots:
            serves = (groups.get(slot) for role, groups in several if role in (*held[slot], *roles[slot]))
            found.setdefault(next(filter(None, serves), (slot,)), []).append(slot)
        return list(found.values())

    ins, outs = units(joining), units(leaving)
    num_in, num_out = [0, *accumulate(map(len, ins))], [0, *accumulate(map(len, outs))]
    choices = ((left, joined) for left in reversed(range(len(num_out))) for joined in reversed(range(len(num_in))))
    left, joined = next(each for each in choices if len(now) - num_out[each[0]] + num_in[each[1]] in sizes)
    stays = {slot for unit in (*ins[joined:], *outs[left:]) for slot in unit}
    return {slot: after for slot, after in roles.items() if slot not in stays}
