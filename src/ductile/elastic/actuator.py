"""The slots of a live run, as the controller sees and moves them (`ductile.elastic.execution.Actuator`).

Every field of the state is a fact: roles as the slots were told, books of the step (`StepAccounting`), sequences as
their generators said last, speeds as measured. What a part of a change cost is measured, too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from ductile.cluster.cluster import Cluster
from ductile.concurrency.listeners import Listeners
from ductile.concurrency.structured import gather_all
from ductile.core.instances.instances import Instance, slots_on
from ductile.core.instances.placement import SPELLED, Role, slots_of
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.costs.cost_model import CostModel
from ductile.core.scheduling.facts.cluster_state import ClusterState, SlotState, TrainerState, weights_are_near
from ductile.core.scheduling.facts.profile import Setting
from ductile.core.scheduling.orders import Release, RoleChange
from ductile.elastic.activity import SlotActivity
from ductile.elastic.execution import NotDone
from ductile.elastic.recovery import Recovery
from ductile.elastic.situation import pending
from ductile.elastic.step_accounting import StepAccounting
from ductile.elastic.trainer_resizer import CannotResize, ResizeNotDone, TrainerResizer
from ductile.fleet.run_roles import RunRoles
from ductile.messages.resizes import SlotPhase
from ductile.messages.workers import Finished
from ductile.roles import Failure, TrainerLost
from ductile.transport.mailbox import Died, SlotEvent

WAITING: frozenset[SlotPhase] = frozenset({"carrier", "groups"})
"""Phases of a resize in which slots wait for each other and keep no core busy."""
MAX_HELD_S = 2.0
"""Longest time that the trainer is held for rollouts that leave and generators that end. They take a fraction of it."""


class LiveActuator:
    def __init__(
        self,
        setting: Setting,
        cluster: Cluster,
        fleet: RunRoles,
        resizer: TrainerResizer,
        recovery: Recovery,
        activity: SlotActivity,
        accounting: StepAccounting,
        measured: CostModel,
        clock: Callable[[], float],
    ) -> None:
        """clock: 0 when the slots had their roles, as in the run's profiles."""
        self._setting, self._cluster, self._fleet = setting, cluster, fleet
        self._trainer, self._generators = fleet.trainer, fleet.generators
        self._resizer, self._recovery, self._activity = resizer, recovery, activity
        self._accounting, self._measured, self._clock = accounting, measured, clock
        self._moves: tuple[RoleChange, ...] = ()
        self._begun = -1
        """Version of the step that has begun; -1 before the first."""
        self._since_s: dict[int, float] = {}
        self.on_change = Listeners[[]]()
        """Told when a completion has ended, a slot has died, or a command waits for a trainer that is parked."""
        cluster.mailbox.subscribe(self._on_event)
        self._trainer.parking.on_wanted.add(self.on_change)
        self._trainer.parking.on_moved.add(lambda travel: measured.took(travel.what, travel.seconds))

    @property
    def now_s(self) -> float:
        return self._clock()

    # -- what is told to policies

    def state(self) -> ClusterState:
        changing = {move.slot for move in self._moves}
        there = {*self._cluster.slots} - {*self._cluster.mailbox.lost} - self._recovery.under_way
        # What is on a slot that is being started again is nothing that a policy could move.
        instances = tuple(each for each in self._fleet.instances if there.issuperset(each.slots))
        names = {each.id for each in instances}
        return ClusterState(
            now_s=self.now_s,
            slots=tuple(
                SlotState(slot, roles, self._since_s.get(slot, 0.0), slot not in changing and self._serves(slot, roles))
                for slot in self._cluster.slots
                if slot in there
                for roles in [self._roles(slot)]
            ),
            batch=self._accounting.batch(pending(self._fleet), self._generators.num_waiting),
            # A resize waits for the boundary that it needs.
            trainer=TrainerState(
                self._trainer.layout,
                not self._resizer.under_way,
                self._trainer.is_held or self._trainer.parking.is_parked,
                self._setting.seq_len,
                self._resizer.rules,
                self.wanted,
            ),
            speeds=self._measured.speeds(),
            costs=self._measured.costs(),
            home=self._setting.home,
            limits=self._setting.limits,
            instances=instances,
            unfinished=tuple(each for each in self._generators.unfinished() if each.instance in names),
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
        return all(slot in pool.slots for role, pool in self._fleet.pools.items() if role in roles)

    # -- what the controller has it do

    @property
    def wanted(self) -> bool:
        return self._trainer.parking.is_wanted

    def begin(self, version: int) -> None:
        """The loop's books are those of the new step already."""
        self._begun = version

    def hold_training(self, held: bool) -> None:
        if held != self._trainer.is_held:
            self._trainer.hold_training(held)
            self._activity.look_again()

    def changing(self, moves: Sequence[RoleChange]) -> None:
        for move in self._moves:
            self._since_s[move.slot] = self.now_s
            for pool in self._fleet.pools.values():
                if instance := pool.on(move.slot):
                    pool.resume(instance)  # nothing happens unless it was to leave
        self._moves = tuple(moves)
        for move in moves:
            if "generate" not in move.after and (instance := self._generators.on(move.slot)):
                self._generators.drain(instance)
        self._activity.changing([move.slot for move in moves])

    async def release(self, release: Release) -> list[str]:
        """A slot that trains hears of it between two micro-steps, and of all of it between the same two: each part by
        itself would wait for a micro-step. What takes longer than that is worth, such as a slot that hangs, or weights
        that go live first, goes on without holding the trainer."""
        if not self._trains(release):
            return await self._fleet.release(release)
        held, released = asyncio.Event(), asyncio.Event()

        async def keep_still() -> None:
            async with self._trainer.boundary(needs_state=False):
                held.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(MAX_HELD_S):
                        await released.wait()

        async def work() -> list[str]:
            await held.wait()
            try:
                return await self._fleet.release(release)
            finally:
                released.set()

        _, failures = await gather_all(keep_still(), work())
        return failures

    async def park(self) -> None:
        """The weights stay published meanwhile where no slot that joins could have them from a generator."""
        try:
            await self._trainer.park(self._begun, keeps_weights=not self._generators.slots)
        except TrainerLost:
            raise
        except Failure as error:
            raise NotDone(f"the trainer's devices are not lent: {error}") from error

    async def unpark(self) -> None:
        await self._trainer.unpark()

    def _trains(self, release: Release) -> bool:
        """True when an instance that has a part in the release shares a slot with the trainer."""
        ids = {name for order in release.migrations for name in (order.source, order.target)}
        instances = [each for each in self._fleet.instances if each in release.instances or each.id in ids]
        return not {*slots_on(instances)}.isdisjoint(self._trainer.layout.slots)

    async def admit(self, instance: Instance, after: Callable[[], Awaitable[None]] | None = None) -> None:
        """On a CPU the instance gets ready beside the resize by which its slots leave the trainer. A GPU's slot would
        do that between two micro-steps, and hold the others up."""
        pool = self._fleet.pools.get(instance.role)
        if pool is None:
            where = slots_of(instance.slots)
            raise NotDone(f"{where} cannot score: this run has no scorer (cluster.component_placement.inference)")
        began_s, rules = self.now_s, self._resizer.rules
        is_near = weights_are_near(rules.topology, self._fleet.instances, self._trainer.layout, instance.slots)

        async def left() -> None:
            """Wait until the slots have left. What comes before that costs nothing: it is done beside the resize."""
            nonlocal began_s
            if after is not None:
                await after()
                began_s = self.now_s

        is_beside = after is not None and all(self._cluster.devices[slot] == "cpu" for slot in instance.slots)
        if not is_beside:
            await left()
        try:
            await self._fleet.admit(instance, left if is_beside else None)
        except Failure as error:
            # Whether the run can go on without a lost slot is decided elsewhere (`Cluster.ends_without`).
            raise NotDone(str(error)) from error
        self._measured.took("assign" if is_near else "assign_across", self.now_s - began_s)

    async def resize(self, layout: ParallelLayout, release: Release) -> list[str]:
        slots = (*self._trainer.layout.slots, *layout.slots)
        try:
            resized = await self._resizer.resize_to(layout, release)
        except (CannotResize, ResizeNotDone) as error:
            raise NotDone(str(error)) from error
        if resized.outcome == "rolled_back":
            raise NotDone("; ".join([*resized.not_released, resized.sentence.rstrip(".")]))
        if resized.outcome == "resized":
            # What the slots did in the pause is in its seconds already; what was released in it has costs of its own.
            beside = {phase: resized.slot_seconds.get(phase, 0.0) for phase in resized.beside}
            still_s = resized.pause_s - resized.seconds.get("release", 0.0)
            took = "resize_across" if self._resizer.rules.topology.spans(slots) else "resize"
            self._measured.took(took, still_s + self._taken_s(beside, layout))
            # The slots' own work: how long messages wait for micro-steps depends on how long those are.
            self._measured.took("prepare", sum(beside.values()))
        return list(resized.not_released)

    def _taken_s(self, beside: Mapping[str, float], layout: ParallelLayout) -> float:
        """Return the seconds that preparing took from training and generating. On a CPU it runs on the slot's own core,
        beside them; beside a GPU's work it counts as free."""
        if any(self._cluster.devices[slot] != "cpu" for slot in layout.slots):
            return 0.0
        return sum(seconds for phase, seconds in beside.items() if phase not in WAITING)

    # -- what happens

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, Finished | Died):
            self.on_change()
