import asyncio

import pytest

from ductile.orchestrator.ending.run_until import SlotDied, Stopped, run_until


async def forever() -> str:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def after(delay_s: float, result: str) -> str:
    await asyncio.sleep(delay_s)
    return result


async def fail(delay_s: float) -> str:
    await asyncio.sleep(delay_s)
    raise ValueError("connection closed by peer")


async def stubborn() -> str:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)


def run(work, *, stop_after_s: float | None = None, death=None, cancel_s: float = 1.0):
    async def story():
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        try:
            return await asyncio.wait_for(run_until(work, stop, death, cancel_s), 60)
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()

    return asyncio.run(story())


def test_the_result():
    assert run(after(0.01, "done"), death=forever()) == "done"


def test_a_death_ends_it():
    with pytest.raises(SlotDied, match="slot 1 was killed"):
        run(forever(), death=after(0.01, "slot 1 was killed"))


def test_a_mistake_of_the_orchestrators_own_ends_it_as_itself():
    with pytest.raises(ValueError, match="connection closed"):
        run(forever(), death=fail(0.01))


def test_a_stop_ends_it():
    with pytest.raises(Stopped):
        run(forever(), stop_after_s=0.01)


def test_a_failure_is_raised():
    with pytest.raises(ValueError, match="connection closed"):
        run(fail(0.01))


def test_a_death_that_is_known_a_moment_later_is_the_cause():
    with pytest.raises(SlotDied, match="slot 1 was killed") as raised:
        run(fail(0.01), death=after(0.2, "slot 1 was killed"))
    assert isinstance(raised.value.__cause__, ValueError)


def test_work_that_does_not_let_go_is_left():
    with pytest.raises(Stopped):
        run(stubborn(), stop_after_s=0.01, cancel_s=0.05)


def test_work_may_clean_up():
    cleaned = []

    async def work() -> str:
        try:
            return await forever()
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    with pytest.raises(Stopped):
        run(work(), stop_after_s=0.01)
    assert cleaned
