"""Carries a decision out. Its parts come in this order:

    1. rollouts leave with what they have, for generators that are there; then instances end. A trainer whose slots have
       lent their devices gets its state back
    2. the trainer resizes               beside it, instances begin
    3. those on slots that have left the trainer take work
    4. rollouts go to the new generators, and generators that have kept them until then end

Where slots are about to lend their devices, the trainer's state is parked first, and instances begin on them after
that: a device never has two roles.

A generator whose slots join the trainer ends only when the resize is prepared and the trainer stands still for it:
until then it generates on. (Where there is no memory for both, it ends first.) A part that is not done is told in a
sentence; the slots then have the roles that they really have, and the next decision sees those.

It knows no slots and no instances: an `Actuator` has them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ductile.concurrency.structured import gather_all
from ductile.core.instances.instances import Instance, InstanceId, in_order
from ductile.core.instances.placement import slots_of
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.orders import (
    Decision,
    Migration,
    Release,
    RoleChange,
    instances_after,
    layout_after,
    lending_after,
    roles_after,
)


class NotDone(Exception):
    """A part of a change could not be done, and the run goes on. The text is a sentence without its full stop."""


class Actuator(Protocol):
    """The slots, of a real run or a simulated one. Parts raise NotDone; any other error of theirs ends the run."""

    @property
    def now_s(self) -> float: ...

    def state(self) -> ClusterState: ...

    @property
    def wanted(self) -> bool:
        """True while a command waits for the trainer's state, which is parked."""
        ...

    def begin(self, version: int) -> None:
        """The trainer has this version, and is about to publish it: the step that trains it begins."""
        ...

    def hold_training(self, held: bool) -> None:
        """Hold training, or let it go on: no micro-step begins while it is held."""
        ...

    def changing(self, moves: Sequence[RoleChange]) -> None:
        """These slots, and no others, change roles. A generator that is about to end gets no new requests."""
        ...

    async def release(self, release: Release) -> list[str]:
        """Rollouts migrate, but for those that have ended meanwhile; then instances generate or score no more. Returns
        a sentence, without its full stop, for each part that was not done."""
        ...

    async def park(self) -> None:
        """Park the trainer's state in host memory, once the version is published that has begun. All that needs it
        waits from then on, until `unpark`."""
        ...

    async def unpark(self) -> None:
        """Bring the trainer's state back to its slots, where no generator is left. Nothing happens when it is there."""
        ...

    async def admit(self, instance: Instance, after: Callable[[], Awaitable[None]] | None = None) -> None:
        """The instance generates or scores, with the live weights.

        after: returns when its slots have left the trainer: no earlier does it take work. Raises NotDone when they do
        not leave it. None: they are not about to.
        """
        ...

    async def resize(self, layout: ParallelLayout, release: Release) -> list[str]:
        """Have the trainer go on in this layout from a boundary between two micro-steps on.

        release: what is released before that, once all is prepared and no slot trains. Returns a sentence for each part
        of it that was not done.
        """
        ...


class Execution:
    """A decision that is being carried out, on the state that it was made for."""

    def __init__(self, actuator: Actuator, state: ClusterState, decision: Decision) -> None:
        self.joined = asyncio.Event()
        """The instances that the decision begins serve, or have failed."""
        self.patience_s = state.patience_s
        """Seconds that new weights wait for them."""
        self._actuator, self._state, self._decision = actuator, state, decision
        self._delta = RoleDelta.of(state, decision)
        if not self._delta.begin:
            self.joined.set()

    async def run(self) -> list[str]:
        """Carry the parts out. Returns a sentence, without its full stop, for each that was not done."""
        state, delta, actuator = self._state, self._delta, self._actuator
        lent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        later = {each for each in delta.begin if not delta.leaves_trainer.isdisjoint(each.slots)}
        waiting = {each.id for each in state.instances if not delta.waiting.isdisjoint(each.slots)}
        resized: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def left(instance: Instance) -> None:
            if not await asyncio.shield(resized):
                raise NotDone(f"{instance.id} does not begin, as its slots train on")

        async def park() -> None:
            """Tell those that wait for it why the devices are not lent; "" when they are."""
            try:
                await actuator.park()
            except BaseException as error:
                lent.set_result(str(error))
                if not isinstance(error, NotDone):
                    raise
            else:
                lent.set_result("")

        async def admit(instance: Instance) -> None:
            if not delta.lending.isdisjoint(instance.slots) and (why := await asyncio.shield(lent)):
                raise NotDone(f"{instance.id} does not begin: {why}")
            await actuator.admit(instance, partial(left, instance) if instance in later else None)

        async def begin() -> list[str]:
            lending = [park()] if delta.parks else []
            failures = await _done(*map(admit, delta.begin), *lending)
            if delta.parks and not actuator.state().lending:
                await actuator.unpark()  # none began on the devices, and nobody would give them back
            self.joined.set()
            return failures

        async def resize() -> list[str]:
            try:
                failures = await actuator.resize(delta.layout, delta.release_of(waiting)) if delta.resizes else []
            except NotDone as error:
                resized.set_result(False)
                return [str(error)]
            resized.set_result(True)
            return failures

        try:
            failures = await actuator.release(delta.release_of({each.id for each in state.instances} - waiting))
            if delta.unparks:
                if still := actuator.state().lending:
                    why = f"the trainer has not got its devices back: {slots_of(still)} still generate"
                    return [*failures, why]
                await actuator.unpark()
            actuator.hold_training(self._decision.hold_training)
            if not delta.parks and not lent.done():
                lent.set_result("")
            of_resize, of_begin = await gather_all(resize(), begin())
            failures += [*of_resize, *of_begin, *await self._finish_migrations()]
        finally:
            actuator.changing(())
            self.joined.set()
        return failures

    async def _finish_migrations(self) -> list[str]:
        """Have rollouts migrate to new generators that are really there. One that keeps rollouts goes on generating."""
        delta = self._delta
        if not delta.late_migrations:
            return []
        there = {each.id for each in self._actuator.state().instances}
        missed = {order.source for order in delta.late_migrations if order.target not in there}
        leaving = [each for each in delta.end if each.id in delta.keeping]
        staying = [
            f"{each.id} goes on generating, as its rollouts have nowhere to go" for each in leaving if each.id in missed
        ]
        release = Release(
            tuple(order for order in delta.late_migrations if order.target in there),
            tuple(each for each in leaving if each.id not in missed),
        )
        return [*staying, *await self._actuator.release(release)]


@dataclass(frozen=True, slots=True)
class RoleDelta:
    """Difference that a decision makes: the instances, and the layout of the trainer."""

    end: tuple[Instance, ...]
    """Instances that are there now and are not to be."""
    begin: tuple[Instance, ...]
    """Instances that are to be there and are not yet."""
    migrations: tuple[Migration, ...]
    """Migrations to generators that are there."""
    late_migrations: tuple[Migration, ...]
    """Migrations to generators that begin: they come last."""
    layout: ParallelLayout
    resizes: bool
    waiting: frozenset[int]
    """Slots that join the trainer, and whose instances end only when it stands still."""
    leaves_trainer: frozenset[int]
    lending: frozenset[int]
    """Slots that are to lend their devices afterwards."""
    parks: bool
    """The trainer's state is to be parked."""
    unparks: bool
    """It is to come back."""

    @staticmethod
    def of(state: ClusterState, decision: Decision) -> "RoleDelta":
        before, layout = state.trainer.layout, layout_after(state, decision)
        there = instances_after(state, decision)
        begin = in_order({*there}.difference(state.instances))
        joining = {each.id for each in begin if each.role == "generate"}
        joins_trainer = frozenset(layout.slots).difference(before.slots)
        lending = frozenset(lending_after(state, roles_after(state, decision)))
        return RoleDelta(
            end=in_order({*state.instances}.difference(there)),
            begin=begin,
            migrations=tuple(order for order in decision.migrations if order.target not in joining),
            late_migrations=tuple(order for order in decision.migrations if order.target in joining),
            layout=layout,
            resizes=layout != before,
            waiting=joins_trainer if state.limits.may_share else frozenset(),
            leaves_trainer=frozenset(before.slots).difference(layout.slots),
            lending=lending,
            parks=bool(lending) and not state.lending,
            unparks=bool(state.lending) and not lending,
        )

    @property
    def keeping(self) -> frozenset[InstanceId]:
        """Generators whose rollouts go to new generators: they cannot end before the new ones are there."""
        return frozenset(order.source for order in self.late_migrations)

    def release_of(self, instances: Collection[InstanceId]) -> Release:
        """Return what of these instances can be released before new generators are there."""
        return Release(
            tuple(order for order in self.migrations if order.source in instances),
            tuple(each for each in self.end if each.id in instances and each.id not in self.keeping),
        )


async def _done(*parts: Coroutine[object, object, None]) -> list[str]:
    """Run all parts at once, and all of them to their end. Returns a sentence for each that was not done."""
    outcomes = await asyncio.gather(*parts, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, NotDone):
            raise outcome
    return [str(outcome) for outcome in outcomes if isinstance(outcome, NotDone)]
