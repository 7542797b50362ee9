"""The slots of a live run, as the controller sees and moves them (`ductile.elastic.controller.Actuator`).

Every field of the state is a fact: roles as the slots were told, books of the loop (`Monitor`), sequences as their
generators said last, speeds as measured. What a part of a change cost is measured, too.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ductile.cluster.cluster import Cluster
from ductile.core.instances.instances import Instance, InstanceId, Serving, in_order
from ductile.core.instances.placement import SPELLED, Role, slots_of
from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.core.scheduling.cost_model import CostModel, FixedCost
from ductile.core.scheduling.orders import Migration, RoleChange
from ductile.core.scheduling.profile import Setting
from ductile.core.scheduling.state import ClusterState, SlotState, TrainerState
from ductile.elastic.activity import Situation, SlotActivity
from ductile.elastic.controller import NotDone
from ductile.elastic.monitor import Monitor
from ductile.elastic.recovery import Recovery
from ductile.elastic.trainer_resizer import TrainerResizer
from ductile.fleet.generators import RemoteGenerators
from ductile.fleet.scorer import RemoteScorer
from ductile.fleet.trainer import RemoteTrainer
from ductile.messages.control import RunFailed, Unfit
from ductile.messages.workers import Died, EngineStats, Event, Finished, SlotPhase
from ductile.roles import Failure

WAITING: frozenset[SlotPhase] = frozenset({"carrier", "groups"})
"""Phases of a resize in which slots wait for each other and keep no core busy."""


@dataclass(frozen=True, slots=True)
class Crew:
    """What a run has, once its slots have their roles."""

    cluster: Cluster
    trainer: RemoteTrainer
    generators: RemoteGenerators
    scorer: RemoteScorer | None
    activity: SlotActivity
    resizer: TrainerResizer
    recovery: Recovery
    settings: Mapping[Serving, Mapping[str, object]]
    """Settings of the roles, for slots that take them on."""

    @property
    def pools(self) -> dict[Serving, RemoteGenerators | RemoteScorer]:
        return pools_of(self.generators, self.scorer)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All generators and scorers, as things are now."""
        return in_order(instance for pool in self.pools.values() for instance in pool.all_instances)

    @property
    def slots_by_role(self) -> Mapping[str, tuple[int, ...]]:
        """Slots by role, as things are now."""
        return {"train": self.trainer.layout.slots, **{role: pool.slots for role, pool in self.pools.items()}}


def pools_of(
    generators: RemoteGenerators, scorer: RemoteScorer | None
) -> dict[Serving, RemoteGenerators | RemoteScorer]:
    """The generators and, where the run has any, the scorers."""
    scorers: dict[Serving, RemoteGenerators | RemoteScorer] = {"score": scorer} if scorer else {}
    return {"generate": generators, **scorers}


class LiveActuator:
    def __init__(
        self,
        setting: Setting,
        crew: Crew,
        monitor: Monitor,
        measured: CostModel,
        clock: Callable[[], float],
    ) -> None:
        """clock: 0 when the slots had their roles, as in the run's profiles."""
        self._setting, self._crew = setting, crew
        self._cluster, self._trainer, self._generators = crew.cluster, crew.trainer, crew.generators
        self._dp_replicate = crew.trainer.layout.dims.dp_replicate
        """Copies of the state that the run began with, as its config says."""
        self._monitor, self._measured, self._clock = monitor, measured, clock
        self._moves: tuple[RoleChange, ...] = ()
        self._held = False
        self._trained_in: int | None = None
        """The trainer's epoch at the latest micro-step."""
        self._since_s: dict[int, float] = {}
        self._notify: Callable[[], None] = lambda: None
        crew.activity.situation = self._situation
        crew.trainer.on_micro_step(self._on_micro_step)
        crew.cluster.mailbox.subscribe(self._on_event)

    def on_change(self, notify: Callable[[], None]) -> None:
        """Have `notify()` called whenever something happened that may matter to a policy."""
        self._notify = notify

    @property
    def now_s(self) -> float:
        return self._clock()

    # -- what is told to policies

    def state(self) -> ClusterState:
        changing = {move.slot for move in self._moves}
        return ClusterState(
            now_s=self.now_s,
            slots=tuple(
                SlotState(slot, roles, self._since_s.get(slot, 0.0), slot not in changing and self._serves(slot, roles))
                for slot in self._cluster.slots
                if slot not in self._cluster.mailbox.lost and slot not in self._crew.recovery.under_way
                for roles in [self._roles(slot)]
            ),
            batch=self._monitor.batch(),
            # A resize waits for the boundary that it needs.
            trainer=TrainerState(
                self._trainer.layout,
                not self._crew.resizer.under_way,
                self._held,
                self._monitor.loop.schedule.seq_len,
                self._dp_replicate,
            ),
            speeds=self._measured.speeds(),
            costs=self._measured.costs(),
            home=self._setting.home,
            limits=self._setting.limits,
            instances=self._crew.instances,
            unfinished=self._generators.unfinished(),
            lengths=self._generators.lengths(),
            max_tokens=self._setting.max_tokens,
            knows_generation=self._measured.knows_generation,
        )

    def _roles(self, slot: int) -> tuple[Role, ...]:
        held = {*self._cluster.mailbox.roles(slot)} - {"train"}
        if slot in self._trainer.layout.slots:
            held.add("train")
        return tuple(role for role in SPELLED if role in held)

    def _serves(self, slot: int, roles: Sequence[Role]) -> bool:
        """A slot may have got a role and wait for its first weights."""
        return all(slot in pool.slots for role, pool in self._crew.pools.items() if role in roles)

    def _situation(self) -> Situation:
        return Situation(self._monitor.to_start > 0, self._monitor.samples_ready > 0, self._held)

    # -- what the controller has it do

    def begin(self, version: int) -> None:
        """The loop's books are those of the new step already."""

    def hold_training(self, held: bool) -> None:
        if held != self._held:
            self._held = held
            self._trainer.hold_training(held)
            self._crew.activity.look_again()

    def changing(self, moves: Sequence[RoleChange]) -> None:
        for move in self._moves:
            self._since_s[move.slot] = self.now_s
            for pool in self._crew.pools.values():
                if instance := pool.on(move.slot):
                    pool.resume(instance)  # nothing happens unless it was to leave
        self._moves = tuple(moves)
        for move in moves:
            if "generate" not in move.after and (instance := self._generators.on(move.slot)):
                self._generators.drain(instance)
        self._crew.activity.changing([move.slot for move in moves])

    async def migrate(self, migrations: Sequence[Migration]) -> None:
        contexts = {rollout.id: rollout.context_tokens for rollout in self._generators.unfinished()}
        began_s = self.now_s
        async with self._or_not_done():
            results = await self._generators.migrate(migrations)
        # A target takes caches in one after another, several targets at once.
        taken_in = Counter[InstanceId]()
        for result in results:
            if result.instance is not None and result.instance != result.order.source:
                taken_in[result.instance] += contexts.get(result.order.id, 0) if result.with_cache else 0
        if taken_in:  # otherwise all had ended, and no generator was asked
            self._measured.migrated(max(taken_in.values()), self.now_s - began_s)

    async def dismiss(self, instance: Instance) -> None:
        if instance.role == "generate":
            left = sum(rollout.instance == instance.id for rollout in self._generators.unfinished())
            if left:  # they could not migrate, and the change is not to wait for their end
                raise NotDone(f"{instance.id} goes on generating: {left} of its rollouts could not migrate")
        async with self._or_not_done(), self._measuring("release"):
            await self._crew.pools[instance.role].dismiss(instance)

    async def admit(self, instance: Instance) -> None:
        pool = self._crew.pools.get(instance.role)
        if pool is None:
            where = slots_of(instance.slots)
            raise NotDone(f"{where} cannot score: this run has no scorer (cluster.component_placement.inference)")
        async with self._or_not_done(), self._measuring("assign"):
            await pool.admit(instance, self._crew.settings[instance.role])

    async def resize(self, layout: ParallelLayout, leave: Callable[[], Awaitable[None]]) -> None:
        try:
            resized = await self._crew.resizer.resize_to(layout, leave)
        except (Unfit, RunFailed) as error:
            raise NotDone(str(error)) from error
        if resized.outcome == "rolled_back":
            raise NotDone(resized.sentence.rstrip("."))
        if resized.outcome == "resized":
            # What was done in the pause is in its seconds already.
            beside = {phase: resized.slot_seconds.get(phase, 0.0) for phase in resized.beside}
            self._measured.took("resize", resized.pause_s + self._taken_s(beside, layout))
            # The slots' own work: how long messages wait for micro-steps depends on how long those are.
            self._measured.took("prepare", sum(beside.values()))

    def _taken_s(self, beside: Mapping[str, float], layout: ParallelLayout) -> float:
        """What preparing took from training and generating. On a CPU it runs on the slot's own core, beside them; a GPU
        does not notice."""
        if any(self._cluster.devices[slot] != "cpu" for slot in layout.slots):
            return 0.0
        return sum(seconds for phase, seconds in beside.items() if phase not in WAITING)

    # -- what happens

    def _on_micro_step(self, tokens_fullest: int, num_ranks: int, seconds: float, tokens_all: int) -> None:
        # By epoch: a resize there and back ends on the same slots, and micro-steps come before a resize is finalized.
        first, self._trained_in = self._trainer.epoch != self._trained_in, self._trainer.epoch
        (self._measured.first_micro_step if first else self._measured.micro_step)(tokens_fullest, num_ranks, seconds)
        self._notify()

    def _on_event(self, slot: int, event: Event) -> None:
        match event:
            case Finished() | Died():
                self._notify()
            case EngineStats(decoded=decoded, prefilled=prefilled):
                knew = self._measured.knows_generation
                self._measured.decoded(decoded)
                self._measured.prefilled(*prefilled)
                if self._measured.knows_generation and not knew:
                    self._notify()
            case _:
                pass

    @asynccontextmanager
    async def _or_not_done(self) -> AsyncIterator[None]:
        """Turn a slot's failure into NotDone. Whether the run can go on without a lost slot is decided elsewhere
        (`Cluster.depends_on`)."""
        try:
            yield
        except Failure as error:
            raise NotDone(str(error)) from error

    @asynccontextmanager
    async def _measuring(self, what: FixedCost) -> AsyncIterator[None]:
        began_s = self.now_s
        yield
        self._measured.took(what, self.now_s - began_s)
