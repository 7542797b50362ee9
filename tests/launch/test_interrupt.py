import asyncio
import os
import signal

import pytest

from ductile.launch.interrupt import Interrupt, interrupts


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_insists(signum: signal.Signals):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.asked.wait(), 5)
            assert not interrupt.insisted.is_set()
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.insisted.wait(), 5)

    asyncio.run(story())


def test_signals_are_given_back():
    async def story():
        with interrupts(Interrupt()):
            pass

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(story())
    assert signal.getsignal(signal.SIGTERM) == before
