"""Slots of a simulated run are taken away and come back, as a schedule says: by the code that drains those of a live
run."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from ductile.concurrency.structured import gather_all
from ductile.core.instances.placement import slots_of
from ductile.core.scheduling.drains import CannotDrain
from ductile.elastic.controller import ElasticController
from ductile.sim.preemptions import Preemption
from ductile.sim.simulated_actuator import SimulatedActuator


class NotSurvived(Exception):
    """Slots are taken away that cannot be emptied before: the run would be cut there. The text is a clause."""


async def run_beside(work: Coroutine[Any, Any, object], beside: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, with `beside` as long as it lasts. Raises what either raises."""
    working, other = asyncio.ensure_future(work), asyncio.ensure_future(beside)
    try:
        await asyncio.wait([working, other], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            other.result()
        await working
    finally:
        for task in (working, other):
            task.cancel()
        await asyncio.gather(working, other, return_exceptions=True)


async def play(preemptions: Sequence[Preemption], actuator: SimulatedActuator, controller: ElasticController) -> None:
    """Take slots away, and have them come back, each at its time. Raises NotSurvived."""
    await gather_all(*(_play(each, actuator, controller) for each in preemptions))


async def _play(each: Preemption, actuator: SimulatedActuator, controller: ElasticController) -> None:
    await asyncio.sleep(each.at_s - actuator.now_s)
    slots = [slot for slot in each.slots if slot in actuator.roles]
    if not slots:
        return
    if each.event == "return":
        actuator.come_back(slots)
        await controller.restore(slots)
        return
    try:
        async with asyncio.timeout(each.notice_s):
            async with controller.emptied(slots):
                actuator.leave(slots)
    except (TimeoutError, CannotDrain) as error:
        why = str(error) or f"they are not empty within {each.notice_s:g} s"
        raise NotSurvived(f"at {each.at_s:g} s {slots_of(slots)} cannot be emptied: {why}") from error
