"""The books of the trainer's state, where it does not come back at once."""

import asyncio
from collections.abc import Mapping

import pytest

from ductile.fleet.trainer.state_parking import StateParking
from ductile.messages.workers import Park, StateMoved, Unpark
from ductile.roles import Failure, Late


def test_a_failure_is_forgotten_once_the_state_is_back() -> None:
    fails = [True]

    async def ask(command: Park | Unpark) -> Mapping[int, StateMoved]:
        if isinstance(command, Unpark) and fails:
            fails.clear()
            raise Late("slot 0 has no room")
        return {0: StateMoved(1, 0, 0.0)}

    async def run() -> None:
        parking = StateParking(ask, patience_s=60.0)
        await parking.park()
        with pytest.raises(Failure):
            await parking.unpark()
        with pytest.raises(Late, match="no room"):
            await parking.until_back(lambda: None)
        await parking.unpark()
        await parking.park()
        waiting = asyncio.create_task(parking.until_back(lambda: None))
        await asyncio.sleep(0)
        assert parking.is_wanted
        await parking.unpark()
        await waiting

    asyncio.run(run())
