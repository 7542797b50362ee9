"""The tests of the pull request that this fleet began with (AReaL's elastic weight update), restated: its own five, and
its "next steps". Servers are real sockets; those with engines are in `tests/fleet/live`."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from ductile.config.schema.fleet import FleetConfig
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.topology import TopologyDecision
from ductile.core.instances.update_outcomes import InstanceOutcome
from ductile.fabric.groups import Groups
from ductile.fleet.elastic_fleet import ElasticFleet
from ductile.fleet.registry.registries import LeaseFolder
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.messages.server_lease import ServerLease, lease_file
from ductile.weights.pipeline import BucketPipeline, Stage
from tests.fleet.stub_servers import DIGEST, StubPool, StubServer, stub_servers, until
from tests.ranks import run_ranks

BY_HAND = FleetConfig(
    enable_health_monitor=False,
    health_check_interval_seconds=10.0,
    probe_timeout_seconds=5.0,
    topology_change_cooldown_seconds=0.0,
)
"""Probes happen when the test says so."""


def fleet_of(servers: list[StubServer], members: StubPool, **given) -> ElasticFleet:
    return ElasticFleet(given.pop("config", BY_HAND), members, [each.url for each in servers], **given)


async def looked(fleet: ElasticFleet, times: int = 1) -> None:
    for _ in range(times):
        await fleet._monitor_servers_once()
    await fleet.settled()


def lease(folder: Path, server: StubServer) -> None:
    content = msgspec.json.encode(ServerLease(server.url, server.state.incarnation, beat=1, renewed_at=1e12))
    (folder / lease_file(server.url)).write_bytes(content)


def test_an_unhealthy_server_is_removed_after_repeated_failures() -> None:
    async def story() -> None:
        async with stub_servers(2) as (good, bad):
            members = StubPool([good, bad])
            config = BY_HAND.model_copy(update={"probe_timeout_seconds": 0.2})
            async with fleet_of([good, bad], members, config=config) as fleet:
                await looked(fleet)
                assert {*fleet.get_active_server_addresses()} == {good.url, bad.url}
                bad.delay_s = 9.0
                for left in ({good.url, bad.url}, {good.url, bad.url}, {good.url}):
                    await looked(fleet)
                    assert {*fleet.get_active_server_addresses()} == left
                assert f"remove 127.0.0.1:{bad.port}" in members.story
                bad.delay_s = 0.0  # it goes on, and its answers alone bring nothing back
                members.may_warm.clear()
                for _ in range(5):
                    await fleet._monitor_servers_once()
                assert fleet.get_active_server_addresses() == (good.url,)
                members.may_warm.set()
                await fleet.settled()
                assert members.story[-1] == f"add 127.0.0.1:{bad.port}+1"

    asyncio.run(story())


def test_a_server_that_is_new_is_found_given_weights_and_then_asked(tmp_path: Path) -> None:
    async def story() -> None:
        async with stub_servers(2) as (old, new):
            members = StubPool([old, new])
            async with fleet_of([old], members, registry=LeaseFolder(tmp_path, 1e9, unix_time=lambda: 1e12)) as fleet:
                await looked(fleet)
                lease(tmp_path, new)
                members.may_warm.clear()
                await fleet._monitor_servers_once()
                await asyncio.sleep(0.02)
                assert fleet.get_active_server_addresses() == (old.url,)
                members.may_warm.set()
                await fleet.settled()
                assert {*fleet.get_active_server_addresses()} == {old.url, new.url}
                name = f"127.0.0.1:{new.port}"
                assert members.story[-2:] == [f"warm {name} with 1", f"add {name}"]
                assert members.donors[InstanceId(name)] == [f"127.0.0.1:{old.port}"]

    asyncio.run(story())


def test_targets_are_a_part_of_those_that_serve() -> None:
    async def story() -> None:
        async with stub_servers(3) as servers, fleet_of(servers, StubPool(servers)) as fleet:
            await looked(fleet)
            urls = [each.url for each in servers]
            assert {*fleet._get_target_addresses(None)} == {*urls}
            assert fleet._get_target_addresses([]) == ()
            assert fleet._get_target_addresses(urls[1:]) == tuple(urls[1:])
            with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9 is not in the group"):
                fleet._get_target_addresses([urls[0], "http://127.0.0.1:9"])
            await servers[1].kill()
            await looked(fleet)
            with pytest.raises(ValueError, match=f"{urls[1]} is not in the group"):
                fleet._get_target_addresses(urls)

    asyncio.run(story())


def test_a_join_is_one_change_for_all_that_come_within_the_cooldown() -> None:
    """And an update meanwhile goes to the members only; a removal waits for nobody."""
    config = BY_HAND.model_copy(update={"topology_change_cooldown_seconds": 30.0})
    now = 0.0

    async def story() -> None:
        nonlocal now
        async with stub_servers(4) as (first, second, third, fourth):
            members = StubPool([first, second, third, fourth])
            async with fleet_of([first, second], members, config=config, state=SharedFleetState(lambda: now)) as fleet:
                await looked(fleet, 2)  # nobody serves, so nobody waits
                decision = fleet.maybe_rebuild_weight_update_group()
                assert decision.action == "rebuild"
                fleet.mark_group_built(decision)

                fleet.register_server(third.url)
                await looked(fleet)
                now = 15.0
                fleet.register_server(fourth.url)
                await looked(fleet)
                now = 29.0
                await looked(fleet)
                assert fleet.maybe_rebuild_weight_update_group().action == "keep"
                assert {*fleet._get_target_addresses()} == {first.url, second.url}

                await first.kill()
                await looked(fleet)
                removed = fleet.maybe_rebuild_weight_update_group()
                assert (removed.action, len(removed.topology.members)) == ("rebuild", 1)
                fleet.mark_group_built(removed)

                now = 30.0
                await looked(fleet)
                joined = fleet.maybe_rebuild_weight_update_group()
                assert joined.action == "rebuild"
                urls = {second.url, third.url, fourth.url}
                assert {member.address for member in joined.topology.members} == urls
                assert fleet.get_last_topology_change_time() == 30.0

    asyncio.run(story())


def test_when_none_is_left_a_join_waits_for_nothing() -> None:
    config = BY_HAND.model_copy(update={"topology_change_cooldown_seconds": 30.0})

    async def story() -> None:
        async with (
            stub_servers(2) as (old, new),
            fleet_of([old], StubPool([old, new]), config=config, state=SharedFleetState(lambda: 0.0)) as fleet,
        ):
            await looked(fleet)
            await old.kill()
            await looked(fleet)
            assert fleet.get_active_server_addresses() == ()
            fleet.register_server(new.url)
            await looked(fleet)
            assert fleet.get_active_server_addresses() == (new.url,)

    asyncio.run(story())


def test_a_rebuild_that_is_delayed_or_dies_is_asked_for_again() -> None:
    """A flag that is consumed by reading would be lost; and a change during the rebuild is another one."""

    async def story() -> None:
        async with stub_servers(3) as servers, fleet_of(servers[:2], StubPool(servers)) as fleet:
            await looked(fleet)
            assert fleet.consume_group_rebuild_request()
            assert fleet.consume_group_rebuild_request()
            lost = fleet.maybe_rebuild_weight_update_group()  # and the one who asked died before it built anything
            decision = fleet.maybe_rebuild_weight_update_group()
            assert (decision.action, decision.topology) == ("rebuild", lost.topology)
            fleet.register_server(servers[2].url)
            await looked(fleet)
            fleet.mark_group_built(decision)
            assert fleet.consume_group_rebuild_request()
            later = fleet.maybe_rebuild_weight_update_group()
            assert len(later.topology.members) == 3
            fleet.mark_group_built(later)
            assert not fleet.consume_group_rebuild_request()
            assert fleet.group_version == later.topology.epoch > decision.topology.epoch
            fleet.mark_group_built(decision)  # late news of an old group
            assert fleet.group_version == later.topology.epoch

    asyncio.run(story())


def test_a_fast_restart_at_the_same_address_is_another_member_that_needs_weights() -> None:
    """Its weights are those of its folder, and no probe may have failed in between."""

    async def story() -> None:
        async with stub_servers(2) as (first, second):
            members = StubPool([first, second])
            async with fleet_of([first, second], members) as fleet:
                await looked(fleet)
                await second.restart()
                members.may_warm.clear()
                await fleet._monitor_servers_once()
                await fleet._monitor_servers_once()
                assert fleet.get_active_server_addresses() == (first.url,)
                members.may_warm.set()
                await fleet.settled()
                assert {*fleet.get_active_server_addresses()} == {first.url, second.url}
                again = fleet.state.at(second.url)
                assert again is not None
                assert again.instance == f"127.0.0.1:{second.port}+1"
                assert again.version == second.state.version == 1

    asyncio.run(story())


def acts(groups: Groups, members: tuple[int, ...], sent: bytes, heard: list[list[str]]) -> list[str]:
    """One rank's collectives, as the decision has them. Its clock is off by hours, and it has heard of servers that
    have ended, which is nothing to act on."""
    import torch
    import torch.distributed as dist

    time.monotonic = lambda: 10_000.0 * groups.slot  # in this process alone
    decision = msgspec.msgpack.decode(sent, type=TopologyDecision)
    assert {*heard[groups.slot]} <= {each.address for each in decision.receivers}
    story = [f"{decision.action} for epoch {decision.topology.epoch}"]
    group = groups.group(members)
    for place, receiver in enumerate(decision.receivers):
        seen = torch.tensor([decision.topology.epoch, place])
        dist.all_reduce(seen, group=group)
        story.append(f"{receiver.instance} is {place}: {(seen // len(members)).tolist()}")
    return story


def test_all_ranks_act_on_one_decision_whatever_their_own_clocks_and_views_are() -> None:
    """Three real ranks do the same collectives, while servers die that only some of them have heard of."""

    async def story() -> tuple[bytes, list[list[str]]]:
        async with stub_servers(3) as servers, fleet_of(servers, StubPool(servers)) as fleet:
            await looked(fleet)
            sent = msgspec.msgpack.encode(fleet.maybe_rebuild_weight_update_group())
            await servers[0].kill()  # while the decision is on its way
            await looked(fleet)
            urls = [each.url for each in servers]
            heard = [[], urls[:1], urls]
            return sent, await asyncio.to_thread(ranks_act, sent, heard)

    sent, stories = asyncio.run(story())
    decision = msgspec.msgpack.decode(sent, type=TopologyDecision)
    assert stories[0] == stories[1] == stories[2]
    epoch = decision.topology.epoch
    assert stories[0][0] == f"rebuild for epoch {epoch}"
    assert [each.split(" is ")[1] for each in stories[0][1:]] == [f"{place}: [{epoch}, {place}]" for place in range(3)]


def ranks_act(sent: bytes, heard: list[list[str]]) -> list[list[str]]:
    return run_ranks(3, acts, sent, heard)


def test_an_update_brings_ready_only_those_that_got_it() -> None:
    async def story() -> None:
        async with stub_servers(3) as (stays, fails, restarts):
            members = StubPool([stays, fails, restarts])
            async with fleet_of([stays, fails, restarts], members) as fleet:
                await looked(fleet)
                ids = [each.instance for each in fleet.maybe_rebuild_weight_update_group().receivers]
                by_url = {each.address: each.instance for each in fleet.state.living}
                fleet._judge.update_began(2, ids)
                await restarts.restart()
                members.may_warm.clear()
                await fleet._monitor_servers_once()
                await fleet._monitor_servers_once()
                stays.says(version=2)
                members.version = 2
                outcomes = [InstanceOutcome(each, "committed") for each in ids if each != by_url[fails.url]]
                outcomes.append(InstanceOutcome(by_url[fails.url], "stale", "its digest is another one"))
                fleet._judge.update_ended(2, DIGEST, outcomes)
                assert fleet.get_active_server_addresses() == (stays.url,)
                statuses = {each.address: each.status for each in fleet.state.living}
                assert statuses == {stays.url: "ready", fails.url: "stale", restarts.url: "warming"}
                members.may_warm.set()
                await looked(fleet)
                assert {*fleet.get_active_server_addresses()} == {stays.url, fails.url, restarts.url}
                assert {each.version for each in fleet.state.serving} == {2}

    asyncio.run(story())


def test_a_joiner_catches_up_with_a_version_that_went_live_meanwhile() -> None:
    async def story() -> None:
        async with stub_servers(2) as (old, new):
            members = StubPool([old, new])
            async with fleet_of([old], members) as fleet:
                await looked(fleet)
                members.may_warm.clear()
                fleet.register_server(new.url)
                await fleet._monitor_servers_once()
                await until(lambda: members.story[-1].startswith("warm"))
                fleet._judge.update_began(2, [InstanceId(f"127.0.0.1:{old.port}")])
                old.says(version=2)
                members.version = 2
                fleet._judge.update_ended(2, DIGEST, [InstanceOutcome(f"127.0.0.1:{old.port}", "committed")])
                # It was under way with version 1 when that was the newest.
                members.may_warm.set()
                await fleet.settled()
                assert {each.version for each in fleet.state.serving} == {2}

    asyncio.run(story())


def test_one_pending_bucket_is_waited_for_when_the_next_one_is_on_its_way() -> None:
    """The pull request's own regression: buckets are waited for in the order in which they were sent, the last one too;
    and with one slot a bucket's predecessor is waited for after it has been filled and before it is sent."""
    story: list[str] = []

    def stage(name: str) -> Stage[int]:
        return Stage(name, lambda bucket, buffer: story.append(f"{name} {bucket}"))

    BucketPipeline([stage("fill"), stage("send"), stage("wait")], num_slots=1).run(range(4))
    for name in ("fill", "send", "wait"):
        assert [each for each in story if each.startswith(name)] == [f"{name} {bucket}" for bucket in range(4)]
    for bucket in range(4):
        assert story.index(f"fill {bucket}") < story.index(f"send {bucket}") < story.index(f"wait {bucket}")
    for bucket in range(2, 4):  # two buffers: one that is sent, one that is filled
        assert story.index(f"wait {bucket - 2}") < story.index(f"fill {bucket}")


def test_a_bucket_that_fails_leaves_no_other_one_unwaited_for() -> None:
    story: list[str] = []

    def fill(bucket: int, buffer: int) -> None:
        if bucket == 2:
            raise ValueError("bucket 2 cannot be gathered")

    stages = [
        Stage("fill", fill),
        Stage("send", lambda bucket, buffer: story.append(f"send {bucket}")),
        Stage("wait", lambda bucket, buffer: story.append(f"wait {bucket}"), finishes=True),
    ]
    with pytest.raises(ValueError, match="bucket 2 cannot be gathered"):
        BucketPipeline(stages, num_slots=1).run(range(4))
    sent = [each.removeprefix("send ") for each in story if each.startswith("send")]
    assert [each.removeprefix("wait ") for each in story if each.startswith("wait")] == sent
