"""Servers that answer probes and do not generate: the engine does no step, or requests fail. Real processes, of which
the run takes one out for what its requests and its tokens say, though it looks well."""

import asyncio

import pytest

from tests.fleet.live.rig import PROBE_S, Rig

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(120)]

EVIDENCE_S = 5.0
"""Longest time until a server is out for which nothing but its probes speaks."""
COMPLETIONS = "/v1/completions"


async def lost(rig: Rig, name: str) -> str:
    """Return why the server is taken out; it may have joined again by then."""
    url, why = rig.servers[name].url, list[str]()

    def is_told() -> bool:
        why[:] = [reason for _, address, status, reason in rig.changes if (address, status) == (url, "dead")]
        return bool(why)

    await rig.until(is_told, EVIDENCE_S, f"{name} is taken out")
    return why[0]


@pytest.mark.parametrize("when", ["it generates", "requests come"])
def test_a_wedged_engine_is_taken_out_and_its_requests_go_on_elsewhere(rig: Rig, when: str) -> None:
    async def story() -> None:
        server = rig.servers["a"]
        before = rig.health("a")
        if when == "requests come":
            server.fault("wedge", "on")
        for _ in range(9):
            rig.ask(200)
        if when == "it generates":
            await rig.until(lambda: server.state().num_sampled > before.num_sampled, 5.0, "it generates")
            server.fault("wedge", "on")
        await rig.until(lambda: server.reached("wedge"), 5.0, "it is wedged")
        assert "sampled no token" in await lost(rig, "a")
        assert server.state(PROBE_S).incarnation == before.incarnation, "it answers probes all along"
        assert len(await rig.finished()) == 9

    rig.run(story())


def test_a_server_at_which_every_request_fails_is_taken_out(rig: Rig) -> None:
    async def story() -> None:
        rig.servers["a"].fault("500", COMPLETIONS)
        out = asyncio.create_task(lost(rig, "a"))
        while not out.done():
            for _ in range(3):  # one for each
                rig.ask(10)
            await asyncio.sleep(0.05)
        assert "3 requests in a row failed" in await out
        num_asked = len(rig.asked)
        assert len(await rig.finished()) == num_asked

    rig.run(story())


def test_one_whose_requests_have_failed_gets_one_at_a_time_until_a_token_comes(rig: Rig) -> None:
    async def story() -> None:
        server, id = rig.servers["a"], rig.health("a").instance
        capacity = rig.generators.capacity

        def on_trial() -> bool:
            return rig.fleet.state.of(id).on_trial

        server.fault("500", COMPLETIONS)
        for _ in range(9):
            rig.ask(20)
        await rig.until(lambda: server.reached("500"), 5.0, "a request fails")
        assert len(await rig.finished()) == 9
        assert rig.fleet.state.of(id).request_failures == 1, "they came side by side"
        assert rig.generators.capacity == capacity * 2 // 3
        await rig.until(on_trial, 5.0, "it answers two probes")
        server.clear("500")
        server.fault("slow", "0.02")
        for _ in range(6):
            rig.ask(30)
        nums = set[int]()

        def is_well() -> bool:
            nums.add(rig.run_servers._pool.num_unfinished(id))
            return rig.generators.capacity == capacity

        await rig.until(is_well, 8.0, "a token has come")
        assert max(nums) == 1
        assert len(await rig.finished()) == 15
        assert rig.fleet.state.of(id).request_failures == 0

    rig.run(story())


def test_neither_probes_nor_a_version_end_a_row_of_failed_requests(rig: Rig) -> None:
    async def story() -> None:
        id = rig.health("a").instance
        for _ in range(2):
            rig.fleet.request_failed(id, "a test says so")
        await rig.until(lambda: rig.fleet.state.of(id).on_trial, 5.0, "it answers two probes")
        result = await rig.publish()
        assert id in result.committed
        await rig.until(lambda: rig.fleet.state.of(id).on_trial, 5.0, "it answers two probes")
        assert rig.fleet.state.of(id).request_failures == 2
        rig.ask(4)
        await rig.until(lambda: rig.status("a") == "ready", 5.0, "it has proved itself")

    rig.run(story())
