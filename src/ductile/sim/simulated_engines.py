"""The engines of all simulated generators: how requests are shared among them, and what becomes of these."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence

from ductile.concurrency.listeners import Listeners
from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.scheduling.costs.cost import SwitchCosts, context_transfer
from ductile.core.scheduling.facts.cluster_state import Lengths, Unfinished
from ductile.core.scheduling.orders import Migration
from ductile.sim.loads import SimulatedLoads
from ductile.sim.scenario import Scenario
from ductile.sim.simulated_engine import SimulatedEngine, SimulatedRequest

SEEN = 2048
"""Lengths of completions that policies are told of: the latest."""


class SimulatedEngines:
    def __init__(self, scenario: Scenario, refresh: Callable[[int], None], look_again: Callable[[], None]) -> None:
        """refresh: told of a slot that has other work now. look_again: told when others may be idle for another
        reason."""
        self.on_finished = Listeners[[list[SimulatedRequest]]]()
        self.on_capacity = Listeners[[]]()
        """Told when slots begin or cease to take requests."""
        self.num_waiting = 0
        """Requests that wait for a generator."""
        self._scenario, self._refresh, self._look_again = scenario, refresh, look_again
        self._loop = asyncio.get_running_loop()
        self._loads = SimulatedLoads(scenario.cache_block)
        self._generates = asyncio.Event()
        self._ended: deque[int] = deque(maxlen=SEEN)
        self._cut: deque[int] = deque(maxlen=SEEN)
        self._migrating: dict[str, SimulatedRequest] = {}
        self._engines: dict[InstanceId, SimulatedEngine] = {}
        self._engine_on: dict[int, SimulatedEngine] = {}
        self._paused_until_s = dict.fromkeys(scenario.placement.slots, 0.0)
        """Moment at which each slot has done what keeps it from decoding."""

    @property
    def capacity(self) -> int:
        return self._scenario.limits.max_num_seqs * len(self._loads)

    @property
    def have_requests(self) -> bool:
        return any(engine.requests for engine in self._engines.values())

    def have_requests_on(self, slot: int) -> bool:
        return slot in self._engine_on and bool(self._engine_on[slot].requests)

    # -- which there are

    def begin(self, instance: Instance) -> None:
        paused_until_s = max((self._paused_until_s[slot] for slot in instance.slots), default=0.0)
        decode, max_num_seqs = self._scenario.speeds.decode, self._scenario.limits.max_num_seqs
        engine = SimulatedEngine(instance, decode, max_num_seqs, self._on_done, paused_until_s)
        self._engines[instance.id] = engine
        self._engine_on.update(dict.fromkeys(instance.slots, engine))
        self._loads.open(instance)
        self._look_for_generators()

    def take_no_more(self, slots: Collection[int]) -> None:
        """No new requests go to generators on these slots."""
        for engine in self._on(slots):
            self._loads.close(engine.instance)
        self._look_for_generators()

    def end(self, instance: Instance) -> None:
        self._loads.close(instance)
        del self._engines[instance.id]
        for slot in instance.slots:
            del self._engine_on[slot]
        self._look_for_generators()

    def stall(self, slots: Collection[int], seconds: float) -> None:
        """Nothing is decoded on these slots for so long: they train, take new weights in, or change roles."""
        for slot in slots:
            self._paused_until_s[slot] = max(self._loop.time(), self._paused_until_s[slot]) + seconds
        for engine in self._on(slots):
            engine.stall(seconds)

    def flip(self, version: int) -> None:
        """All sample from this version."""
        for engine in self._engines.values():
            engine.flip(version)

    def _on(self, slots: Collection[int]) -> list[SimulatedEngine]:
        return list(dict.fromkeys(self._engine_on[slot] for slot in slots if slot in self._engine_on))

    def _look_for_generators(self) -> None:
        (self._generates.set if self._loads else self._generates.clear)()
        self.on_capacity()

    # -- what becomes of rollouts

    async def start(self, simulated: SimulatedRequest) -> None:
        """Send the request where there is the least to do; waits while there is no generator."""
        self.num_waiting += 1
        try:
            while not self._loads:
                await self._generates.wait()
        finally:
            self.num_waiting -= 1
        self._put(simulated, self._loads.route(simulated.request.group, simulated.prompt_tokens).instance)

    def abort(self, simulated: SimulatedRequest) -> None:
        name = simulated.request.id
        self._migrating.pop(name, None)
        for instance, engine in self._engines.items():
            if name in engine.requests:
                self._take(name, instance)

    async def migrate(self, migrations: Sequence[Migration]) -> None:
        """Move rollouts, with all that they have so far; those that have ended stay out of it. The others decode on."""
        for order in migrations:
            if order.id in self._engines[order.source].requests:
                self._migrating[order.id] = self._take(order.id, order.source)
        if self._migrating:
            await asyncio.sleep(self._scenario.costs.migration_s)
        for order in migrations:
            if simulated := self._migrating.pop(order.id, None):
                ends = (*self._engines[order.source].instance.slots, *self._engines[order.target].instance.slots)
                costs = self._scenario.costs.between(nodes=self._scenario.topology.spans(ends))
                self._put(simulated, order.target, costs)

    def _take(self, name: str, source: InstanceId) -> SimulatedRequest:
        engine = self._engines[source]
        simulated = engine.remove(name)
        self._loads.remove(source, simulated.request.group, simulated.predicted_tokens)
        self._refresh_all(engine.instance)
        return simulated

    def _put(self, simulated: SimulatedRequest, target: InstanceId, costs: SwitchCosts | None = None) -> None:
        """costs: of the way from the generator that had it; None where none did."""
        scenario, engine = self._scenario, self._engines[target]
        context = simulated.prompt_tokens + simulated.generated
        if not simulated.generated and scenario.cache_block and self._loads.siblings(simulated.request.group, target):
            context %= scenario.cache_block  # the full blocks of the prompt are there
        if simulated.generated:
            prefill_s = context_transfer(context, scenario.speeds, costs or scenario.costs).seconds
        else:  # no generator has a cache of it
            prefill_s = context / scenario.speeds.prefill_tokens_per_s
        self._loads.add(target, simulated.request.group, simulated.predicted_tokens)
        engine.add(simulated, prefill_s)
        self._refresh_all(engine.instance)
        self._look_again()

    def _refresh_all(self, instance: Instance) -> None:
        for slot in instance.slots:
            self._refresh(slot)

    def _on_done(self, instance: Instance, requests: list[SimulatedRequest]) -> None:
        for simulated in requests:
            self._loads.remove(instance.id, simulated.request.group, simulated.predicted_tokens)
            is_cut = simulated.num_tokens >= self._scenario.work.max_tokens
            (self._cut if is_cut else self._ended).append(simulated.num_tokens)
        self._refresh_all(instance)
        self._look_again()
        self.on_finished(requests)

    # -- what a policy is told

    def unfinished(self, instances: Sequence[Instance]) -> tuple[Unfinished, ...]:
        """Return the rollouts that these generators have."""
        found: list[Unfinished] = []
        for instance in instances:
            engine = self._engines[instance.id]
            engine.catch_up()
            found += [
                Unfinished(
                    name,
                    instance.id,
                    simulated.prompt_tokens,
                    engine.tokens(simulated),
                    self._scenario.work.max_tokens,
                    simulated.request.group,
                )
                for name, simulated in engine.requests.items()
            ]
        return tuple(found)

    @property
    def lengths(self) -> Lengths:
        """Lengths of the latest completions, and of those that were cut."""
        return Lengths(tuple(self._ended), tuple(self._cut), float(self._scenario.work.prompt_tokens))
