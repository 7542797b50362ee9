import asyncio

import pytest

from ductile.sim.clock import Deadlock, now_s, run


def test_a_day_takes_no_time_and_timers_ring_in_order():
    async def work():
        rung = []

        async def ring(after_s):
            await asyncio.sleep(after_s)
            rung.append((after_s, now_s()))

        await asyncio.gather(ring(86_400.0), ring(0.1), ring(3.0))
        return rung

    assert run(work()) == [(0.1, pytest.approx(0.1)), (3.0, pytest.approx(3.0)), (86_400.0, pytest.approx(86_400.0))]


def test_waiting_for_ever_is_an_error():
    with pytest.raises(Deadlock):
        run(asyncio.Event().wait())


def test_deadlines_are_virtual_too():
    async def work():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50):
                await asyncio.sleep(1000)
        return now_s()

    assert run(work()) == pytest.approx(50)
