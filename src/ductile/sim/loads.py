"""What each simulated generator has before it: routing one of 100,000 sequences need not look at all generators."""

import heapq
from collections import Counter

from ductile.core.instances.instances import Instance, InstanceId, SortKey, sort_key
from ductile.core.instances.routing import GeneratorLoad, Route, route


class SimulatedLoads:
    def __init__(self, block_tokens: int) -> None:
        """block_tokens: as `core.instances.routing.route` has it."""
        self._block_tokens = block_tokens
        self._tokens: dict[InstanceId, float] = {}
        self._keys: dict[InstanceId, SortKey] = {}
        self._least: list[tuple[float, SortKey]] = []
        self._groups: dict[str, Counter[InstanceId]] = {}

    def open(self, instance: Instance) -> None:
        """The instance takes requests from now on."""
        if instance.id not in self._tokens:
            self._keys[instance.id] = sort_key(instance)
            self._set(instance.id, 0.0)

    def close(self, instance: Instance) -> None:
        self._tokens.pop(instance.id, None)

    def add(self, instance: InstanceId, group: str, tokens: float) -> None:
        if instance in self._tokens:
            self._set(instance, self._tokens[instance] + tokens)
        self._groups.setdefault(group, Counter())[instance] += 1

    def remove(self, instance: InstanceId, group: str, tokens: float) -> None:
        if instance in self._tokens:
            self._set(instance, max(0.0, self._tokens[instance] - tokens))
        here = self._groups[group]
        here[instance] -= 1
        if not +here:
            del self._groups[group]

    def route(self, group: str, prompt_tokens: int) -> Route:
        """Choose the generator of a request, by `core.instances.routing.route`: asked about the least loaded one and
        those of siblings alone, the choice is the same as among all. Raises ValueError when there is none."""
        while self._least and self._tokens.get(self._least[0][1][-1]) != self._least[0][0]:
            heapq.heappop(self._least)
        siblings = {name for name, count in self._groups.get(group, {}).items() if count and name in self._tokens}
        names = sorted(siblings.union(key[-1] for _, key in self._least[:1]), key=self._keys.__getitem__)
        near = {True: frozenset([group]), False: frozenset[str]()}
        loads = [GeneratorLoad(name, self._tokens[name], near[name in siblings]) for name in names]
        return route(group, loads, prompt_tokens, self._block_tokens)

    def siblings(self, group: str, instance: InstanceId) -> bool:
        """Return whether a request of the group is at the instance: then the prompt is cached there."""
        return self._groups.get(group, Counter())[instance] > 0

    def _set(self, instance: InstanceId, tokens: float) -> None:
        self._tokens[instance] = tokens
        heapq.heappush(self._least, (tokens, self._keys[instance]))

    def __len__(self) -> int:
        """Generators that take requests."""
        return len(self._tokens)
