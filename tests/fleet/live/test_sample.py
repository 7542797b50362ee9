"""A sample of `make fleet-test` for the suite: a server dies in the middle of an update, and one has other bytes.

Everything else of this folder is marked `fleet`.
"""

import pytest

from tests.fleet.live.rig import Rig

pytestmark = pytest.mark.timeout(120)


def test_a_server_dies_in_the_middle_of_an_update_and_comes_back(rig: Rig) -> None:
    async def story() -> None:
        server, first = rig.servers["a"], rig.health("a").instance
        for _ in range(9):
            rig.ask(60)
        server.fault("bucket-mid", "exit")
        result = await rig.publish()
        outcomes = {each.instance: each.outcome for each in result.outcomes}
        assert outcomes.pop(first) == "dead"
        assert {*outcomes.values()} == {"committed"}
        assert len(await rig.finished()) == 9
        server.restart()
        await rig.ready("a", "b", "c")
        assert rig.health("a").instance != first
        assert server.live[1] == result.digest

    rig.run(story())


def test_a_server_with_other_bytes_serves_what_it_had_or_nothing(rig: Rig) -> None:
    async def story() -> None:
        rig.servers["b"].fault("wrong-bytes", "on")
        result = await rig.publish()
        outcomes = {each.instance: each.outcome for each in result.outcomes}
        assert outcomes.pop(rig.health("b").instance) == "stale"
        assert {*outcomes.values()} == {"committed"}
        for _ in range(6):
            rig.ask(20)
        assert {version for done in await rig.finished() for version in done.versions} == {rig.live}
        rig.servers["b"].clear()
        await rig.publish()
        await rig.ready("a", "b", "c")

    rig.run(story())
