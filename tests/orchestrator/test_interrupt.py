import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ductile.orchestrator.ending.interrupt import ONE_PRESS_S, Interrupt, interrupts


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_and_the_second_insists(signum: signal.Signals):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.graceful.wait(), 60)
            assert not interrupt.forced.is_set()
            await asyncio.sleep(1.1 * ONE_PRESS_S)
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.forced.wait(), 60)

    asyncio.run(story())


def test_one_press_that_arrives_twice_is_one():
    clock = iter([10.0, 10.0 + 0.9 * ONE_PRESS_S, 10.0 + 1.1 * ONE_PRESS_S])
    interrupt = Interrupt(lambda: next(clock))
    assert [interrupt.press() for _ in range(2)] == [False, False]
    interrupt.tell()
    assert interrupt.graceful.is_set()
    assert not interrupt.forced.is_set()
    assert interrupt.press()
    interrupt.tell()
    assert interrupt.forced.is_set()


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_batch_system_that_gives_notice_asks(signum: signal.Signals):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            os.kill(os.getpid(), signum)
            await asyncio.wait_for(interrupt.graceful.wait(), 60)
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
            await asyncio.wait_for(interrupt.graceful.wait(), 60)
            assert not interrupt.forced.is_set()
            await asyncio.sleep(1.1 * ONE_PRESS_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(interrupt.forced.wait(), 60)

    asyncio.run(story())


def test_under_nohup_a_lost_terminal_is_nothing(terminal: None):
    async def story():
        interrupt = Interrupt()
        with interrupts(interrupt):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGWINCH)
            await asyncio.wait_for(seen.wait(), 60)
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


def test_the_second_press_ends_a_run_whose_event_loop_is_kept_busy(tmp_path: Path):
    command = [sys.executable, "-m", "tests.orchestrator.endless", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while process.stdout.readline() != "asked\n":
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            time.sleep(2 * ONE_PRESS_S)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=30)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert "ductile rl: Stopped at once, as asked: something (endless.py:" in said
    assert ") has kept the event loop busy for 1 s, so nothing more was saved." in said
    assert "Nothing was saved yet: steps 1-7 are lost." in said
