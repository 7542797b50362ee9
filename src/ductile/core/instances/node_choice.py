"""Which machines of a pool that others manage, such as a Ray cluster, become nodes of a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PoolNode:
    """A machine of the pool."""

    id: str
    address: str
    resources: Mapping[str, float] = field(default_factory=dict[str, float])
    """All that it has, whoever uses it now: {"CPU": 8.0, "GPU": 4.0}."""
    is_own: bool = False
    """Whether the orchestrator is on it."""

    def has(self, needed: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= amount for name, amount in needed.items())


def choose_nodes(
    pool: Iterable[PoolNode],
    needed: Mapping[str, float],
    numbers: Mapping[str, int],
    unfit: Iterable[str],
    max_nodes: int,
) -> Sequence[tuple[int, PoolNode]]:
    """Return the machines that become nodes now, each with its number.

    The orchestrator's own comes first, then the others by address, so that nodes of one cluster have the same numbers
    in every run. numbers: those of machines that are nodes already, by id. unfit: ids of machines that are not tried
    (again).
    """
    unfit = set(unfit)
    fit = [node for node in pool if node.id not in numbers and node.id not in unfit and node.has(needed)]
    fit.sort(key=lambda node: (not node.is_own, _in_order(node.address), node.id))
    free = [number for number in range(max_nodes) if number not in numbers.values()]
    return list(zip(free, fit, strict=False))


def _in_order(address: str) -> tuple[tuple[int, str], ...]:
    """Sort 10.0.0.9 before 10.0.0.10."""
    return tuple((int(part) if part.isdecimal() else 1 << 16, part) for part in address.split("."))
