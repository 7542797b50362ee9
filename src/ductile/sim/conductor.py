"""Asks the policy after events, and carries its decisions out in virtual time.

    events (a rollout ended, a micro-step, new weights)  ->  policy.decide(state)  ->  orders, carried out at their cost

One decision at a time: the next is asked for when the last one is carried out. A change of the trainer's slots waits
for the boundary between two micro-steps; everything else goes on meanwhile.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ductile.core.cluster.orders import Decision, Handoff, Policy, complaints, formation_after
from ductile.core.cluster.state import ClusterState
from ductile.observe import Recorder
from ductile.sim.stage import Stage


class BadDecision(Exception):
    """A policy ordered what cannot be. The text says what."""


@dataclass(frozen=True, slots=True)
class Change:
    """A decision as it was carried out."""

    at_s: float
    seconds: float
    decision: Decision


class Conductor:
    def __init__(self, policy: Policy, stage: Stage, record: Recorder | None = None) -> None:
        self.changes: list[Change] = []
        self.decide_s: list[float] = []
        """Real seconds that each decision took."""
        self._policy, self._stage, self._record = policy, stage, record
        self._happened = asyncio.Event()
        self._asked_at_s = float("-inf")
        self._busy = asyncio.Lock()

    def notify(self) -> None:
        """Something happened that may matter."""
        self._happened.set()

    async def watch(self) -> None:
        """Answers events until it is cancelled."""
        while True:
            await self._happened.wait()
            wait_s = self._asked_at_s + self._stage.scenario.coalesce_s - self._stage.now_s
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await self.settle()

    async def at_boundary(self) -> None:
        """Between two micro-steps: decide, unless that was just done."""
        if self._stage.now_s - self._asked_at_s >= self._stage.scenario.coalesce_s:
            await self.settle()
        else:
            self.notify()

    async def settle(self) -> None:
        """Decide now, and return when it is carried out."""
        async with self._busy:
            self._happened.clear()
            stage = self._stage
            self._asked_at_s = began_s = stage.now_s
            async with stage.boundary:
                state = stage.state()
                decision = self._ask(state)
                (stage.may_train.clear if decision.hold_training else stage.may_train.set)()
                stage.look_again()
                formation = formation_after(state, decision)
                resizes = {*formation.members} != {*stage.formation.members}
                if resizes:
                    # Nobody begins a micro-step now: the others would wait for its end.
                    await self._leave(decision)
                    await self._switch({*formation.members, *stage.formation.members}, stage.scenario.costs.resize_s)
                    stage.formation = formation
            if decision.orders:
                if not resizes:
                    await self._leave(decision)
                await self._join(decision)
                self.changes.append(Change(began_s, stage.now_s - began_s, decision))
                self.notify()

    def _ask(self, state: ClusterState) -> Decision:
        began_s = time.perf_counter()
        decision = self._policy.decide(state)
        self.decide_s.append(time.perf_counter() - began_s)
        if wrong := complaints(state, decision):
            raise BadDecision(f"at {state.now_s:.1f} s the policy ordered what cannot be: {'; '.join(wrong)}")
        if decision.orders and self._record is not None:
            self._record.event("decided", f"{decision.reason}.", at_s=round(state.now_s, 3))
        return decision

    async def _leave(self, decision: Decision) -> None:
        """Rollouts go where they can go at once; generators and scorers that are to be none any more stop."""
        stage, joining = self._stage, _gaining(decision)
        stage.changing |= {move.slot for move in decision.moves}
        stage.hold({move.slot: move.after for move in decision.moves if move.slot not in joining})
        self._hand_off([order for order in decision.handoffs if order.target not in joining])
        leaving = [move.slot for move in decision.moves if {*move.before} - {*move.after} - {"train"}]
        await self._switch(leaving, stage.scenario.costs.release_s)

    async def _join(self, decision: Decision) -> None:
        """New generators and scorers warm up, and get what is handed to them."""
        stage, joining = self._stage, _gaining(decision)
        await self._switch(joining, stage.scenario.costs.grant_s)
        stage.hold({move.slot: move.after for move in decision.moves if move.slot in joining})
        self._hand_off([order for order in decision.handoffs if order.target in joining])
        moved = {move.slot for move in decision.moves}
        stage.changing -= moved
        stage.since_s.update(dict.fromkeys(moved, stage.now_s))
        for slot in moved:
            stage.refresh(slot)

    def _hand_off(self, orders: Sequence[Handoff]) -> None:
        for order in orders:
            self._stage.move(order.id, order.source, order.target)

    async def _switch(self, slots: Collection[int], seconds: float) -> None:
        if slots and seconds > 0:
            for slot in slots:
                self._stage.engines[slot].stall(seconds)
            await self._stage.busy("switch", slots, seconds)


def _gaining(decision: Decision) -> set[int]:
    """Slots that take on a role that needs warming up."""
    return {move.slot for move in decision.moves if {*move.after} - {*move.before} - {"train"}}
