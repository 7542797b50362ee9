"""The simulated cluster: which slot holds what and does what, and the facts that a policy is told.

It keeps the books and decides nothing. The roles (`roles.py`) tell it what begins and ends, the loop's controller has
it change who holds what (it follows `loop.controller.Actuator`), the ledger hears of every change of a slot's activity.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from ductile.core.cluster.cost import carriage
from ductile.core.cluster.ledger import Activity, Ledger, idle_cause
from ductile.core.cluster.orders import Migration, RoleChange
from ductile.core.cluster.placement import SPELLED, Role
from ductile.core.cluster.state import (
    IN_FLIGHT,
    BatchProgress,
    ClusterState,
    Lengths,
    SlotState,
    TrainerState,
    Unfinished,
)
from ductile.records import Formation
from ductile.sim.engine import SimulatedEngine, SimulatedRequest
from ductile.sim.loads import SimulatedLoads
from ductile.sim.scenario import Scenario

DOING: tuple[Activity, ...] = ("switch", "publish", "train", "score")
"""Activities that keep a slot from generating; the first that applies is what the slot does."""
SEEN = 2048
"""Lengths of completions that policies are told of: the latest."""


@dataclass(slots=True)
class _Group:
    finished: int = 0
    blocks: int = 0


class SimulatedActuator:
    def __init__(self, scenario: Scenario, ledger: Ledger) -> None:
        self.scenario, self.ledger = scenario, ledger
        self._loop = asyncio.get_running_loop()
        slots = scenario.placement.slots
        self.roles: dict[int, tuple[Role, ...]] = {}
        self.since_s = dict.fromkeys(slots, 0.0)
        self._changing: frozenset[int] = frozenset()
        self.formation = Formation(scenario.placement.train)
        self.boundary = asyncio.Lock()
        """Held by the trainer in a micro-step, and by a change of its slots."""
        self.may_train = asyncio.Event()
        self.may_train.set()
        self.version = 0
        """Version of the weights that the trainer has."""
        self.live_version = -1
        """Version that the generators sample from; -1 before the first."""
        self.num_updates = 0
        self.started = self.finished = self.trained = 0
        """Rollouts since the run began."""
        self.trained_tokens = 0
        self.step_s: list[float] = []
        self.on_finished: Callable[[list[SimulatedRequest]], None] = lambda requests: None
        self.on_capacity: Callable[[], None] = lambda: None
        """Called when slots begin or cease to take requests."""
        self._loads = SimulatedLoads(scenario.cache_block)
        self._generates = asyncio.Event()
        self._doing: dict[Activity, Counter[int]] = {activity: Counter() for activity in DOING}
        self._groups: dict[str, _Group] = {}
        self._ready = self._ready_tokens = self._to_score = self._to_score_tokens = 0
        self._ended: deque[int] = deque(maxlen=SEEN)
        self._cut: deque[int] = deque(maxlen=SEEN)
        self._migrating: dict[str, SimulatedRequest] = {}
        self._facts = (False, False, False)
        self.engines = {
            slot: SimulatedEngine(slot, scenario.speeds.decode, scenario.limits.max_num_seqs, self._on_done)
            for slot in slots
        }
        for slot in slots:
            ledger.open(slot, self.now_s)
        self.assign({slot: scenario.placement.roles(slot) for slot in slots})

    @property
    def capacity(self) -> int:
        return self.scenario.limits.max_num_seqs * len(self._loads)

    @property
    def generators(self) -> tuple[int, ...]:
        return tuple(slot for slot, held in self.roles.items() if "generate" in held)

    @property
    def now_s(self) -> float:
        return self._loop.time()

    # -- what the controller has it do

    def begin(self, version: int) -> None:
        self.version = version
        if version:
            self.step_s.append(self.now_s - fsum(self.step_s))

    def hold_training(self, held: bool) -> None:
        (self.may_train.clear if held else self.may_train.set)()
        self.look_again()

    def changing(self, moves: Sequence[RoleChange]) -> None:
        changed, self._changing = self._changing, frozenset(move.slot for move in moves)
        self.since_s.update(dict.fromkeys(changed - self._changing, self.now_s))
        self._open({move.slot: "generate" in move.before and "generate" in move.after for move in moves})

    async def migrate(self, migrations: Sequence[Migration]) -> None:
        """Move rollouts, with all that they have so far; those that have ended stay out of it. The others decode on."""
        for order in migrations:
            if order.id in self.engines[order.source].requests:
                self._migrating[order.id] = self._take(order.id, order.source)
        if self._migrating:
            await asyncio.sleep(self.scenario.costs.handoff_s)
        for order in migrations:
            if simulated := self._migrating.pop(order.id, None):
                self._put(simulated, order.target)

    async def dismiss(self, slot: int, role: Role) -> None:
        self.assign({slot: without(role, self.roles[slot])})
        await self._switch((slot,), self.scenario.costs.release_s)

    async def admit(self, slot: int, role: Role) -> None:
        await self._switch((slot,), self.scenario.costs.grant_s)
        self.assign({slot: in_order(*self.roles[slot], role)})

    async def resize(self, formation: Formation, leave: Callable[[], Awaitable[None]]) -> None:
        before, after = self.formation.members, formation.members
        await self._micro_steps_pass(IN_FLIGHT)  # before its slots are told
        await asyncio.sleep(self.scenario.costs.prepare_s)
        await self._micro_steps_pass(1)  # before they say that they are ready
        async with self.boundary:
            await leave()
            await self._switch({*before, *after}, self.scenario.costs.resize_s)
            self.formation = formation
            self.assign({slot: without("train", self.roles[slot]) for slot in {*before} - {*after}})
            self.assign({slot: in_order(*self.roles[slot], "train") for slot in {*after} - {*before}})

    async def _micro_steps_pass(self, count: int) -> None:
        """Messages to slots that train wait for those that were sent before; where no slot trains, they do not wait."""
        for _ in range(count):
            async with self.boundary:
                pass

    async def _switch(self, slots: Collection[int], seconds: float) -> None:
        if seconds > 0:
            for slot in slots:
                self.engines[slot].stall(seconds)
            await self.busy("switch", slots, seconds)

    # -- what slots do

    def assign(self, roles: Mapping[int, tuple[Role, ...]]) -> None:
        """The slots have these roles from now on."""
        self.roles.update(roles)
        self._open({slot: "generate" in held for slot, held in roles.items()})
        for slot in roles:
            self.refresh(slot)

    def _open(self, slots: Mapping[int, bool]) -> None:
        """Note for each slot whether it takes requests."""
        for slot, takes in slots.items():
            (self._loads.open if takes else self._loads.close)(slot)
        (self._generates.set if self._loads else self._generates.clear)()
        self.on_capacity()

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
        for activity in DOING:
            if self._doing[activity][slot]:
                self.ledger.switch(slot, activity, self.now_s)
                return
        if self.engines[slot].requests:
            self.ledger.switch(slot, "generate", self.now_s)
        elif self.live_version >= 0:  # until then it starts up
            others_decode, may_start, held = self._facts
            cause = idle_cause(
                self.roles[slot],
                others_decode=others_decode,
                may_start=int(may_start),
                samples_ready=self._ready,
                held=held,
            )
            self.ledger.switch(slot, "idle", self.now_s, cause)

    def look_again(self) -> None:
        """Why slots are idle may have changed."""
        facts = (self.started > self.finished, self.to_start() > 0, not self.may_train.is_set())
        if facts != self._facts:
            self._facts = facts
            for slot in self.roles:
                self.refresh(slot)

    # -- what becomes of rollouts

    async def start(self, simulated: SimulatedRequest) -> None:
        """Send the request where there is the least to do; waits while no slot generates."""
        while not self._loads:
            await self._generates.wait()
        self.started += 1
        self._put(simulated, self._loads.route(simulated.request.group, simulated.prompt_tokens).slot)

    def abort(self, simulated: SimulatedRequest) -> None:
        name = simulated.request.id
        if self._migrating.pop(name, None):
            self.started -= 1
        for slot, engine in self.engines.items():
            if name in engine.requests:
                self._take(name, slot)
                self.started -= 1

    def _take(self, name: str, slot: int) -> SimulatedRequest:
        simulated = self.engines[slot].remove(name)
        self._loads.remove(slot, simulated.request.group, simulated.predicted_tokens)
        self.refresh(slot)
        return simulated

    def _put(self, simulated: SimulatedRequest, slot: int) -> None:
        scenario = self.scenario
        context = simulated.prompt_tokens + simulated.generated
        if not simulated.generated and scenario.cache_block and self._loads.siblings(simulated.request.group, slot):
            context %= scenario.cache_block  # the full blocks of the prompt are there
        if simulated.generated:
            simulated.prefill_s = carriage(context, scenario.speeds, scenario.costs).seconds
        else:  # no slot has a cache of it
            simulated.prefill_s = context / scenario.speeds.prefill_tokens_per_s
        self._loads.add(slot, simulated.request.group, simulated.predicted_tokens)
        self.engines[slot].add(simulated)
        self.refresh(slot)
        self.look_again()

    def _on_done(self, slot: int, requests: list[SimulatedRequest]) -> None:
        scenario = self.scenario
        for simulated in requests:
            self.finished += 1
            self._loads.remove(slot, simulated.request.group, simulated.predicted_tokens)
            (self._cut if simulated.num_tokens >= scenario.work.max_tokens else self._ended).append(
                simulated.num_tokens
            )
            group = self._groups.setdefault(simulated.request.group, _Group())
            group.finished += 1
            group.blocks += scenario.blocks(simulated.prompt_tokens) + scenario.blocks(simulated.num_tokens)
            if group.finished == scenario.work.group_size:
                del self._groups[simulated.request.group]
                self._to_score += group.finished
                self._to_score_tokens += group.blocks * scenario.block_tokens
                if not scenario.score:
                    self.on_scored(group.finished, group.blocks * scenario.block_tokens)
        self.refresh(slot)
        self.look_again()
        self.on_finished(requests)

    def on_scored(self, rollouts: int, tokens: int) -> None:
        self._to_score -= rollouts
        self._to_score_tokens -= tokens
        self._ready += rollouts
        self._ready_tokens += tokens

    def on_trained(self, rollouts: int, tokens: int) -> None:
        self.trained += rollouts
        self.trained_tokens += tokens
        self._ready -= rollouts
        self._ready_tokens -= tokens
        self.look_again()

    def to_start(self) -> int:
        """Rollouts that the staleness bound admits and that have not begun."""
        work = self.scenario.work
        ahead = min(work.max_async_level, work.max_off_policy_steps)
        steps = min(self.version + 1 + ahead, work.num_steps)
        return max(0, steps * work.rollouts_per_step - self.started)

    # -- what a policy is told

    def state(self) -> ClusterState:
        scenario, work = self.scenario, self.scenario.work
        unfinished: list[Unfinished] = []
        for slot, engine in self.engines.items():
            engine.catch_up()
            unfinished += [
                Unfinished(
                    name,
                    slot,
                    simulated.prompt_tokens,
                    engine.tokens(simulated),
                    work.max_tokens,
                    simulated.request.group,
                )
                for name, simulated in engine.requests.items()
            ]
        return ClusterState(
            now_s=self.now_s,
            slots=tuple(
                SlotState(slot, roles, self.since_s[slot], slot not in self._changing)
                for slot, roles in self.roles.items()
            ),
            batch=self._batch(),
            trainer=TrainerState(self.formation, True, not self.may_train.is_set(), work.seq_len),
            speeds=scenario.speeds,
            costs=scenario.costs,
            home=scenario.placement,
            limits=scenario.limits,
            unfinished=tuple(unfinished),
            lengths=Lengths(tuple(self._ended), tuple(self._cut), float(work.prompt_tokens)),
            max_tokens=work.max_tokens,
        )

    def _batch(self) -> BatchProgress:
        scenario, work = self.scenario, self.scenario.work
        return BatchProgress(
            step=self.version,
            num_rollouts=work.rollouts_per_step,
            group_size=work.group_size,
            trained=self.trained - self.version * work.rollouts_per_step,
            ready=self._ready,
            ready_tokens=self._ready_tokens,
            partial=sum(group.finished for group in self._groups.values()),
            partial_tokens=sum(group.blocks for group in self._groups.values()) * scenario.block_tokens,
            to_score=self._to_score,
            to_score_tokens=self._to_score_tokens,
            to_start=self.to_start(),
            update=self.num_updates % work.n_minibatches,
            num_updates=work.n_minibatches,
            steps_left=work.num_steps - self.version,
            steps_ahead=min(work.max_async_level, work.max_off_policy_steps),
        )


def in_order(*roles: Role) -> tuple[Role, ...]:
    """Roles in the order in which `SlotState` has them."""
    return tuple(role for role in SPELLED if role in roles)


def without(role: Role, roles: Sequence[Role]) -> tuple[Role, ...]:
    return tuple(held for held in roles if held != role)
