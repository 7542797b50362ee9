"""Asks the policy after events, and has its decisions carried out. Real runs and simulated ones go through this code.

    events  ->  decide(policy, actuator.state())  ->  the actuator's parts, in this order:

    1. rollouts leave with what they have, for generators that are there; then instances end
    2. the trainer resizes               beside it, instances begin on slots that are not about to leave the trainer
    3. instances begin on slots that have left the trainer
    4. rollouts go to the new generators, and generators that have kept them until then end

A generator whose slots join the trainer ends only when the resize is prepared and the trainer stands still for it:
until then it generates on. (Where there is no memory for both, it ends first.)

One decision at a time: events that come meanwhile are looked at together, afterwards. The policy decides in a thread,
so that the event loop goes on meanwhile, however many slots there are to compare. Before weights are published the
slots take the roles of the step that begins, and nothing is decided until the weights are live. A change goes on beside
that: its slots may prepare for long, and the loop does not wait for its end. Weights go live when joiners are there, so
that new rollouts are shared with them; or half a micro-step later, without them. A part that is not done is told in a
sentence; the slots then have the roles that they really have, and the next decision sees those.

It knows no slots and no instances: an `Actuator` has them.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ductile.concurrency.structured import DaemonThreads, gather_all
from ductile.core.instances.instances import Instance, InstanceId, in_order
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.orders import Decision, Migration, Policy, RoleChange, instances_after, layout_after
from ductile.elastic.decision_log import DecisionLog, ExecutedDecision
from ductile.elastic.policy_decision import BadDecision, LateDecision, decide
from ductile.events.decisions import DecisionJournal
from ductile.events.phases import ScorePhase, StepListener, StepPhase
from ductile.fleet.release import Release
from ductile.observe import Recorder

LEAST_REST_S = 0.05
REST = 100.0
"""Seconds without a decision after one that took a second, policy and all: decisions cost 1 % of the time at most."""
MOST_PATIENCE_S = 60.0
"""Longest time without a decision after changes that failed, in seconds. The first failure costs a second, each further
one twice the last."""
GIVE_UP_S = 1.0
"""Seconds that a change has to end once the run has failed."""
MOST_DECIDING_S = 60.0
"""Longest time that a policy may take for a decision; `model` takes some milliseconds."""
KEPT = 1 << 16
_THREADS = DaemonThreads()


class NotDone(Exception):
    """A part of a change could not be done, and the run goes on. The text is a sentence without its full stop."""


class Actuator(Protocol):
    """The slots, of a real run or a simulated one. Parts raise NotDone; any other error of theirs ends the run."""

    @property
    def now_s(self) -> float: ...

    def state(self) -> ClusterState: ...

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

    async def admit(self, instance: Instance) -> None:
        """The instance generates or scores, with the live weights."""
        ...

    async def resize(self, layout: ParallelLayout, release: Release) -> list[str]:
        """The trainer goes on with these slots from a boundary between two micro-steps on.

        release: what is released before that, once all is prepared and no slot trains. Returns a sentence for each part
        of it that was not done.
        """
        ...


def rest_s(took_s: float) -> float:
    """Seconds without a decision after one that took `took_s`."""
    return max(LEAST_REST_S, REST * took_s)


class ElasticController(StepListener):
    def __init__(
        self,
        policy: Policy,
        actuator: Actuator,
        record: Recorder,
        otherwise: Policy | None = None,
        rest_s: Callable[[float], float] = rest_s,
        journal: DecisionJournal | None = None,
    ) -> None:
        """otherwise: asked instead of a policy that has ordered what cannot be; None: that raises BadDecision. journal:
        keeps what is decided, and on what, for `ductile replay`; None keeps nothing."""
        self.num_changes = 0
        self.changes: deque[ExecutedDecision] = deque(maxlen=KEPT)
        """The latest changes."""
        self.decide_s: deque[float] = deque(maxlen=KEPT)
        """Real seconds that each decision took the policy."""
        self.deciding_s = 0.0
        """CPU seconds that all decisions took: the state, the policy and the check of its orders."""
        self.refused = ""
        """Why the policy is not asked any more, as a sentence; empty while it is asked."""
        self._policy, self._actuator, self._log = policy, actuator, DecisionLog(record)
        self._otherwise, self._rest_s, self._journal = otherwise, rest_s, journal
        self._change: asyncio.Task[None] | None = None
        """The change that is under way; None when there is none."""
        self._failed: Exception | None = None
        """What ended the run: nothing is decided after it."""
        self._joined = asyncio.Event()
        self._joined.set()
        self._patience_s = 0.0
        """Seconds that new weights wait for slots of the latest change, from the state that it was decided on."""
        self._on_error: Callable[[BaseException], None] = lambda error: None
        self._publishing = False
        self._asked = True
        """Whether the policy has been asked in this step."""
        self._deciding = asyncio.Lock()
        """Held by the one that asks the policy, which knows no threads, and begins the change that it orders."""
        self._happened = asyncio.Event()
        self._not_before_s = float("-inf")
        self._num_failed = 0

    def notify(self) -> None:
        """Something happened that may matter."""
        self._happened.set()

    def on_phase_end(self, phase: StepPhase) -> None:
        if isinstance(phase, ScorePhase) and phase.by_scorer:
            self.notify()

    @asynccontextmanager
    async def at_work(self, on_error: Callable[[BaseException], None]) -> AsyncGenerator[None]:
        """Meanwhile the policy is asked after events. A change that is under way at the end is given up, and training
        is released. When the block raises, the change is hardly waited for: a slot may hang in the middle of it, and
        all slots are about to be stopped.

        on_error: told at once of what ends the run. When the block ends well all the same, that is raised.
        """
        self._on_error = on_error
        watching, limit_s = asyncio.create_task(self._watch()), None
        try:
            yield
        except BaseException:
            limit_s = GIVE_UP_S
            raise
        finally:
            tasks = [task for task in (watching, self._change) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=limit_s)
            self._actuator.hold_training(False)
        if self._failed is not None:
            raise self._failed

    async def begin_step(self, version: int) -> None:
        """The slots begin to do what the step that begins wants of them; unless they are about to change already, and
        then the next decision is the step's first one. Nothing is decided from then until `go_on`, which comes before
        the next `begin_step`. Waits for a decision that is under way. Raises what has ended the run."""
        self._publishing = True
        async with self._deciding:
            if self._failed is not None:
                raise self._failed
            self._asked = False
            self._actuator.begin(version)
            if self._change is None:
                await self._decide()

    async def joined(self) -> None:
        """Wait for the instances that the change under way begins: until they serve or have failed, or for half a
        micro-step."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await self._joined.wait()

    def go_on(self) -> None:
        """The weights are live."""
        self._publishing = False
        self.notify()

    async def _watch(self) -> None:
        """Decide after each `notify`, until cancelled."""
        try:
            while True:
                await self._happened.wait()
                if (wait_s := self._not_before_s - self._actuator.now_s) > 0:
                    await asyncio.sleep(wait_s)
                    continue  # a change that failed meanwhile has put it off
                self._happened.clear()
                async with self._deciding:
                    if not self._publishing and self._change is None and self._failed is None:
                        await self._decide()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        self._actuator.hold_training(False)
        self._on_error(error)

    async def _decide(self) -> None:
        """Ask the policy, and begin the change that it orders, if any. The caller holds `_deciding`."""
        actuator, began_s = self._actuator, time.thread_time()
        at_s, state = actuator.now_s, replace(actuator.state(), asked=self._asked, change=self.num_changes + 1)
        self._asked = True
        state_s = time.thread_time() - began_s
        decision, deciding_s = await self._ask(state)
        # Slots that train hear of a migration after their micro-steps: training that waited waits until they have.
        self._actuator.hold_training(decision.hold_training or (state.trainer.held and bool(decision.migrations)))
        took_s = state_s + deciding_s
        self.deciding_s += took_s
        self._not_before_s = actuator.now_s + self._rest_s(took_s)
        if gone := self._not_ready(state, decision):
            self._log.dropped(decision, gone, at_s)
            self._asked = state.asked  # where it was the step's first decision, the next one is
            self.notify()
            return
        self._log.decided(decision, at_s)
        if decision.orders:
            delta, self._patience_s = _RoleDelta.of(state, decision), state.patience_s
            if delta.begin:
                self._joined.clear()
            actuator.changing(decision.moves)
            self._change = asyncio.create_task(self._make(state, decision, delta, at_s))

    def _not_ready(self, state: ClusterState, decision: Decision) -> set[int]:
        """Slots of the decision that were lost while the policy decided. They come back by themselves."""
        if not decision.orders:
            return set()
        now = self._actuator.state()
        ready = {slot.slot for slot in now.slots if slot.ready}
        moved = {move.slot for move in decision.moves}
        ends = {order.source for order in decision.migrations} | {order.target for order in decision.migrations}
        slots = moved.union(*(each.slots for each in state.instances if each.id in ends))
        return {slot.slot for slot in state.slots if slot.ready and slot.slot in slots} - ready

    async def _make(self, state: ClusterState, decision: Decision, delta: "_RoleDelta", at_s: float) -> None:
        """Carry the change out, and note what became of it. The loop does not wait for this task."""
        try:
            failures = await self._carry_out(state, decision, delta)
            change = ExecutedDecision(at_s, self._actuator.now_s - at_s, decision, tuple(failures))
            self._note(change, state.instances)
        except Exception as error:
            self._fail(error)
        finally:
            self._joined.set()
            self._change = None
            self.notify()

    def _note(self, change: ExecutedDecision, before: Sequence[Instance]) -> None:
        self.changes.append(change)
        self.num_changes += 1
        self._log.changed(change, before, self._actuator.state().instances)
        self._num_failed = self._num_failed + 1 if change.failures else 0
        if change.failures:
            # The same state would give the same decision, at once and again and again.
            self._not_before_s = self._actuator.now_s + min(MOST_PATIENCE_S, 2.0 ** (self._num_failed - 1))

    # -- decisions

    async def _ask(self, state: ClusterState) -> tuple[Decision, float]:
        """The decision, and the CPU seconds that it took."""
        try:
            return await self._decision(state)
        except BadDecision as error:
            if self._otherwise is None:
                raise
            self.refused = self._log.refused(error)
            self._policy, self._otherwise = self._otherwise, None
        return await self._decision(state)

    async def _decision(self, state: ClusterState) -> tuple[Decision, float]:
        """Raises BadDecision."""
        asking = asyncio.get_running_loop().run_in_executor(_THREADS, _timed, self._policy, state)
        try:
            async with asyncio.timeout(MOST_DECIDING_S):
                decision, took_s, cpu_s = await asking
        except TimeoutError as error:
            why = f"at {state.now_s:.1f} s it was asked, and {MOST_DECIDING_S:g} s later it had not decided"
            if self._journal:
                self._journal.late(state, why)
            raise LateDecision(why) from error
        except BadDecision as error:
            if self._journal:
                self._journal.refused(state, str(error))
            raise
        if self._journal:
            self._journal.decided(state, decision)
        self.decide_s.append(took_s)
        return decision, cpu_s

    # -- changes

    async def _carry_out(self, state: ClusterState, decision: Decision, delta: "_RoleDelta") -> list[str]:
        """Carry the parts out. Returns a sentence for each that was not done."""
        actuator = self._actuator
        later = {each for each in delta.begin if not delta.leaves_trainer.isdisjoint(each.slots)}
        waiting = {each.id for each in state.instances if not delta.waiting.isdisjoint(each.slots)}

        async def begin() -> list[str]:
            said = await _done(*(actuator.admit(each) for each in delta.begin if each not in later))
            if not later:
                self._joined.set()
            return said

        async def resize() -> tuple[bool, list[str]]:
            if not delta.resizes:
                return True, []
            try:
                return True, await actuator.resize(delta.layout, delta.release_of(waiting))
            except NotDone as error:
                return False, [str(error)]

        try:
            failures = await actuator.release(delta.release_of({each.id for each in state.instances} - waiting))
            self._actuator.hold_training(decision.hold_training)
            (resized, said), others = await gather_all(resize(), begin())
            failures += [*said, *others]
            if resized:
                failures += await _done(*(actuator.admit(each) for each in delta.begin if each in later))
            self._joined.set()
            failures += await self._finish_migrations(delta)
        finally:
            actuator.changing(())
        return failures

    async def _finish_migrations(self, delta: "_RoleDelta") -> list[str]:
        """Have rollouts migrate to new generators that are really there. One that keeps rollouts goes on generating."""
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
class _RoleDelta:
    """What a decision changes: the instances, and the layout of the trainer."""

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

    @staticmethod
    def of(state: ClusterState, decision: Decision) -> "_RoleDelta":
        before, layout = state.trainer.layout, layout_after(state, decision)
        there = instances_after(state, decision)
        begin = in_order({*there}.difference(state.instances))
        joining = {each.id for each in begin if each.role == "generate"}
        joins_trainer = frozenset(layout.slots).difference(before.slots)
        return _RoleDelta(
            end=in_order({*state.instances}.difference(there)),
            begin=begin,
            migrations=tuple(order for order in decision.migrations if order.target not in joining),
            late_migrations=tuple(order for order in decision.migrations if order.target in joining),
            layout=layout,
            resizes=layout != before,
            waiting=joins_trainer if state.limits.may_share else frozenset(),
            leaves_trainer=frozenset(before.slots).difference(layout.slots),
        )

    @property
    def keeping(self) -> frozenset[InstanceId]:
        """Generators whose rollouts go to new generators: they cannot end before the new ones are there."""
        return frozenset(order.source for order in self.late_migrations)

    def release_of(self, instances: Collection[InstanceId]) -> Release:
        """What of these instances can be released before new generators are there."""
        return Release(
            tuple(order for order in self.migrations if order.source in instances),
            tuple(each for each in self.end if each.id in instances and each.id not in self.keeping),
        )


def _timed(policy: Policy, state: ClusterState) -> tuple[Decision, float, float]:
    """What `decide` returns, and the CPU seconds that it took. Raises BadDecision."""
    began_s = time.thread_time()
    return *decide(policy, state), time.thread_time() - began_s


async def _done(*parts: Coroutine[object, object, None]) -> list[str]:
    """Run all parts at once, and all of them to their end. Returns a sentence for each that was not done."""
    outcomes = await asyncio.gather(*parts, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, NotDone):
            raise outcome
    return [str(outcome) for outcome in outcomes if isinstance(outcome, NotDone)]
