"""Versions on their way from two ranks to three servers, and what happens to them there."""

import asyncio

import pytest

from tests.fleet.live.rig import Rig

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(120)]


def test_versions_reach_all_servers(rig: Rig) -> None:
    async def story() -> None:
        for _ in range(3):
            rig.ask(60)
            rig.ask(60)
            result = await rig.publish()
            assert len(result.committed) == 3
        await rig.finished()

    rig.run(story())


def test_requests_of_a_killed_server_go_on_elsewhere(rig: Rig) -> None:
    async def story() -> None:
        for _ in range(24):
            rig.ask(100)
        await rig.until(lambda: rig.servers["a"].state().num_running > 3)
        rig.servers["a"].kill()
        await rig.dead("a", within_s=2.0)
        assert len(await rig.finished()) == 24
        result = await rig.publish()
        assert len(result.committed) == 2
        await asyncio.sleep(0)

    rig.run(story())
