"""What each simulated generator has before it, so that routing one of 100,000 sequences need not look at all slots."""

import heapq
from collections import Counter

from ductile.core.cluster.routing import GeneratorLoad, Route, route


class SimulatedLoads:
    def __init__(self, block_tokens: int) -> None:
        """block_tokens: as `core.cluster.routing.route` has it."""
        self._block_tokens = block_tokens
        self._tokens: dict[int, float] = {}
        self._least: list[tuple[float, int]] = []
        self._groups: dict[str, Counter[int]] = {}

    def open(self, slot: int) -> None:
        """The slot generates from now on."""
        if slot not in self._tokens:
            self._tokens[slot] = 0.0
            heapq.heappush(self._least, (0.0, slot))

    def close(self, slot: int) -> None:
        self._tokens.pop(slot, None)

    def add(self, slot: int, group: str, tokens: float) -> None:
        if slot in self._tokens:
            self._tokens[slot] += tokens
            heapq.heappush(self._least, (self._tokens[slot], slot))
        self._groups.setdefault(group, Counter())[slot] += 1

    def remove(self, slot: int, group: str, tokens: float) -> None:
        if slot in self._tokens:
            self._tokens[slot] = max(0.0, self._tokens[slot] - tokens)
            heapq.heappush(self._least, (self._tokens[slot], slot))
        here = self._groups[group]
        here[slot] -= 1
        if not +here:
            del self._groups[group]

    def route(self, group: str, prompt_tokens: int) -> Route:
        """Choose the slot of a request, by `core.cluster.routing.route`: asked about the least loaded slot and those of
        siblings alone, the choice is the same as among all. Raises ValueError when no slot generates."""
        while self._least and self._tokens.get(self._least[0][1]) != self._least[0][0]:
            heapq.heappop(self._least)
        siblings = [slot for slot, count in self._groups.get(group, {}).items() if count and slot in self._tokens]
        near = frozenset([group])
        loads = [GeneratorLoad(slot, self._tokens[slot], near) for slot in siblings]
        if self._least and self._least[0][1] not in siblings:
            loads.append(GeneratorLoad(self._least[0][1], self._least[0][0]))
        return route(group, loads, prompt_tokens, self._block_tokens)

    def siblings(self, group: str, slot: int) -> bool:
        """Whether a request of the group is at the slot: then the prompt is cached there."""
        return self._groups.get(group, Counter())[slot] > 0

    def __len__(self) -> int:
        """Slots that generate."""
        return len(self._tokens)
