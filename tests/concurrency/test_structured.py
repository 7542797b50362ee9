import asyncio

import pytest

from ductile.concurrency.structured import PipelinedTask, cancel_on, gather_all, undisturbed
from tests.orchestrator.doubles import clock, run


async def after(seconds, result=None, log=None):
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if log is not None:
            log.append(("cancelled", clock()))
        raise
    if isinstance(result, Exception):
        raise result
    if log is not None:
        log.append((result, clock()))
    return result


def test_together_gives_results_in_order():
    assert run(gather_all(after(2, "a"), after(1, "b"))) == ["a", "b"]
    assert run(gather_all()) == []


def test_together_ends_all_when_one_fails():
    log = []
    with pytest.raises(ValueError, match="broken"):
        run(gather_all(after(5, log=log), after(1, ValueError("broken"))))
    assert log == [("cancelled", 1.0)]


def test_one_behind_runs_one_at_a_time_in_order():
    log = []

    async def go():
        async with PipelinedTask(on_error=log.append) as task:
            await task.start(after(5, "a", log))
            assert clock() == 0
            await task.start(after(1, "b", log))
            assert clock() == 5
        assert clock() == 6

    run(go())
    assert log == [("a", 5.0), ("b", 6.0)]


def test_one_behind_tells_of_an_error_at_once_and_raises_it_later():
    told = []

    async def go():
        async with PipelinedTask(on_error=lambda error: told.append((clock(), str(error)))) as task:
            await task.start(after(1, ValueError("broken")))
            await asyncio.sleep(3)

    with pytest.raises(ValueError, match="broken"):
        run(go())
    assert told == [(1.0, "broken")]


def test_one_behind_cancels_when_the_body_fails():
    log = []

    async def go():
        async with PipelinedTask(on_error=log.append) as task:
            await task.start(after(5, log=log))
            await asyncio.sleep(1)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        run(go())
    assert log == [("cancelled", 1.0)]


def test_one_behind_does_not_start_what_comes_after_an_error():
    async def go():
        async with PipelinedTask(on_error=lambda error: None) as task:
            await task.start(after(1, ValueError("broken")))
            await task.start(after(1, "never"))

    with pytest.raises(ValueError, match="broken"):
        run(go())


def test_unless():
    async def go(event_after_s, work):
        event, log = asyncio.Event(), []

        async def ring():
            await asyncio.sleep(event_after_s)
            event.set()

        ringing = asyncio.create_task(ring())
        result = await cancel_on(event, after(2, work, log))
        now = clock()
        await ringing
        return result, now, log

    assert run(go(9, "done")) == ("done", 2.0, [("done", 2.0)])
    assert run(go(1, "done")) == (None, 1.0, [("cancelled", 1.0)])
    with pytest.raises(ValueError, match="broken"):
        run(go(9, ValueError("broken")))


def cancelled_at(*moments_s: float, work):
    """(How it ended, when)."""

    async def go():
        task = asyncio.create_task(undisturbed(work))
        for moment_s in moments_s:
            asyncio.get_running_loop().call_later(moment_s, task.cancel)
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        return outcome if isinstance(outcome, str) else type(outcome).__name__, clock()

    return run(go())


def test_what_must_not_be_left_half_done_is_finished_first():
    log = []
    assert cancelled_at(work=after(5, "done", log)) == ("done", 5.0)
    assert cancelled_at(1, work=after(5, "done", log)) == ("CancelledError", 5.0)
    assert log == [("done", 5.0)] * 2
    assert cancelled_at(1, work=after(5, ValueError("broken"))) == ("CancelledError", 5.0)


def test_who_insists_does_not_wait_for_it():
    log = []
    assert cancelled_at(1, 2, work=after(5, "done", log)) == ("CancelledError", 2.0)
    assert log == [("cancelled", 2.0)]
