"""Asks the policy after events, and has its decisions carried out. Real runs and simulated ones go through this code.

    events  ->  decide(policy, actuator.state())  ->  Execution(decision).run()

One decision at a time: events that come meanwhile are looked at together, afterwards. The policy decides in a thread,
so that the event loop goes on meanwhile, however many slots there are to compare. Before weights are published the
slots take the roles of the step that begins, and nothing is decided until the weights are live. A change goes on beside
that: its slots may prepare for long, and the loop does not wait for its end. Weights go live when joiners are there, so
that new rollouts are shared with them; or half a micro-step later, without them.

Slots that are to be gone (`emptied`) come first: until they hold nothing the policy is not asked, and what it sees and
returns slots to is without them from then on (`ductile.core.scheduling.drains`).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from ductile.concurrency.structured import DaemonThreads
from ductile.core.instances.instances import Instance
from ductile.core.scheduling.drains import (
    CannotDrain,
    DrainStep,
    RoleMoves,
    home_without,
    moves_of,
    plan_drain,
    plan_return,
)
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.orders import Decision, Policy
from ductile.core.scheduling.policies.static import InTurns, Static
from ductile.elastic.decision_log import DecisionLog, ExecutedDecision
from ductile.elastic.execution import Actuator, Execution
from ductile.elastic.policy_decision import BadDecision, LateDecision, decide
from ductile.events.decisions import DecisionJournal
from ductile.events.phases import ScorePhase, StepListener, StepPhase
from ductile.observe import Recorder

MIN_REST_S = 0.05
"""Shortest time without a decision after the one before."""
REST_FACTOR = 25.0
"""Seconds without a decision after one that took a second, policy and all: decisions have 4 % of the time of one of the
orchestrator's cores at most. Late ones cost more: while a step's last rollouts end, most slots wait for a decision."""
MAX_BACKOFF_S = 60.0
"""Longest time without a decision after changes that failed. The first failure costs a second, each further one twice
the last."""
MAX_DECIDING_S = 60.0
"""Longest time that a policy may take for a decision; `model` takes some milliseconds."""
DRAIN_RETRY_S, MAX_DRAIN_RETRY_S = 0.05, 1.0
"""Seconds until a drain is tried again that has to wait, or of which a part was not done: at first, and at most."""
MAX_CANCEL_S = 1.0
"""Longest time that a change has to end once the run has failed."""
MAX_KEPT = 1 << 16
"""Most changes that are kept, and decisions whose duration is: the latest ones."""
_THREADS = DaemonThreads()


def rest_s(took_s: float) -> float:
    """Seconds without a decision after one that took `took_s`."""
    return max(MIN_REST_S, REST_FACTOR * took_s)


class ElasticController(StepListener):
    def __init__(
        self,
        policy: Policy | None,
        actuator: Actuator,
        record: Recorder,
        fallback: Policy | None = None,
        rest_s: Callable[[float], float] = rest_s,
        journal: DecisionJournal | None = None,
    ) -> None:
        """policy: None where slots keep the roles that they have, but for drains. fallback: asked instead of a policy
        that has ordered what cannot be; None: that raises BadDecision. journal: keeps what is decided, and on what, for
        `ductile replay`; None keeps nothing."""
        self.num_changes = 0
        self.changes: deque[ExecutedDecision] = deque(maxlen=MAX_KEPT)
        """The latest changes."""
        self.decide_s: deque[float] = deque(maxlen=MAX_KEPT)
        """Real seconds that each decision took the policy."""
        self.deciding_s = 0.0
        """CPU seconds that all decisions took: the state, the policy and the check of its orders."""
        self.refused = ""
        """Why the policy is not asked any more, as a sentence; empty while it is asked."""
        self._policy, self._actuator, self._log = policy, actuator, DecisionLog(record)
        self._fallback, self._rest_s, self._journal = fallback, rest_s, journal
        self._change: asyncio.Task[None] | None = None
        """The change that is under way; None when there is none."""
        self._failed: Exception | None = None
        """Error that ended the run: nothing is decided after it."""
        self._execution: Execution | None = None
        """Execution of the latest change; None before the first."""
        self._on_error: Callable[[BaseException], None] = lambda error: None
        self._publishing = False
        self._asked = True
        """The policy has been asked in this step."""
        self._deciding = asyncio.Lock()
        """Held by the one that asks the policy, which knows no threads, and begins the change that it orders."""
        self._happened = asyncio.Event()
        self._not_before_s = float("-inf")
        self._num_failed = 0
        self._is_stopped = False
        self._leaving: set[int] = set()
        """Slots that are to be gone."""
        self._num_emptying = 0
        """Drains and returns of slots that are under way: no policy is asked meanwhile."""
        self._gone: set[int] = set()
        """Slots that were emptied, and have not come back."""
        self._drained: list[RoleMoves] = []
        """Changes of the drains whose slots have not all come back."""

    def notify(self) -> None:
        """Something happened that may matter."""
        self._happened.set()

    def on_phase_end(self, phase: StepPhase) -> None:
        if isinstance(phase, ScorePhase) and phase.by_scorer:
            self.notify()

    @asynccontextmanager
    async def at_work(self, on_error: Callable[[BaseException], None]) -> AsyncGenerator[None]:
        """Ask the policy after events while the block runs. At its end a change that is under way is cancelled, and
        training is released. When the block raises, the change has only `MAX_CANCEL_S` for that: a slot may hang in the
        middle of it, and all slots are about to be stopped.

        on_error: told at once of what ends the run. When the block ends well all the same, that is raised.
        """
        self._on_error = on_error
        watching, limit_s = asyncio.create_task(self._watch()), None
        try:
            yield
        except BaseException:
            limit_s = MAX_CANCEL_S
            raise
        finally:
            watching.cancel()
            await self.stop(limit_s, watching)
            self._actuator.hold_training(False)
        if self._failed is not None:
            raise self._failed

    async def stop(self, limit_s: float | None = MAX_CANCEL_S, *others: asyncio.Task[None]) -> None:
        """Cancel the change that is under way, and wait for it, and for others, for so long. None is begun later."""
        self._is_stopped = True
        if self._change is not None:
            self._change.cancel()
        if tasks := [*others, *([self._change] if self._change else [])]:
            await asyncio.wait(tasks, timeout=limit_s)

    @asynccontextmanager
    async def emptied(self, slots: Collection[int]) -> AsyncGenerator[set[int]]:
        """Begin the block when the slots hold nothing any more, and give them nothing in it: they may end. They are
        gone afterwards, but for those that the block takes out of the set that it gets; or as they are where it raises.

        What was begun goes on when the caller is cancelled. Raises CannotDrain when the slots cannot be emptied, and
        what ends the run."""
        self._leaving.update(slots)

        def plan(state: ClusterState) -> DrainStep:
            # After a change that failed each drain is by itself: a slot that hangs holds up its own.
            others = self._leaving.difference(slots)
            return plan_drain(state, slots, others, merged=not self._num_failed)

        try:
            await self._until_done(plan, self._leaving)
            gone = {*slots}
            yield gone
            self._gone |= gone
        finally:
            self._leaving.difference_update(slots)
            self.notify()

    async def restore(self, slots: Collection[int]) -> None:
        """Use slots again that were gone. Where no policy moves slots, they get what they held; else it is for the
        policy. Raises CannotDrain when they cannot have it."""
        self._gone.difference_update(slots)
        if self._policy is None or isinstance(self._policy, Static | InTurns):
            await self._until_done(lambda state: plan_return(state, self._drained, slots))
        self._drained = [moves for moves in self._drained if not self._gone.isdisjoint(moves.leaving)]
        self.notify()

    async def _until_done(
        self, plan: Callable[[ClusterState], DrainStep], leaving: Collection[int] = frozenset()
    ) -> None:
        """Carry out the steps of a plan until it is done. leaving: slots that are to be gone by it. Raises CannotDrain,
        and what ends the run."""
        self._num_emptying += 1
        pause_s = DRAIN_RETRY_S
        try:
            while True:
                async with self._deciding:
                    change = self._change
                    if self._failed is not None:
                        raise self._failed
                    if self._is_stopped:
                        raise CannotDrain("the run ends")
                    if change is None:
                        state = self._state()
                        step = plan(state)
                        if step.verdict == "done":
                            return
                        if step.verdict == "cannot":
                            raise CannotDrain(step.reason)
                        if step.verdict == "change":
                            self._actuator.hold_training(step.decision.hold_training)
                            self._log.decided(step.decision, state.now_s)
                            self._drained += [moves_of(step.decision, leaving)] if leaving else []
                            change = self._begin(state, step.decision, state.now_s)
                num_failed = self._num_failed
                if change is not None:
                    await asyncio.wait([change])
                if change is None or self._num_failed > num_failed:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, MAX_DRAIN_RETRY_S)
        finally:
            self._num_emptying -= 1
            self._actuator.hold_training(False)  # or as the policy says, which is asked next

    async def begin_step(self, version: int) -> None:
        """Ask the policy about the step that begins, and have its change begin. While another change is under way, the
        decision after that is the step's first one. Waits for a decision that is under way. Nothing else is decided
        until `go_on`, which comes before the next `begin_step`. Raises what has ended the run."""
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
        if self._execution is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._execution.patience_s):
                    await self._execution.joined.wait()

    def go_on(self) -> None:
        """Decide after events again: the weights are live."""
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
                    if self._may_decide and self._change is None and self._failed is None:
                        await self._decide()
        except Exception as error:
            self._fail(error)

    @property
    def _may_decide(self) -> bool:
        """True where weights are live, and not on their way; while a command waits for the trainer's state, in any
        case: who has its devices is to give them back."""
        return not self._publishing or self._actuator.wanted

    def _state(self) -> ClusterState:
        """The state without slots that are gone, or about to be and empty."""
        state = replace(self._actuator.state(), change=self.num_changes + 1)
        if not (absent := self._gone | self._leaving):
            return state
        holding = {each.slot for each in state.slots if each.slot in self._leaving and each.roles}
        slots = tuple(each for each in state.slots if each.slot not in absent or each.slot in holding)
        state = replace(state, slots=slots)
        return replace(state, home=home_without(state, absent - holding))

    def _fail(self, error: Exception) -> None:
        self._failed = error
        self._actuator.hold_training(False)
        self._on_error(error)

    async def _decide(self) -> None:
        """Ask the policy, and begin the change that it orders, if any. The caller holds `_deciding`."""
        if (policy := self._policy) is None or self._num_emptying:
            return
        actuator, began_s = self._actuator, time.thread_time()
        at_s, state = actuator.now_s, replace(self._state(), asked=self._asked)
        self._asked = True
        state_s = time.thread_time() - began_s
        decision, deciding_s = await self._ask(policy, state)
        # Slots that train hear of a migration after their micro-steps: training that waited waits until they have.
        self._actuator.hold_training(decision.hold_training or (state.trainer.held and bool(decision.migrations)))
        took_s = state_s + deciding_s
        self.deciding_s += took_s
        self._not_before_s = actuator.now_s + self._rest_s(took_s)
        if gone := self._lost_slots(state, decision):
            self._log.dropped(decision, gone, at_s)
            self._asked = state.asked  # where it was the step's first decision, the next one is
            self.notify()
            return
        self._log.decided(decision, at_s)
        if decision.orders:
            self._begin(state, decision, at_s)

    def _begin(self, state: ClusterState, decision: Decision, at_s: float) -> asyncio.Task[None]:
        """Begin the change that a decision orders. The caller holds `_deciding`, and no change is under way."""
        self._execution = Execution(self._actuator, state, decision)
        self._actuator.changing(decision.moves)
        self._change = asyncio.create_task(self._make(self._execution, state, decision, at_s))
        return self._change

    def _lost_slots(self, state: ClusterState, decision: Decision) -> set[int]:
        """Slots of the decision that were lost while the policy decided. They come back by themselves."""
        if not decision.orders:
            return set()
        now = self._actuator.state()
        ready = {slot.slot for slot in now.slots if slot.ready}
        moved = {move.slot for move in decision.moves}
        ends = {order.source for order in decision.migrations} | {order.target for order in decision.migrations}
        slots = moved.union(*(each.slots for each in state.instances if each.id in ends))
        return {slot.slot for slot in state.slots if slot.ready and slot.slot in slots} - ready

    async def _make(self, execution: Execution, state: ClusterState, decision: Decision, at_s: float) -> None:
        """Make the change, and note what was done of it. The loop does not wait for this task."""
        try:
            failures = await execution.run()
            change = ExecutedDecision(at_s, self._actuator.now_s - at_s, decision, tuple(failures))
            self._note(change, state.instances)
        except Exception as error:
            self._fail(error)
        finally:
            self._change = None
            self.notify()

    def _note(self, change: ExecutedDecision, before: Sequence[Instance]) -> None:
        self.changes.append(change)
        self.num_changes += 1
        self._log.changed(change, before, self._actuator.state().instances)
        self._num_failed = self._num_failed + 1 if change.failures else 0
        if change.failures:
            # The same state would give the same decision, at once and again and again.
            self._not_before_s = self._actuator.now_s + min(MAX_BACKOFF_S, 2.0 ** (self._num_failed - 1))

    async def _ask(self, policy: Policy, state: ClusterState) -> tuple[Decision, float]:
        """The decision, and the CPU seconds that it took."""
        try:
            return await self._decision(policy, state)
        except BadDecision as error:
            if self._fallback is None:
                raise
            self.refused = self._log.refused(error)
            policy = self._policy = self._fallback
            self._fallback = None
        return await self._decision(policy, state)

    async def _decision(self, policy: Policy, state: ClusterState) -> tuple[Decision, float]:
        """Raises BadDecision."""
        asking = asyncio.get_running_loop().run_in_executor(_THREADS, _timed, policy, state)
        try:
            async with asyncio.timeout(MAX_DECIDING_S):
                decision, took_s, cpu_s = await asking
        except TimeoutError as error:
            why = f"at {state.now_s:.1f} s it was asked, and {MAX_DECIDING_S:g} s later it had not decided"
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


def _timed(policy: Policy, state: ClusterState) -> tuple[Decision, float, float]:
    """Return what `decide` returns, and the CPU seconds that it took. Raises BadDecision."""
    began_s = time.thread_time()
    return *decide(policy, state), time.thread_time() - began_s
