import asyncio
import gc

import pytest

from ductile.concurrency.background import finish


def test_work_ends_and_is_silent_when_the_caller_is_gone():
    asyncio.run(caller_goes())


async def caller_goes():
    reached, said = asyncio.Event(), list[dict]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))

    async def work():
        await asyncio.sleep(0.01)
        reached.set()
        raise ValueError("too late")

    caller = asyncio.create_task(finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.wait_for(reached.wait(), 60)
    await asyncio.sleep(0.01)
    gc.collect()
    assert not said


def test_what_it_raises_is_the_callers_as_long_as_there_is_one():
    async def work():
        raise ValueError("in time")

    with pytest.raises(ValueError, match="in time"):
        asyncio.run(finish(work()))
