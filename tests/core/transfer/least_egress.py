"""What no plan can beat: the least possible egress of the busiest slot, found exactly.

A bound L holds if all bytes can leave some slot with no slot sending more than L: a flow network from demands over
their possible senders to a sink. The least L starts at the plain average and rises by what the minimum cut lacks, until
everything flows. Much slower than planning, so it is for tests alone.
"""

from collections import deque
from collections.abc import Sequence

from ductile.core.transfer.cells import Line, Slots

Node = tuple[str, int]
Capacity = dict[Node, dict[Node, int]]
SOURCE, SINK = ("source", 0), ("sink", 0)


def least_egress(lines: Sequence[Line], relay: bool) -> int:
    """Least possible egress of the busiest slot in bytes, with all links taken as equal.

    With `relay`, the first copy of a byte leaves a holder, and further copies leave any slot that holds or receives it.
    """
    demands: dict[Slots, int] = {}
    for line in lines:
        copies = len(line.needers)
        first, more = (1, copies - 1) if relay else (copies, 0)
        for senders, count in ((line.holders, first), ((*line.holders, *line.needers), more)):
            if count:
                demands[senders] = demands.get(senders, 0) + line.num_bytes * count
    slots = {slot for senders in demands for slot in senders}
    total = sum(demands.values())
    bound = -(-total // max(1, len(slots)))
    while True:
        sent, limiting = _max_flow(_network(demands, bound))
        if sent == total:
            return bound
        bound += max(1, -(-(total - sent) // limiting))


def _network(demands: dict[Slots, int], bound: int) -> Capacity:
    capacity: Capacity = {SOURCE: {}, SINK: {}}
    for index, (senders, amount) in enumerate(demands.items()):
        demand = ("demand", index)
        capacity[SOURCE][demand] = amount
        capacity[demand] = {SOURCE: 0} | {("slot", slot): amount for slot in senders}
        for slot in senders:
            capacity.setdefault(("slot", slot), {SINK: bound})[demand] = 0
            capacity[SINK][("slot", slot)] = 0
    return capacity


def _max_flow(capacity: Capacity) -> tuple[int, int]:
    """(bytes that flow, number of slots that limit them), along shortest augmenting paths. `capacity` becomes what is
    left."""
    flowing = 0
    while True:
        came_from: dict[Node, Node] = {SOURCE: SOURCE}
        queue = deque([SOURCE])
        while queue and SINK not in came_from:
            node = queue.popleft()
            for neighbour, left in capacity[node].items():
                if left and neighbour not in came_from:
                    came_from[neighbour] = node
                    queue.append(neighbour)
        if SINK not in came_from:
            return flowing, sum(kind == "slot" for kind, _ in came_from)
        path: list[tuple[Node, Node]] = []
        node = SINK
        while node != SOURCE:
            path.append((came_from[node], node))
            node = came_from[node]
        amount = min(capacity[start][end] for start, end in path)
        for start, end in path:
            capacity[start][end] -= amount
            capacity[end][start] += amount
        flowing += amount
