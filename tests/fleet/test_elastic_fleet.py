"""A fleet over real sockets: who is taken out and when, who comes back, and who rules."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.health import ServerHealth
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.update_outcomes import InstanceOutcome
from ductile.fleet import ElasticFleet
from ductile.fleet.registry.authority import FolderAuthority
from ductile.fleet.registry.registries import LeaseFolder
from ductile.fleet.servers.requirements import Requirements
from ductile.fleet.servers.server_pool import Warmed
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.fleet.updates.update_parties import UpdateOptions
from ductile.fleet.updates.weight_update import WeightUpdates
from ductile.messages.server_lease import ServerLease, lease_file
from ductile.roles import Interrupted, Late, Refused, SlotLost
from tests.fleet.stub_servers import DIGEST, StubPool, StubServer, stub_servers, until
from tests.fleet.test_weight_update import Ranks, Server

KEYS = {
    "health_check_interval_seconds": 10.0,
    "probe_timeout_seconds": 5.0,
    "topology_change_cooldown_seconds": 0.0,
}


class Case:
    """A fleet of stub servers that is looked after by hand, and what it has told."""

    def __init__(self, servers: list[StubServer], members: StubPool) -> None:
        self.servers, self.members = servers, members
        self.told: list[str] = []
        self.changes: list[tuple[str, str, int]] = []
        self.now = 0.0
        self.state = SharedFleetState(lambda: self.now)
        self.fleet: ElasticFleet

    def note(self, before: ServerHealth | None, after: ServerHealth, epoch: int) -> None:
        self.changes.append((after.address, after.status, epoch))

    async def looks(self, times: int = 1) -> None:
        for _ in range(times):
            await self.fleet._monitor_servers_once()
        await self.fleet.settled()

    @property
    def serving(self) -> list[int]:
        """Numbers of the servers that take requests."""
        active = self.fleet.get_active_server_addresses()
        return [number for number, each in enumerate(self.servers) if each.url in active]

    def id(self, number: int) -> InstanceId:
        server = self.fleet.state.at(self.servers[number].url)
        assert server is not None
        return server.instance


@asynccontextmanager
async def case(number: int, version: int | None = 1, watched: bool = False, **keys: object) -> AsyncGenerator[Case]:
    async with stub_servers(number) as servers:
        one = Case(servers, StubPool(servers, version))
        config = FleetConfig.model_validate({**KEYS, "enable_health_monitor": watched, **keys})
        addresses = [f"{each.url}/v1" for each in servers]
        one.fleet = ElasticFleet(config, one.members, addresses, tell=one.told.append, patience_s=5.0, state=one.state)
        one.fleet.on_change.add(one.note)
        async with one.fleet:
            await one.fleet.settled()
            while version is not None and len(one.serving) < number:  # on a busy machine one may have been late
                await one.looks()
            yield one


def test_a_closed_port_is_evidence_at_once() -> None:
    async def story() -> None:
        async with case(3) as one:
            await one.servers[1].kill()
            await one.looks()
            assert one.serving == [0, 2]
            assert one.members.story[-1] == f"remove 127.0.0.1:{one.servers[1].port}"

    asyncio.run(story())


def test_one_that_the_pool_does_not_take_is_not_ready_and_joins_again() -> None:
    async def story() -> None:
        async with case(1) as one:
            one.members.add_fails = Late("a version took too long to go live")
            await one.servers[0].restart()
            await one.looks(2)
            again = one.fleet.state.of(one.id(0))
            assert (again.status, one.serving) == ("stale", [])
            assert "a version took too long to go live" in again.reason
            one.members.add_fails = None
            await one.looks(2)
            assert one.serving == [0]
            assert one.members.story[-2:] == [f"warm {again.instance} with 1", f"add {again.instance}"]

    asyncio.run(story())


def test_one_that_says_that_it_is_leaving_has_left_and_did_not_fail() -> None:
    async def story() -> None:
        async with case(2) as one:
            id = one.id(1)
            one.members.may_drain.clear()
            one.servers[1].says(leaving=True)
            await one.fleet.look()
            assert one.fleet.state.of(id).status == "draining"
            await one.servers[1].kill()
            one.members.on_ended(id, SlotLost("the connection was refused"), 0.0)
            await one.looks()
            assert (one.fleet.state.of(id).status, one.fleet.state.of(id).reason) == ("gone", "it has left")
            one.servers[1].says(incarnation="another")
            await one.servers[1].start()
            await one.looks(2)
            assert one.serving == [0], "it is leaving, too"
            one.servers[1].says(leaving=False)
            await one.looks(2)
            assert one.serving == [0, 1]

    asyncio.run(story())


def test_a_lost_connection_has_the_server_probed_at_once() -> None:
    """With probes every 1000 s; and one that lost a connection and lives stays."""

    async def story() -> None:
        async with case(2, watched=True, health_check_interval_seconds=1000) as one:
            await one.servers[1].kill()
            for number in (0, 1):
                one.fleet.request_failed(one.id(number), "the connection was reset")
            await until(lambda: one.serving == [0])
            assert (one.servers[0].url, "suspect") in {(url, status) for url, status, _ in one.changes}
            one.members.on_ended(one.id(0), None, 0.0)
            assert one.fleet.state.of(one.id(0)).request_failures == 0

    asyncio.run(story())


def test_a_suspect_is_asked_last() -> None:
    async def story() -> None:
        async with case(2) as one:
            first = one.fleet.get_active_server_addresses()[0]
            epoch = one.fleet.state.membership
            one.fleet.request_failed(one.fleet.state.serving[0].instance, "HTTP 500")
            assert one.fleet.get_active_server_addresses()[1] == first
            assert one.fleet.state.membership == epoch

    asyncio.run(story())


def test_the_pool_is_told_of_suspects_and_when_they_are_well_again() -> None:
    async def story() -> None:
        async with case(2) as one:
            id = one.id(1)
            one.fleet.request_failed(id, "HTTP 500")
            await one.fleet.settled()
            assert (one.members.suspects, one.members.on_trial) == ({id: "HTTP 500"}, frozenset())
            await one.looks(5)
            assert (one.members.suspects, one.members.on_trial) == ({id: "HTTP 500"}, {id})
            assert one.fleet.state.of(id).status == "suspect", "no probe shows that it can generate"
            one.members.on_ended(id, None, 0.0)
            await one.fleet.settled()
            assert one.fleet.state.of(id).status == "ready"
            assert (one.members.suspects, one.members.on_trial) == ({id: ""}, frozenset())

    asyncio.run(story())


def test_a_server_that_sends_tokens_is_slow_and_stays_and_one_that_says_nothing_is_out() -> None:
    async def story() -> None:
        async with case(3, health_check_failure_threshold=2, probe_timeout_seconds=0.05) as one:
            id = one.id(1)
            for silent in one.servers[1:]:
                silent.delay_s = 30.0
            for now in range(1, 4):
                one.now = float(now)
                one.members.tokens_at[id] = now + 0.01  # since it was asked
                await one.looks()
            assert one.serving == [0, 1]
            assert one.fleet.state.of(id).status == "suspect", "it is asked last"

    asyncio.run(story())


def test_an_answer_that_comes_late_is_an_answer() -> None:
    """Each takes longer than the deadline, and none is as late as silence would have to be."""

    async def story() -> None:
        keys = {"health_check_interval_seconds": 0.2, "health_check_failure_threshold": 3}
        async with case(2, watched=True, probe_timeout_seconds=0.1, **keys) as one:
            one.servers[1].delay_s = 0.3
            await asyncio.sleep(1.2)
            assert one.serving == [0, 1]
            one.servers[1].delay_s = 30.0
            await until(lambda: one.serving == [0])

    asyncio.run(story())


def test_a_version_that_too_few_servers_take_is_not_live_with_nobody() -> None:
    async def story() -> None:
        async with case(2, min_healthy_servers=1, enable_health_monitor=False) as one:
            ids = [one.id(0), one.id(1)]

            def refused() -> None:
                one.fleet._judge.update_began(2, ids)
                one.fleet._judge.update_ended(2, "", [InstanceOutcome(each, "stale", "it says no") for each in ids])

            refused()
            assert not await one.fleet.enough_have(2)
            one.now = 4.0
            assert not await one.fleet.enough_have(2)
            one.now = 5.0
            with pytest.raises(
                Late, match=r"0 of at least 1 servers have taken version 2 in 5 s .*is stale: it says no"
            ):
                await one.fleet.enough_have(2)
            one.fleet._judge.update_began(2, ids)
            one.fleet._judge.update_ended(2, DIGEST, [InstanceOutcome(ids[0], "committed")])
            assert await one.fleet.enough_have(2)

    asyncio.run(story())


def test_one_that_dies_before_it_has_ever_served_is_taken_from_a_version_that_is_under_way() -> None:
    async def story() -> None:
        async with case(2, version=None) as one:
            ids = [one.id(0), one.id(1)]
            one.fleet._judge.update_began(1, ids)
            await one.servers[1].kill()
            await one.looks()
            assert one.members.story[-1] == f"remove {ids[1]}"

    asyncio.run(story())


def test_a_wedged_server_whose_probes_are_answered_is_taken_out_by_its_requests() -> None:
    async def story() -> None:
        async with case(2) as one:
            id = one.id(1)
            for failed in range(3):
                assert (id in one.members.on_trial) == (failed > 0)
                one.fleet.request_failed(id, "no token came")
                await one.looks(3)
            states = [status for url, status, _ in one.changes if url == one.servers[1].url]
            assert states[states.index("suspect") :][:2] == ["suspect", "dead"]
            assert one.fleet.state.servers.get(id) is None, "it has joined as another member"

    asyncio.run(story())


@pytest.mark.parametrize("requests", [{"num_running": 4}, {"num_waiting": 4}], ids=str)
def test_a_server_that_samples_nothing_is_taken_out_though_it_answers(requests: dict[str, int]) -> None:
    """An engine that is wedged as a request comes runs none."""

    async def story() -> None:
        async with case(2, progress_timeout_seconds=60) as one:
            one.members.may_warm.clear()
            one.servers[1].says(**requests, num_sampled=7)
            await one.looks()
            one.now = 59.0
            await one.looks()
            assert one.serving == [0, 1]
            one.now = 61.0
            await one.fleet._monitor_servers_once()
            assert one.serving == [0]
            one.members.may_warm.set()

    asyncio.run(story())


@pytest.mark.parametrize(("silent", "left"), [([0, 1], [2, 3]), ([0, 1, 2, 3], [0, 1, 2, 3])])
def test_never_is_everybody_taken_out_for_silence(silent: list[int], left: list[int]) -> None:
    """When all are silent the fault is our own network's. (All of them closed is another thing.)"""

    async def story() -> None:
        async with case(4, probe_timeout_seconds=0.2) as one:
            for number in silent:
                one.servers[number].delay_s = 9.0
            for _ in range(5):
                one.now += 1.0
                await one.looks()
            assert one.serving == left
            own = [each for each in one.told if "the fault is on our side" in each]
            assert len(own) == (len(silent) == 4)
            if own:
                assert one.fleet.maybe_rebuild_weight_update_group().action == "wait"
                for server in one.servers:
                    server.delay_s = 0.0
                one.now += 1.0
                await one.looks(2)
                assert {each.status for each in one.fleet.state.serving} == {"ready"}

    asyncio.run(story())


def test_a_server_that_wants_another_key_is_not_asked_again_until_somebody_names_it() -> None:
    async def story() -> None:
        async with case(2) as one:
            one.servers[1].status = 401
            await one.looks()
            assert one.serving == [0]
            asked = one.servers[1].num_asked
            await one.looks(5)
            assert one.servers[1].num_asked == asked
            said = one.fleet.kept_out[one.servers[1].url]
            assert "wants an API key, and this run gives none (401); orchestrator.client.api_key_var names" in said
            one.servers[1].status = 200
            one.fleet.register_server(one.servers[1].url)
            await one.looks()
            assert one.serving == [0, 1]

    asyncio.run(story())


def test_a_server_with_another_model_is_kept_out_with_a_reason() -> None:
    async def story() -> None:
        async with case(1) as one:
            one.fleet.require(Requirements(("m",), "models/run"))
            stranger = await StubServer("another").start()
            stranger.says(model_name="models/other")
            one.fleet.register_server(stranger.url)
            await one.looks(4)
            assert one.serving == [0]
            (said,) = [each for each in one.told if stranger.url in each]
            assert "has another model (models/other) than the run (models/run)" in said
            assert "(fingerprints another and m)" in said
            await stranger.kill()

    asyncio.run(story())


def test_a_server_with_a_shorter_context_than_the_run_s_is_kept_out_and_that_is_said_once() -> None:
    async def story() -> None:
        async with case(1) as one:
            one.fleet.require(Requirements(max_model_len=128, length_key="seq_len"))
            short = await StubServer().start()
            short.says(max_model_len=64)
            one.servers.append(short)
            one.fleet.register_server(short.url)
            await one.looks(3)
            assert one.serving == [0]
            (said,) = [each for each in one.told if short.url in each]
            assert "64 tokens at most, and the run's have up to 128 (seq_len)" in said
            short.says(incarnation="another process", max_model_len=128)
            await one.looks(2)
            assert one.serving == [0, 1]

    asyncio.run(story())


def test_a_server_that_refuses_a_request_is_put_out_until_another_process_is_there() -> None:
    async def story() -> None:
        async with case(2) as one:
            one.members.on_ended(one.id(1), Refused("responded with 400: no room"), 0.0)
            await one.looks(2)
            assert one.serving == [0]
            assert [each for each in one.told if "has refused a request: responded with 400" in each]
            await one.servers[1].restart()
            await one.looks(2)
            assert one.serving == [0, 1]

    asyncio.run(story())


def test_one_process_at_two_addresses_is_one_server() -> None:
    async def story() -> None:
        async with case(1) as one:
            other = f"http://localhost:{one.servers[0].port}"
            one.fleet.register_server(other)
            await one.looks(2)
            assert [each.address for each in one.fleet.state.living] == [one.servers[0].url]
            assert one.fleet.absent == {other: f"{other} is the server that the run has at {one.servers[0].url}"}

    asyncio.run(story())


def test_a_server_that_is_named_joins_without_the_cooldown_and_is_found_by_all_its_names() -> None:
    async def story() -> None:
        async with case(2, topology_change_cooldown_seconds=1000) as one:
            url, host = one.servers[1].url, f"127.0.0.1:{one.servers[1].port}"
            one.fleet.deregister_server(host)
            await one.fleet.settled()
            assert one.serving == [0]
            one.members.may_warm.clear()
            joining = asyncio.create_task(one.fleet.join(url, 60.0))
            await until(lambda: f"warm {host}+1 with 1" in one.members.story)
            assert not joining.done(), "it is waited for"
            one.members.may_warm.set()
            assert (await joining).instance == f"{host}+1"
            assert one.serving == [0, 1]
            with pytest.raises(Refused, match="it is looked for until it is evicted"):
                await one.fleet.join("http://127.0.0.1:9", 60.0)
            assert {one.fleet.find(name).instance for name in (url, host, f"{url}/v1", f"{host}+1")} == {f"{host}+1"}
            assert one.fleet.find("127.0.0.1:9") is None

    asyncio.run(story())


def test_a_joiner_that_cannot_be_given_weights_waits_longer_each_time() -> None:
    async def story() -> None:
        async with case(1, flap_limit=2, flap_backoff_seconds=10) as one:
            joiner = await StubServer().start()
            one.servers.append(joiner)

            async def refuse(*_: object) -> None:
                raise Refused("its disk is full")

            warm, one.members.warm = one.members.warm, refuse  # type: ignore[method-assign]
            one.fleet.register_server(joiner.url)
            await one.looks(4)
            found = one.fleet.state.at(joiner.url)
            assert found is not None
            assert (found.status, found.reason) == ("stale", "its disk is full")
            assert len([each for each in one.told if "its disk is full" in each]) == 2
            one.now += 11.0
            one.members.warm = warm  # type: ignore[method-assign]
            await one.looks()
            assert one.serving == [0, 1]
            await joiner.kill()

    asyncio.run(story())


@pytest.mark.parametrize("fails", [False, True])
def test_a_join_that_ends_once_the_server_is_sent_a_newer_version_says_nothing_of_that(fails: bool) -> None:
    async def story() -> None:
        async with case(1) as one:
            joiner = await StubServer().start()
            one.servers.append(joiner)
            one.members.may_warm.clear()
            warm = one.members.warm

            async def warm_or_not(*asked: Any) -> Warmed | None:
                warmed = await warm(*asked)
                if fails:
                    raise Refused("its disk is full")
                return warmed

            one.members.warm = warm_or_not  # type: ignore[method-assign]
            one.fleet.register_server(joiner.url)
            await one.fleet.look()
            await until(lambda: bool(one.members.donors.get(one.id(1))))
            one.fleet._judge.update_began(2, [one.id(1)])
            one.members.may_warm.set()
            await one.fleet.settled()
            found = one.fleet.state.of(one.id(1))
            assert (found.status, found.version, found.offered) == ("warming", None, 2)
            assert not any("its disk is full" in each for each in one.told)
            one.fleet._judge.update_ended(2, DIGEST, [InstanceOutcome(one.id(1), "committed")])
            found = one.fleet.state.of(one.id(1))
            assert (found.status, found.version) == ("ready", 2)
            await joiner.kill()

    asyncio.run(story())


def test_leaving_is_finishing_first_or_at_once() -> None:
    async def story() -> None:
        async with case(4) as one:
            fleet, urls = one.fleet, [each.url for each in one.servers]
            one.members.may_drain.clear()
            epoch = fleet.deregister_server(urls[0])
            assert epoch == fleet.state.epoch == fleet.deregister_server(f"{urls[0]}/v1/")
            assert one.serving == [1, 2, 3]
            await fleet._monitor_servers_once()
            assert fleet.state.at(urls[0]).status == "draining"  # type: ignore[union-attr]
            one.members.may_drain.set()
            await fleet.settled()
            assert one.members.story[-2:] == [f"drain {fleet_id(urls[0])}", f"remove {fleet_id(urls[0])}"]
            fleet.deregister_server(one.id(1), mode="now")
            assert one.serving == [2, 3]
            assert fleet.deregister_server("http://127.0.0.1:9") == fleet.state.epoch  # nobody is there
            await one.looks(3)
            assert one.serving == [2, 3]  # though they answer
            fleet.register_server(urls[0])
            await one.looks()
            assert one.serving == [0, 2, 3]

    def fleet_id(url: str) -> str:
        return url.removeprefix("http://")

    asyncio.run(story())


def test_a_drain_has_an_end() -> None:
    async def story() -> None:
        async with case(2, drain_timeout_seconds=0.05) as one:
            one.members.may_drain.clear()
            one.fleet.deregister_server(one.servers[0].url)
            await one.fleet.settled()
            assert one.members.story[-1] == f"remove 127.0.0.1:{one.servers[0].port}"

    asyncio.run(story())


def test_a_drain_that_fails_ends_as_well() -> None:
    async def story() -> None:
        async with case(2) as one:
            one.members.drain_fails = Late("it still had 3 requests after 30 s, and cannot leave")
            one.fleet.deregister_server(one.servers[0].url)
            await one.fleet.settled()
            assert one.members.story[-1] == f"remove 127.0.0.1:{one.servers[0].port}"
            assert one.changes[-1][1] == "gone"

    asyncio.run(story())


def test_one_whose_requests_fail_side_by_side_is_tried_again_and_is_out_at_once_on_hard_evidence() -> None:
    """Requests that fail again are counted on."""

    async def story() -> None:
        async with case(2) as one:
            for began_at in (1.0, 3.0):
                one.now = began_at + 1.0
                for _ in range(8):  # side by side: one incident
                    one.members.on_ended(one.id(1), Interrupted("the connection was reset"), began_at)
                await one.fleet.settled()
                assert one.id(1) not in one.members.on_trial
                await one.looks(2)
                assert one.fleet.state.of(one.id(1)).status == "suspect"
                assert one.id(1) in one.members.on_trial
            one.members.may_warm.clear()
            one.members.on_ended(one.id(0), SlotLost("nobody listens"), 3.0)
            one.members.on_ended(one.id(1), Interrupted("the connection was reset"), 5.0)
            assert one.serving == []
            one.members.may_warm.set()

    asyncio.run(story())


def test_the_last_servers_do_not_leave() -> None:
    async def story() -> None:
        async with case(2, min_healthy_servers=2) as one:
            with pytest.raises(ValueError, match="1 would be left, and 2 are needed"):
                one.fleet.deregister_server(one.servers[0].url)
            assert one.serving == [0, 1]
            one.members.num_others = 1  # a slot generates as well
            one.fleet.deregister_server(one.servers[0].url)
            with pytest.raises(ValueError, match="are needed"):
                one.fleet.deregister_server(one.servers[1].url, "now")
            one.fleet.deregister_server(one.servers[1].url, "now", force=True)
            assert one.serving == []
            with pytest.raises(ValueError, match="is no address of a server"):
                one.fleet.register_server("127.0.0.1:8000")

    asyncio.run(story())


def test_too_few_servers_are_waited_for_and_not_for_ever() -> None:
    async def story() -> None:
        async with case(2) as one:
            for server in one.servers:
                await server.kill()
            await one.looks()
            assert one.fleet.maybe_rebuild_weight_update_group().action == "wait"
            one.now = 4.0
            waiting = asyncio.create_task(one.fleet.enough_servers())
            await one.servers[1].start()
            await one.looks(2)
            assert [each.address for each in (await waiting).receivers] == [one.servers[1].url]
            await one.servers[1].kill()
            await one.looks()
            assert one.fleet.maybe_rebuild_weight_update_group().action == "wait"
            one.now = 9.5
            with pytest.raises(Late, match=r"0 of at least 1 servers are healthy .*, and none joined in 6 s"):
                await one.fleet.enough_servers()
            assert one.fleet.maybe_rebuild_weight_update_group().action == "wait", "a later update waits anew"

    asyncio.run(story())


def test_who_is_waited_for_is_said_at_once_and_every_half_minute_and_in_the_end() -> None:
    async def story() -> None:
        async with case(1) as one:
            gone = one.servers[0]
            await gone.kill()
            await one.looks()
            said = f"waiting for servers: nobody listens at {gone.url}; at most 5 s"
            assert one.told[-1] == said
            num = len(one.told)
            one.now += 1.0
            one.fleet._shortage.look()
            assert len(one.told) == num
            one.now += 30.0
            one.fleet._shortage.look()
            assert one.told[num:] == [said]
            assert one.fleet.absent == {gone.url: f"nobody listens at {gone.url}"}
            assert one.fleet.maybe_rebuild_weight_update_group().action == "wait"
            one.now += 6.0
            with pytest.raises(Late, match=f"none joined in .*nobody listens at {gone.url}"):
                await one.fleet.enough_servers()
            await gone.start()
            await one.looks(2)
            assert one.fleet.absent == {}

    asyncio.run(story())


def test_before_the_first_version_all_that_are_there_get_it() -> None:
    async def story() -> None:
        async with case(2, version=None) as one:
            await one.looks(3)
            assert one.serving == []
            decision = one.fleet.maybe_rebuild_weight_update_group()
            assert len(decision.receivers) == 2
            one.fleet._judge.update_began(1, [each.instance for each in decision.receivers])
            one.members.version = 1
            outcomes = [InstanceOutcome(each.instance, "committed") for each in decision.receivers]
            one.fleet._judge.update_ended(1, DIGEST, outcomes)
            assert one.serving == [0, 1]

    asyncio.run(story())


def test_an_aborted_update_leaves_everybody_as_it_was() -> None:
    async def story() -> None:
        async with case(2) as one:
            ids = [
                each.instance for each in one.fleet._judge.update_began(2, [one.id(0), one.id(1), InstanceId("gone")])
            ]
            assert ids == [one.id(0), one.id(1)]
            one.fleet._judge.update_aborted(ids, "slot 1 was killed")
            await one.looks()
            assert {(each.status, each.version) for each in one.fleet.state.serving} == {("ready", 1)}
            epoch = one.state.next_epoch()
            assert one.state.next_epoch() > epoch > one.fleet.state.membership

    asyncio.run(story())


def test_why_a_version_was_aborted_is_the_reason_for_which_its_joiners_have_no_weights() -> None:
    async def story() -> None:
        async with case(1, version=None) as one:
            one.fleet._judge.update_began(1, [one.id(0)])
            one.fleet._judge.update_aborted([one.id(0)], "slot 1 was killed")
            found = one.fleet.state.of(one.id(0))
            why = "the version that it was sent was aborted: slot 1 was killed"
            assert (found.status, found.reason) == ("stale", why)

    asyncio.run(story())


def lease(folder: Path, server: StubServer, **fields: object) -> None:
    content = ServerLease(server.url, server.state.incarnation, renewed_at=1e12)
    (folder / lease_file(server.url)).write_bytes(msgspec.json.encode(msgspec.structs.replace(content, **fields)))


def test_a_server_that_says_it_is_leaving_finishes_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with stub_servers(2) as servers:
            members = StubPool(servers)
            registry = LeaseFolder(tmp_path, 1e9, unix_time=lambda: 1e12)
            for server in servers:
                lease(tmp_path, server)
            config = FleetConfig.model_validate({**KEYS, "enable_health_monitor": False})
            async with ElasticFleet(config, members, registry=registry) as fleet:
                await fleet.settled()
                lease(tmp_path, servers[0], beat=1, is_leaving=True)
                for _ in range(2):
                    await fleet._monitor_servers_once()
                    await fleet.settled()
                assert members.story[-2:] == [f"{each} 127.0.0.1:{servers[0].port}" for each in ("drain", "remove")]
                assert fleet.get_active_server_addresses() == (servers[1].url,)
                await servers[0].restart()
                lease(tmp_path, servers[0], beat=1)
                await fleet._monitor_servers_once()
                await fleet.settled()
                assert {*fleet.get_active_server_addresses()} == {each.url for each in servers}

    asyncio.run(story())


def test_of_two_controllers_one_rules_and_the_other_one_learns_it(tmp_path: Path) -> None:
    """Also the one that was stopped while it ruled, and does not know: its epochs are older than the other one's."""

    async def story() -> None:
        now = 0.0
        async with stub_servers(1) as servers:
            config = FleetConfig.model_validate({**KEYS, "enable_health_monitor": False})

            def controller(name: str, patience_s: float) -> ElasticFleet:
                authority = FolderAuthority(tmp_path, name, 15.0, lambda: now)
                members = StubPool(servers)
                urls = [each.url for each in servers]
                return ElasticFleet(config, members, urls, authority=authority, patience_s=patience_s)

            first, second = controller("first", 5.0), controller("second", 0.0)
            await first.start()
            await first.settled()
            with pytest.raises(Late, match="another run has had the servers of this registry for 0 s"):
                await second.start()
            old = first._shared.next_epoch()
            now = 16.0  # the first one was stopped
            await second.start()
            await second.settled()
            assert second._shared.next_epoch() > old
            servers[0].says(epoch=second.state.epoch)  # the second one's first update
            await first._monitor_servers_once()
            decision = first.maybe_rebuild_weight_update_group()
            assert decision.action == "fail"
            assert "another run has taken" in decision.reason
            with pytest.raises(Late, match="another run has taken"):
                await first.enough_servers()
            await first.close()
            await second.close()

    asyncio.run(story())


def test_a_ruler_that_slept_cannot_bring_its_version_over_the_new_one_s() -> None:
    """It adopts an epoch of others only as a server joins: later, one above its own says that others rule."""

    async def story() -> None:
        async with stub_servers(1) as servers:
            config = FleetConfig.model_validate({**KEYS, "enable_health_monitor": False})
            server = Server("s")
            ranks = Ranks({"s": server}, takes_s=0.0)
            told: list[str] = []

            async def update(state: SharedFleetState, version: int) -> None:
                updates = WeightUpdates(ranks, UpdateOptions(), lambda state, only: "http", state.next_epoch)
                await updates.update(version, [server.member])
                servers[0].says(epoch=server.epoch)

            old, new = SharedFleetState(), SharedFleetState()
            async with ElasticFleet(config, StubPool(servers), [servers[0].url], tell=told.append, state=old):
                await update(old, 1)
                async with ElasticFleet(config, StubPool(servers), [servers[0].url], tell=told.append, state=new):
                    assert "has weights of another run" in told[-1]
                    await update(new, 10)
                    with pytest.raises(Late, match="another run has taken"):
                        await update(old, 2)
                    assert (server.version, old.fenced != "", new.fenced) == (10, True, "")

    asyncio.run(story())


def test_a_ruler_adopts_an_epoch_of_others_only_when_it_still_rules_after_that(tmp_path: Path) -> None:
    """A server that is new to it may have it of a new ruler: then its own epochs must stay below."""

    async def story() -> None:
        seconds = itertools.count()
        async with stub_servers(2) as servers:
            config = FleetConfig.model_validate({**KEYS, "enable_health_monitor": False})
            authority, state = FolderAuthority(tmp_path, "one", 15.0), SharedFleetState(lambda: float(next(seconds)))
            urls = [servers[0].url]
            fleet = ElasticFleet(config, StubPool(servers), urls, authority=authority, state=state)
            async with fleet:
                before = state.now.epoch
                servers[1].says(epoch=before * 2)
                fleet.register_server(servers[1].url)
                for _ in range(2):
                    await fleet._monitor_servers_once()
                assert fleet.state.at(servers[1].url) is None
                assert state.next_epoch() < before + 10
                await fleet._renew_rule()
                await fleet._monitor_servers_once()
                assert fleet.state.at(servers[1].url) is not None
                assert state.next_epoch() > before * 2

    asyncio.run(story())


def test_servers_that_were_in_another_run_s_fleet_get_newer_epochs() -> None:
    async def story() -> None:
        async with stub_servers(1) as (server,):
            server.says(epoch=900)
            config = FleetConfig.model_validate({**KEYS, "enable_health_monitor": False})
            async with ElasticFleet(config, StubPool([server]), [server.url]) as fleet:
                await fleet.settled()
                assert fleet.state.epoch > 900
                await fleet._monitor_servers_once()
                assert fleet.maybe_rebuild_weight_update_group().action == "rebuild"

    asyncio.run(story())


def test_a_server_of_the_same_run_is_not_told_of_as_another_one_s() -> None:
    """Neither one that was drained and comes back, nor one that the run had before it was resumed."""

    async def story() -> None:
        async with case(2) as one:
            one.fleet.deregister_server(one.servers[0].url)
            await one.fleet.settled()
            one.servers[0].says(epoch=one.fleet.state.epoch)
            one.fleet.register_server(one.servers[0].url)
            await one.looks()
            assert one.serving == [0, 1]
            assert [each for each in one.told if "another run" in each] == []
            config, told = FleetConfig.model_validate({**KEYS, "enable_health_monitor": False}), list[str]()
            for digests, num in ((frozenset({DIGEST}), 0), (frozenset[str](), 1)):
                fleet = ElasticFleet(config, StubPool(one.servers), [one.servers[0].url], tell=told.append)
                fleet.require(Requirements(), digests)
                async with fleet:
                    await fleet.settled()
                assert len([each for each in told if "has weights of another run" in each]) == num

    asyncio.run(story())


def test_any_thread_may_register_and_read() -> None:
    async def story() -> None:
        async with case(4, version=1) as one:
            urls = [each.url for each in one.servers]
            seen: list[int] = []
            errors: list[BaseException] = []

            def work(seed: int) -> None:
                chance = random.Random(seed)
                try:
                    for _ in range(100):
                        url = chance.choice(urls)
                        if chance.random() < 0.5:
                            one.fleet.register_server(url)
                        else:
                            one.fleet.deregister_server(url, "now", force=True)
                        seen.append(one.fleet.maybe_rebuild_weight_update_group().topology.epoch)
                        assert {*one.fleet.get_active_server_addresses()} <= {*urls}
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            await until(lambda: not any(thread.is_alive() for thread in threads))
            assert not errors
            for url in urls:
                one.fleet.register_server(url)
            await one.looks(3)
            assert one.serving == [0, 1, 2, 3]
            epochs = [epoch for _, _, epoch in one.changes]
            assert epochs == sorted(epochs)

    asyncio.run(story())


def test_a_flapper_holds_up_no_update_and_is_joined_a_few_times_only() -> None:
    """Thirty kills, restarts and silences of one of three servers, with an update after each."""

    async def story() -> None:
        keys = {"flap_window_seconds": 600, "flap_limit": 3, "flap_backoff_seconds": 20, "probe_timeout_seconds": 0.2}
        async with case(3, **keys) as one:
            chance, version, rebuilds = random.Random(7), 1, 0
            flapper = one.servers[2]
            for _ in range(30):
                match chance.choice(["kill", "restart", "silence"]):
                    case "kill":
                        await flapper.kill()
                    case "restart":
                        await flapper.restart()
                    case _:
                        flapper.delay_s = 9.0 if not flapper.delay_s else 0.0
                one.now += 2.0
                await one.looks()
                decision = one.fleet.maybe_rebuild_weight_update_group()
                rebuilds += decision.action == "rebuild"
                assert decision.action in ("keep", "rebuild")
                one.fleet.mark_group_built(decision)
                version += 1
                ids = [
                    each.instance
                    for each in one.fleet._judge.update_began(version, [each.instance for each in decision.receivers])
                ]
                steady = [each for each in ids if each in (one.id(0), one.id(1))]
                assert len(steady) == 2
                one.members.version = version
                for server in one.servers[:2]:
                    server.says(version=version)
                outcomes = [InstanceOutcome(each, "committed" if each in steady else "dead", "lost") for each in ids]
                one.fleet._judge.update_ended(version, DIGEST, outcomes)
                assert one.fleet.state.version == version
            assert {0, 1} <= {*one.serving}
            assert rebuilds <= 16  # 60 s at quarantines of 20, 40, ... s
            joins = [each for each in one.members.story if each.startswith(f"warm 127.0.0.1:{flapper.port}")]
            assert 3 <= len(joins) <= 6, joins

    asyncio.run(story())


@pytest.mark.parametrize("watched", [True, False])
def test_started_and_stopped_twenty_times_it_leaves_nothing_running(watched: bool) -> None:
    async def story() -> None:
        async with case(3, watched=watched) as one:
            fleet = one.fleet
            await fleet.stop()
            before, threads = len(asyncio.all_tasks()), threading.active_count()
            for _ in range(20):
                await fleet.start()
                await fleet.start()
                await fleet.stop()
            assert len(asyncio.all_tasks()) == before
            assert threading.active_count() == threads
            await fleet.start()
            await until(lambda: one.serving == [0, 1, 2])

    asyncio.run(story())


def test_without_a_monitor_nobody_is_probed_and_requests_still_find_out() -> None:
    async def story() -> None:
        async with case(2, health_check_interval_seconds=0.05) as one:
            await until(lambda: one.serving == [0, 1])
            asked = one.servers[0].num_asked
            await one.servers[1].kill()
            await asyncio.sleep(0.2)
            assert one.servers[0].num_asked == asked
            one.fleet.request_failed(one.id(1), "the connection was lost")
            await until(lambda: one.serving == [0])
            assert one.servers[0].num_asked == asked

    asyncio.run(story())


def test_without_a_monitor_those_that_a_registry_finds_later_join(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("ductile.fleet.elastic_fleet.POLL_S", 0.05)

    async def story() -> None:
        async with stub_servers(2) as servers:
            registry = LeaseFolder(tmp_path, 1e9, unix_time=lambda: 1e12)
            config = FleetConfig.model_validate({**KEYS, "enable_health_monitor": False})
            lease(tmp_path, servers[0])
            async with ElasticFleet(config, StubPool(servers), registry=registry) as fleet:
                await fleet.settled()
                lease(tmp_path, servers[1])
                await until(lambda: len(fleet.get_active_server_addresses()) == 2)

    asyncio.run(story())
