import asyncio

import pytest

from ductile.loop.ending import OncePerStep


def test_a_step_is_saved_once_also_when_that_has_failed():
    tried = []

    async def save(step):
        tried.append(step)
        if step == 4:
            raise OSError("full")

    async def story():
        once = OncePerStep(save, 2)
        await once(2)
        await once(3)
        await once(3)
        with pytest.raises(OSError, match="full"):
            await once(4)
        await once(4)
        await once(5)

    asyncio.run(story())
    assert tried == [3, 4, 5]
