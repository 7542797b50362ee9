"""The simulated cluster: which slot holds what and does what, which instances there are, what a policy is told.

It decides nothing. The roles (`simulated_roles.py`) tell it what begins and ends, the loop's controller has it change
who holds what (it follows `elastic.execution.Actuator`), the ledger hears of every change of a slot's activity. What
generates is in its `engines`. How far the step is it reads from the loop's own books (`elastic.step_accounting`), as a
live run does; those count tokens in blocks.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import fsum

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.listeners import Listeners
from ductile.concurrency.structured import Pause
from ductile.core.instances.instances import Instance, Serving, in_order
from ductile.core.instances.placement import SPELLED, Role
from ductile.core.layout.choice.layout_rules import layout_for
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.facts.cluster_state import (
    BatchProgress,
    ClusterState,
    SlotState,
    TrainerState,
    first_instances,
    weights_are_near,
)
from ductile.core.scheduling.facts.ledger import Activity, Ledger, idle_cause
from ductile.core.scheduling.orders import Release, RoleChange
from ductile.elastic.step_accounting import SamplesInFlight, StepAccounting
from ductile.sim.scenario import Scenario
from ductile.sim.simulated_engines import SimulatedEngines

DOING: tuple[Activity, ...] = ("switch", "publish", "train", "score")
"""Activities that keep a slot from generating; the first that applies is what the slot does."""


class SimulatedActuator:
    def __init__(self, scenario: Scenario, ledger: Ledger) -> None:
        self.scenario, self.ledger = scenario, ledger
        self._loop = asyncio.get_running_loop()
        slots = scenario.placement.slots
        self.roles: dict[int, tuple[Role, ...]] = {}
        self.since_s = dict.fromkeys(slots, 0.0)
        self.gone: set[int] = set()
        """Slots that have left, and cost nothing."""
        self._changing: frozenset[int] = frozenset()
        self.layout = layout_for(scenario.placement.train, scenario.rules)
        self.boundary = asyncio.Lock()
        """Held by the trainer in a micro-step, and by a change of its slots."""
        self.pause = Pause()
        """No micro-step begins while the policy holds training."""
        self.lent = Pause()
        """The trainer's state is parked: nothing that needs it begins."""
        self.num_wanting = 0
        """Commands that wait for the trainer's state."""
        self.published = -1
        """Version that the trainer has published; -1 before the first."""
        self._begun = -1
        self._on_published = ChangeSignal()
        self.pending = SamplesInFlight()
        """Samples that the trainer has been given and has not done yet."""
        self.live_version = -1
        """Version that the generators sample from; -1 before the first."""
        self.num_updates = 0
        """Optimizer steps of the run that taught something."""
        self.trained_tokens = 0
        self.step_s: list[float] = []
        self.on_wanted = Listeners[[]]()
        """Told when a command begins to wait for the trainer's state."""
        self._scores = asyncio.Event()
        self._doing: dict[Activity, Counter[int]] = {activity: Counter() for activity in DOING}
        self._accounting: StepAccounting | None = None
        self._facts = (False, False, False, False)
        self.instances: tuple[Instance, ...] = ()
        """Generators and scorers, in the order of their slots."""
        self.engines = SimulatedEngines(scenario, self.refresh, self.look_again)
        for slot in slots:
            ledger.open(slot, self.now_s)
        self.assign({slot: scenario.placement.roles(slot) for slot in slots})
        for instance in (*first_instances(scenario.placement, scenario.limits), *scenario.servers):
            self._begin(instance)

    def instances_of(self, role: Serving) -> tuple[Instance, ...]:
        return tuple(each for each in self.instances if each.role == role)

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def reads(self, accounting: StepAccounting) -> None:
        """Tell policies from now on what these books say."""
        self._accounting = accounting

    # -- what the controller has it do

    @property
    def wanted(self) -> bool:
        return self.num_wanting > 0

    def begin(self, version: int) -> None:
        self._begun = version
        if version:
            self.step_s.append(self.now_s - fsum(self.step_s))

    def hold_training(self, held: bool) -> None:
        self.pause.set(held)
        self.look_again()

    def changing(self, moves: Sequence[RoleChange]) -> None:
        changed, self._changing = self._changing, frozenset(move.slot for move in moves)
        self.since_s.update(dict.fromkeys(changed - self._changing, self.now_s))
        leaving = {move.slot for move in moves if "generate" in move.before and "generate" not in move.after}
        self.engines.take_no_more(leaving)

    async def release(self, release: Release) -> list[str]:
        if release.migrations:
            await self.engines.migrate(release.migrations)
        await asyncio.gather(*(self._end(instance) for instance in release.instances))
        return []

    async def _end(self, instance: Instance) -> None:
        self._set(tuple(each for each in self.instances if each != instance))
        if instance.role == "generate":
            self.engines.end(instance)
        self.assign({slot: without(instance.role, self.roles[slot]) for slot in instance.slots})
        await self._switch(instance.slots, self.scenario.costs.release_s)

    async def park(self) -> None:
        while self.published < self._begun:
            await self._on_published.wait()
        async with self.boundary:
            await self._switch(self.layout.slots, self.scenario.costs.park_s)
            self.lent.set(True)

    async def unpark(self) -> None:
        if self.lent.begun.is_set():
            await self._switch(self.layout.slots, self.scenario.costs.unpark_s)
            self.lent.set(False)

    @asynccontextmanager
    async def with_state(self) -> AsyncGenerator[None]:
        """Hold the trainer between two micro-steps, with its state on its devices. Waits for these where they are
        lent."""
        while True:
            if self.lent.begun.is_set():
                self.num_wanting += 1
                self.on_wanted()
                try:
                    await self.lent.over.wait()
                finally:
                    self.num_wanting -= 1
            async with self.boundary:
                if not self.lent.begun.is_set():
                    yield
                    return

    def now_published(self, version: int) -> None:
        """The trainer has published this version."""
        self.published = version
        self._on_published.notify_all()

    async def admit(self, instance: Instance, after: Callable[[], Awaitable[None]] | None = None) -> None:
        if after is not None:
            await after()
        far = not weights_are_near(self.scenario.topology, self.instances, self.layout, instance.slots)
        await self._switch(instance.slots, self.scenario.costs.between(nodes=far).assign_s)
        self.assign({slot: in_order_of_roles(*self.roles[slot], instance.role) for slot in instance.slots})
        self._begin(instance)

    async def resize(self, layout: ParallelLayout, release: Release) -> list[str]:
        before, after = self.layout.slots, layout.slots
        await asyncio.sleep(self.scenario.costs.prepare_s)
        async with self.boundary:
            await self.release(release)
            spans = self.scenario.topology.spans((*before, *after))
            await self._switch({*before, *after}, self.scenario.costs.between(nodes=spans).resize_s)
            self.layout = layout
            self.assign({slot: without("train", self.roles[slot]) for slot in {*before} - {*after}})
            self.assign({slot: in_order_of_roles(*self.roles[slot], "train") for slot in {*after} - {*before}})
        return []

    def leave(self, slots: Collection[int]) -> None:
        """Slots that hold nothing leave."""
        for slot in slots:
            self.gone.add(slot)
            self.ledger.close(slot, self.now_s)

    def come_back(self, slots: Collection[int]) -> None:
        """Slots that have left are there again, and hold nothing."""
        for slot in slots:
            self.gone.discard(slot)
            self.ledger.open(slot, self.now_s)
            self.refresh(slot)

    async def _switch(self, slots: Collection[int], seconds: float) -> None:
        if seconds > 0:
            self.engines.stall(slots, seconds)
            await self.busy("switch", slots, seconds)

    def _set(self, instances: tuple[Instance, ...]) -> None:
        self.instances = instances
        (self._scores.set if self.instances_of("score") else self._scores.clear)()

    def _begin(self, instance: Instance) -> None:
        """The instance is there, on slots that have its role."""
        self._set(in_order((*self.instances, instance)))
        if instance.role == "generate":
            self.engines.begin(instance)

    async def scorers(self) -> tuple[Instance, ...]:
        """The scorers; waits while there is none."""
        await self._scores.wait()
        return self.instances_of("score")

    # -- what slots do

    def assign(self, roles: Mapping[int, tuple[Role, ...]]) -> None:
        """The slots have these roles from now on."""
        self.roles.update(roles)
        for slot in roles:
            self.refresh(slot)

    async def busy(self, what: Activity, slots: Collection[int], seconds: float) -> None:
        """The slots do this for so long."""
        slots = tuple(slots)
        for slot in slots:
            self._doing[what][slot] += 1
            self.refresh(slot)
        try:
            await asyncio.sleep(seconds)
        finally:
            for slot in slots:
                self._doing[what][slot] -= 1
                self.refresh(slot)

    def refresh(self, slot: int) -> None:
        """Tell the ledger what the slot does now."""
        if slot in self.gone:
            return
        for activity in DOING:
            if self._doing[activity][slot]:
                self.ledger.switch(slot, activity, self.now_s)
                return
        if self.engines.have_requests_on(slot):
            self.ledger.switch(slot, "generate", self.now_s)
        elif self.live_version >= 0:  # until then it starts up
            others_decode, may_start, samples_ready, held = self._facts
            cause = idle_cause(
                self.roles[slot],
                others_decode=others_decode,
                may_start=may_start,
                samples_ready=samples_ready,
                held=held,
            )
            self.ledger.switch(slot, "idle", self.now_s, cause)

    def look_again(self) -> None:
        """Why slots are idle may have changed."""
        if self._accounting is None:
            return
        facts = (
            self.engines.have_requests,
            self._accounting.to_start(self.engines.num_waiting) > 0,
            self._accounting.samples_ready(self.pending) > 0,
            self.pause.begun.is_set(),
        )
        if facts != self._facts:
            self._facts = facts
            for slot in self.roles:
                self.refresh(slot)

    def now_live(self, version: int) -> None:
        """Every generator samples from this version."""
        self.live_version = version
        self.engines.flip(version)
        self.look_again()

    def on_updated(self) -> None:
        """An optimizer step is done."""
        self.num_updates += 1

    def on_given(self, samples: SamplesInFlight) -> None:
        """The trainer has been given these."""
        self.pending = self.pending + samples

    def on_trained(self, samples: SamplesInFlight) -> None:
        """Some of what the trainer has been given is done."""
        self.pending = self.pending - samples
        self.trained_tokens += samples.tokens * self.scenario.block_tokens
        self.look_again()

    # -- what a policy is told

    def state(self) -> ClusterState:
        scenario, work = self.scenario, self.scenario.work
        unfinished = self.engines.unfinished(self.instances_of("generate"))
        return ClusterState(
            now_s=self.now_s,
            slots=tuple(
                SlotState(slot, roles, self.since_s[slot], slot not in self._changing)
                for slot, roles in self.roles.items()
                if slot not in self.gone
            ),
            batch=self._batch(),
            trainer=TrainerState(
                self.layout, True, self.pause.begun.is_set(), work.seq_len, scenario.rules, self.wanted
            ),
            speeds=scenario.speeds,
            costs=scenario.costs,
            home=scenario.placement,
            limits=scenario.limits,
            instances=self.instances,
            unfinished=unfinished,
            lengths=self.engines.lengths,
            max_tokens=work.max_tokens,
        )

    def _batch(self) -> BatchProgress:
        if self._accounting is None:
            raise ValueError("a policy was asked before the loop had books")
        counted, block_tokens = (
            self._accounting.batch(self.pending, self.engines.num_waiting),
            self.scenario.block_tokens,
        )
        return replace(
            counted,
            ready_tokens=counted.ready_tokens * block_tokens,
            partial_tokens=counted.partial_tokens * block_tokens,
            to_score_tokens=counted.to_score_tokens * block_tokens,
        )


def in_order_of_roles(*roles: Role) -> tuple[Role, ...]:
    """Roles in the order in which `SlotState` has them."""
    return tuple(role for role in SPELLED if role in roles)


def without(role: Role, roles: Sequence[Role]) -> tuple[Role, ...]:
    return tuple(held for held in roles if held != role)
