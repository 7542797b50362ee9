import asyncio
import os
import signal

import pytest

from ductile.launch.interrupt import ONE_PRESS_S, Interrupt, interrupts


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_insists(signum: signal.Signals):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.graceful.wait(), 5)
            assert not interrupt.forced.is_set()
            await asyncio.sleep(1.1 * ONE_PRESS_S)
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.forced.wait(), 5)

    asyncio.run(story())


def test_one_press_that_arrives_twice_is_one():
    clock = iter([10.0, 10.0 + 0.9 * ONE_PRESS_S, 10.0 + 1.1 * ONE_PRESS_S])
    interrupt = Interrupt(lambda: next(clock))
    interrupt.press()
    interrupt.press()
    assert not interrupt.forced.is_set()
    interrupt.press()
    assert interrupt.forced.is_set()


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_batch_system_that_gives_notice_asks(signum: signal.Signals):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.graceful.wait(), 5)
            assert not interrupt.forced.is_set()

    asyncio.run(story())


@pytest.fixture
def terminal():
    """As where a person types: the suite itself may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_lost_terminal_asks_however_often_it_says_so(terminal: None):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
                os.kill(os.getpid(), signum)
                await asyncio.sleep(0.01)
            await asyncio.wait_for(interrupt.graceful.wait(), 5)
            assert not interrupt.forced.is_set()
            await asyncio.sleep(1.1 * ONE_PRESS_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(interrupt.forced.wait(), 5)

    asyncio.run(story())


def test_under_nohup_a_lost_terminal_is_nothing(terminal: None):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGWINCH)
            await asyncio.wait_for(seen.wait(), 5)
            assert not interrupt.graceful.is_set()

    seen = asyncio.Event()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.signal(signal.SIGWINCH, lambda *_: seen.set())
    asyncio.run(story())
    signal.signal(signal.SIGWINCH, before)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_given_back(terminal: None, signum: signal.Signals):
    async def story():
        with interrupts(Interrupt()):
            pass

    before = signal.getsignal(signum)
    asyncio.run(story())
    assert signal.getsignal(signum) == before
