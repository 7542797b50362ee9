"""Asks the policy after events, and carries its decisions out in virtual time.

    events (a rollout ended, a micro-step, new weights)  ->  policy.decide(state)  ->  orders, carried out at their cost

One decision at a time: the next is asked for when the last one is carried out. A change of the trainer's slots waits
for the boundary between two micro-steps; everything else goes on meanwhile.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ductile.core.cluster.orders import Decision, Handoff, Policy, complaints, formation_after, roles_after
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
            self._asked_at_s = self._stage.now_s
            async with self._stage.boundary:
                state = self._stage.state()
                decision = self._ask(state)
                hold = decision.hold_training
                (self._stage.may_train.clear if hold else self._stage.may_train.set)()
                self._stage.look_again()
            if decision.orders:
                began_s = self._stage.now_s
                await self._carry_out(state, decision)
                self.changes.append(Change(began_s, self._stage.now_s - began_s, decision))
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

    async def _carry_out(self, state: ClusterState, decision: Decision) -> None:
        """What leaves goes first, then the trainer changes between two micro-steps, then newcomers warm up."""
        stage, costs = self._stage, self._stage.scenario.costs
        after = roles_after(state, decision)
        moving = {move.slot for move in decision.moves}
        leaving = [move.slot for move in decision.moves if {*move.before} - {*move.after} - {"train"}]
        joining = [move.slot for move in decision.moves if {*move.after} - {*move.before} - {"train"}]
        stage.changing |= moving
        stage.hold({slot: after[slot] for slot in moving.difference(joining)})
        self._hand_off([order for order in decision.handoffs if order.target not in joining])
        await self._switch(leaving, costs.release_s)
        formation = formation_after(state, decision)
        if {*formation.members} != {*stage.formation.members}:
            async with stage.boundary:
                await self._switch({*formation.members, *stage.formation.members}, costs.resize_s)
                stage.formation = formation
        await self._switch(joining, costs.grant_s)
        stage.hold({slot: after[slot] for slot in joining})
        self._hand_off([order for order in decision.handoffs if order.target in joining])
        stage.changing -= moving
        stage.since_s.update(dict.fromkeys(moving, stage.now_s))
        for slot in moving:
            stage.refresh(slot)

    def _hand_off(self, orders: Sequence[Handoff]) -> None:
        for order in orders:
            self._stage.move(order.id, order.source, order.target)

    async def _switch(self, slots: Collection[int], seconds: float) -> None:
        if slots and seconds > 0:
            for slot in slots:
                self._stage.engines[slot].stall(seconds)
            await self._stage.busy("switch", slots, seconds)
