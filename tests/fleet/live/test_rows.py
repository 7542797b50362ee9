"""Rows of the elastic fleet's required behaviour, over the whole path with real servers and two real ranks.

| row | test |
|---|---|
| `enable_health_monitor` | test_a_monitor_starts_and_stops_twenty_times |
| `enable_health_monitor` off | test_without_a_monitor_requests_find_who_is_gone |
| `health_check_interval_seconds`; 9: sequential probes | test_a_server_that_answers_slowly_delays_no_other |
| `health_check_failure_threshold` | test_one_missed_probe_is_forgiven |
| `topology_change_cooldown_seconds`; 3, 4: delayed rebuild | test_joins_within_the_cooldown_are_one_change |
| `enable_topology_discovery` | test_servers_of_a_registry_come_and_go |
| `consume_group_rebuild_request`, 6: the names of AReaL | test_a_rebuild_that_was_asked_for_is_not_forgotten |
| `target_server_addresses` | test_targets_are_members_or_an_error |
| `register_server`, `deregister_server` | test_a_server_is_taken_out_and_in_again |
| automatic removal; 15: sticky ids | test_requests_of_a_killed_server_go_on_elsewhere |
| removal of the only server | test_without_any_server_requests_wait_and_then_fail_with_a_sentence |
| join while idle; 1: sync of joiners on one rank | test_a_server_joins_and_all_ranks_do_the_same |
| join during an update | test_who_joins_during_an_update_is_no_part_of_it |
| joiner killed at 50 % | test_a_joiner_that_dies_half_way_harms_nobody |
| donor killed at 50 % | test_a_donor_that_dies_half_way_is_replaced |
| wrong-shape joiner | test_a_server_of_another_model_stays_out_with_a_reason |
| topology signalling; 2, 12 | test_a_rank_that_refuses_once_is_asked_again |
| conditional barriers | test_a_rank_that_dies_is_named |
| hang: 80 % of the deadline | test_a_slow_receiver_is_not_condemned |
| wait order; 8: no watchdog | test_a_receiver_that_hangs_costs_a_bucket_timeout_and_no_more |
| forced shrink and continue | test_all_servers_die_and_two_come_back, test_no_server_comes_back |
| join + leave flapping | test_a_flapping_server_holds_up_nobody |
| fast restart; 14 | test_tokens_of_base_weights_are_never_taken |
| soft pause; 11: other clients | test_other_clients_of_the_servers_see_whole_versions |
| capacity | test_capacity_follows_the_servers_that_serve |
| routing | test_a_slow_server_gets_less |
| AWEX zero-copy: no orphan segment | test_a_rank_that_is_killed_leaves_no_segment |
| two controllers | test_of_two_controllers_one_rules |
| eviction: our own fault | test_when_nobody_answers_nobody_is_taken_out |
| `trainer.weight_broadcast`: disk, point to point | test_versions_go_every_way |
| disk fallback; 13: a second join in a step | test_two_servers_that_join_by_disk_get_the_same_version |
| multi-rank validation; 16: tests are mocks | test_versions_reach_all_servers |
| NeMo-RL 3592 (1) | test_who_restarts_during_an_update_is_not_promoted_by_it |
| NeMo-RL 3592 (2) | test_a_restarted_server_has_no_history |
| NeMo-RL 3591 (3) | test_the_recovery_of_one_server_clears_no_other |
| NeMo-RL 3613 (4) | test_restarts_are_capped |
| miles 2514 | test_a_wrong_key_is_a_refusal_and_asked_once |
| vLLM 57853 | test_a_paused_server_takes_a_version |
| torchtitan 3795 | test_the_next_optimizer_step_does_not_change_what_is_sent |
"""

import asyncio
import itertools
import json
import signal
import threading
import time

import pytest

from ductile.core.instances.instances import InstanceId
from ductile.roles import Failure, Late
from tests.fleet.live import ranks
from tests.fleet.live.clients import Client
from tests.fleet.live.hand import HandUpdate
from tests.fleet.live.rig import BUCKET_S, PATIENCE_S, PROBE_S, Rig
from tests.tiny import make_model_folder

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(120)]

CONSISTENT_S = 2.0
"""Longest time from the death of a rank in an update until all servers are as they were."""


# -- 7.1 --------------------------------------------------------------------------------------------------------------


def test_a_monitor_starts_and_stops_twenty_times(rig: Rig) -> None:
    async def story() -> None:
        threads, tasks = threading.active_count(), len(asyncio.all_tasks())
        for _ in range(20):
            await rig.fleet.stop()
            await rig.fleet.start()
        await rig.fleet.start()
        await rig.until(
            lambda: threading.active_count() <= threads and len(asyncio.all_tasks()) <= tasks,
            what="no thread or task is left but, now and then, those of a probe",
        )
        rig.servers["b"].kill()
        await rig.dead("b", 2.0)

    rig.run(story())


def test_without_a_monitor_requests_find_who_is_gone(rig: Rig) -> None:
    async def story() -> None:
        async with rig.fleet_with(enable_health_monitor=False):
            await rig.publish()
            rig.servers["a"].kill()
            for _ in range(9):
                rig.ask(20)
            assert len(await rig.finished()) == 9
            assert rig.servers["a"].url not in rig.fleet.get_active_server_addresses()

    rig.run(story())


def test_a_server_that_answers_slowly_delays_no_other(rig: Rig) -> None:
    async def story() -> None:
        for name in "ac":
            rig.servers[name].fault("state", f"late {PROBE_S * 0.85}")
        heard, ends = set[float](), time.monotonic() + 3.0
        while time.monotonic() < ends:
            heard.add(rig.health("b").heard_at)
            await asyncio.sleep(0.01)
        times = sorted(heard)
        assert max(late - early for early, late in itertools.pairwise(times)) < 2 * 0.85 * PROBE_S
        assert rig.health("b").status == "ready"

    rig.run(story())


def test_one_missed_probe_is_forgiven(rig: Rig) -> None:
    async def story() -> None:
        server = rig.servers["a"]
        server.stop()
        await rig.until(lambda: rig.health("a").probe_failures == 1, 3.0)
        server.cont()
        await rig.ready("a")
        assert "dead" not in rig.left("a")
        assert rig.health("a").probe_failures == 0

    rig.run(story())


def test_joins_within_the_cooldown_are_one_change(rig: Rig) -> None:
    async def story() -> None:
        urls = [rig.servers[name].url for name in "abc"]
        async with rig.fleet_with(*urls, topology_change_cooldown_seconds=1.2) as fleet:
            result = await rig.publish()
            assert len(result.committed) == 3
            first, second = rig.servers.start("d", "e")
            epoch = fleet.state.epoch
            fleet.register_server(first.url)
            await rig.until(lambda: rig.status("d") == "joining")
            began = time.monotonic()
            await asyncio.sleep(0.3)
            fleet.register_server(second.url)
            rig.servers["c"].kill()
            await rig.dead("c", 1.0)
            result = await rig.publish()
            assert {each.instance for each in result.outcomes} == {rig.health(name).instance for name in "ab"}
            assert rig.status("d") == "joining", "it waits for the end of the cooldown"
            await rig.ready("d", "e", "a", "b")
            assert time.monotonic() - began > 1.0
            both = [at for at, url, status, _ in rig.changes if status == "warming" and url in (first.url, second.url)]
            assert len(both) == 2
            assert abs(both[0] - both[1]) < 0.2, "the second one did not begin the cooldown anew"
            assert fleet.state.epoch > epoch
            result = await rig.publish()
            assert len(result.committed) == 4

    rig.run(story())


def test_servers_of_a_registry_come_and_go(rig: Rig, tmp_path) -> None:
    async def story() -> None:
        registry = {"type": "file", "folder": str(tmp_path / "leases"), "ttl_seconds": 0.9}
        (tmp_path / "leases").mkdir()
        (tmp_path / "leases" / "garbage.json").write_text('{"url": "http:')
        async with rig.fleet_with(rig.servers["a"].url, registry=registry):
            await rig.publish()
            (server,) = rig.servers.start("f", registry=registry)
            await rig.ready("f")
            await rig.publish()
            server.kill()
            await rig.dead("f", 2.0)
            server.start()
            await rig.ready("f")
            for file in (tmp_path / "leases").glob("*"):
                if file.is_file():
                    file.write_bytes(b"\0\xff")
            result = await rig.publish()
            assert len(result.committed) == 2, "a registry that says nothing takes nobody out"
            await asyncio.sleep(1.0)
            assert rig.status("f") == "ready"
            server.process.send_signal(signal.SIGTERM)
            await rig.until(lambda: rig.status("f") in ("gone", "dead", ""), 4.0)

    rig.run(story())


def test_one_that_is_told_to_end_has_left_and_has_not_failed(rig: Rig) -> None:
    async def story() -> None:
        for _ in range(4):
            rig.ask(60)
        server = rig.servers["b"]
        server.process.send_signal(signal.SIGTERM)
        await rig.until(lambda: rig.status("b") == "gone", 10.0)
        assert rig.left("b") == ["draining", "gone"], "neither suspect nor dead"
        assert rig.health("b").reason.startswith("it has left")
        await rig.until(lambda: not server.runs, 10.0)
        assert server.process.returncode == 0
        await rig.finished()
        server.start()
        await rig.ready("b")

    rig.run(story())


def test_a_rebuild_that_was_asked_for_is_not_forgotten(rig: Rig) -> None:
    async def story() -> None:
        fleet = rig.fleet
        await rig.publish()
        assert not fleet.consume_group_rebuild_request()
        before, version = fleet.get_last_topology_change_time(), fleet.group_version
        rig.servers["a"].kill()
        await rig.dead("a")
        assert fleet.consume_group_rebuild_request()
        assert fleet.consume_group_rebuild_request(), "asking is not doing"
        assert fleet.get_last_topology_change_time() > before
        decision = fleet.maybe_rebuild_weight_update_group()
        assert decision.action == "rebuild"
        assert len(decision.topology.members) == 2
        await rig.publish()
        assert not fleet.consume_group_rebuild_request()
        assert fleet.group_version > version
        assert fleet.maybe_rebuild_weight_update_group().action == "keep"

    rig.run(story())


def test_targets_are_members_or_an_error(rig: Rig) -> None:
    async def story() -> None:
        urls = [rig.servers[name].url for name in "abc"]
        assert sorted(rig.fleet._get_target_addresses(None)) == sorted(urls)
        assert rig.fleet._get_target_addresses([]) == ()
        assert rig.fleet._get_target_addresses(urls[1:2]) == (urls[1],)
        with pytest.raises(ValueError, match=r"127\.0\.0\.1:1\b"):
            rig.fleet._get_target_addresses([urls[0], "http://127.0.0.1:1"])
        rig.servers["b"].kill()
        await rig.dead("b")
        with pytest.raises(ValueError, match=urls[1]):
            rig.fleet._get_target_addresses(urls)

    rig.run(story())


def test_a_server_is_taken_out_and_in_again(rig: Rig) -> None:
    async def story() -> None:
        fleet, url = rig.fleet, rig.servers["a"].url
        for _ in range(6):
            rig.ask(40)
        before = fleet.state.epoch
        epoch = fleet.deregister_server(url)
        assert epoch > before
        assert fleet.deregister_server(url) == epoch, "twice changes nothing"
        await rig.until(lambda: rig.status("a") == "gone")
        await asyncio.sleep(0.4)
        assert url not in fleet.get_active_server_addresses(), "it is found, and stays out"
        assert "ductile fleet join" in fleet.kept_out.get(url, "ductile fleet join")
        fleet.register_server(url)
        assert fleet.register_server(url) >= epoch
        await rig.ready("a")
        fleet.deregister_server(rig.servers["b"].url, "now")
        fleet.deregister_server(rig.servers["c"].url, "now")
        with pytest.raises(ValueError, match="min_healthy_servers"):
            fleet.deregister_server(url)
        with pytest.raises(ValueError, match="address"):
            fleet.register_server("not an address")
        await rig.finished()

    rig.run(story())


# -- 7.2: removal, join -----------------------------------------------------------------------------------------------


def test_versions_reach_all_servers(rig: Rig) -> None:
    async def story() -> None:
        for _ in range(3):
            rig.ask(60)
            rig.ask(60)
            result = await rig.publish()
            assert len(result.committed) == 3
            assert result.digest == rig.truth.digests[result.version]
        assert len(await rig.finished()) == 6

    rig.run(story())


def test_requests_of_a_killed_server_go_on_elsewhere(rig: Rig) -> None:
    async def story() -> None:
        before = rig.servers["a"].state().num_sampled
        for _ in range(32):
            rig.ask(80)
        await rig.until(
            lambda: (now := rig.servers["a"].state()).num_running > 3 and now.num_sampled > before + 30,
            what="requests of a have tokens",
        )
        rig.servers["a"].kill()
        await rig.dead("a", within_s=2.0)
        done = await rig.finished()
        assert len(done) == 32
        assert len((await rig.publish()).committed) == 2

    rig.run(story())


def test_without_any_server_requests_wait_and_then_fail_with_a_sentence(rig: Rig) -> None:
    async def story() -> None:
        for name in "abc":
            rig.servers[name].kill()
            await rig.dead(name)
        began = time.monotonic()
        with pytest.raises(Late, match="generat"):
            await rig.ask(10)
        assert time.monotonic() - began < PATIENCE_S + 3.0

    rig.run(story())


def test_a_server_joins_and_all_ranks_do_the_same(rig: Rig) -> None:
    async def story() -> None:
        await rig.publish()
        (joiner,) = rig.servers.start("d")
        rig.fleet.register_server(joiner.url)
        await rig.ready("d")
        assert rig.left("d")[:3] == ["joining", "warming", "ready"]
        assert joiner.live[1] == rig.truth.digests[rig.live]
        for name in "abc":  # nobody has a peer any more
            rig.servers[name].kill()
            await rig.dead(name)
        joiner.kill()
        await rig.dead("d")
        rig.servers["a"].start()
        await rig.ready("a", within_s=8.0)

    rig.run(story())


@pytest.mark.parametrize("point", ["bucket-mid", "verify", "commit"])
def test_who_joins_during_an_update_is_no_part_of_it(rig: Rig, point: str) -> None:
    async def story() -> None:
        (joiner,) = rig.servers.start("d")
        rig.servers["a"].fault(point, "hold")
        publishing = rig.publishing()
        await rig.until(lambda: rig.servers["a"].reached(point))
        rig.fleet.register_server(joiner.url)
        await rig.until(lambda: rig.status("d") in ("joining", "warming", "stale"), 2.0)
        await asyncio.sleep(0.2)
        assert rig.status("d") != "ready"
        rig.servers["a"].clear()
        result = await publishing
        assert {each.instance for each in result.outcomes} == {rig.health(name).instance for name in "abc"}
        assert len(result.committed) == 3
        await rig.ready("a", "b", "c", "d")

    rig.run(story())


@pytest.mark.parametrize("fault", ["exit", "stop"])
def test_a_joiner_that_dies_half_way_harms_nobody(rig: Rig, fault: str) -> None:
    async def story() -> None:
        (joiner,) = rig.servers.start("d")
        joiner.fault("bucket-mid", "hold" if fault == "stop" else "exit")
        rig.ask(60)
        rig.fleet.register_server(joiner.url)
        await rig.until(lambda: joiner.reached("bucket-mid"))
        if fault == "stop":
            joiner.stop()
        result = await rig.publish()
        assert len([each for each in result.outcomes if each.outcome == "committed"]) == 3
        await rig.ready("a", "b", "c")
        assert rig.status("d") != "ready"
        if fault == "exit":
            joiner.clear()
            joiner.start()
            await rig.ready("d")

    rig.run(story())


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_donor_that_dies_half_way_is_replaced(rig: Rig, fault: str) -> None:
    async def story() -> None:
        (joiner,) = rig.servers.start("d")
        joiner.fault("bucket-mid", "hold")
        rig.fleet.register_server(joiner.url)
        await rig.until(lambda: joiner.reached("bucket-mid"))
        for name in "ab":  # whoever it is
            rig.servers[name].kill() if fault == "kill" else rig.servers[name].stop()
        joiner.clear()
        await rig.ready("c", "d", within_s=10.0)

    rig.run(story())


def test_a_server_of_another_model_stays_out_with_a_reason(rig: Rig, tmp_path) -> None:
    async def story() -> None:
        other = make_model_folder(tmp_path / "other", hidden_size=48)
        (joiner,) = rig.servers.start("d", model=other)
        rig.watcher.urls.pop("d", None)
        rig.fleet.register_server(joiner.url)
        await rig.until(lambda: joiner.url in rig.fleet.kept_out or rig.status("d") == "stale", 4.0)
        said = rig.fleet.kept_out.get(joiner.url) or rig.health("d").reason
        assert "model" in said
        assert len((await rig.publish()).committed) == 3
        assert rig.status("d") != "ready"

    rig.run(story())


# -- 7.2, 7.3: ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [0, 1])
def test_a_rank_that_refuses_once_is_asked_again(rig: Rig, slot: int) -> None:
    async def story() -> None:
        for _ in range(3):
            rig.ask(60)
        ranks.arm(rig.trainers.points, slot, "BeginUpdate", "raise")
        result = await rig.publish()
        assert result.attempts == 2
        assert len(result.committed) == 3
        await rig.finished()
        result = await rig.publish()
        assert result.attempts == 1

    rig.run(story())


@pytest.mark.parametrize("slot", [0, 1])
def test_a_rank_that_dies_is_named(rig: Rig, slot: int) -> None:
    async def story() -> None:
        for _ in range(3):
            rig.ask(60)
        ranks.arm(rig.trainers.points, slot, "BeginUpdate", "exit")
        began = time.monotonic()
        with pytest.raises(Failure, match=f"slot {slot}"):
            await rig.publish()
        assert time.monotonic() - began < 6.0
        for name in "abc":
            assert rig.servers[name].state().version == rig.live, "they serve what they had"
        await rig.finished()
        rig.trainers.is_broken = True

    rig.run(story())


def test_a_rank_that_is_killed_leaves_no_segment(rig: Rig) -> None:
    """In the middle of an update: some servers have buckets of it, and one has none, so it is not through."""

    async def story() -> None:
        rig.servers["a"].fault("bucket-first", "hold")
        publishing = rig.publishing()
        await rig.until(lambda: rig.servers["a"].reached("bucket-first"))
        rig.trainers.kill(1)
        async with asyncio.timeout(CONSISTENT_S):
            with pytest.raises(Failure, match="slot 1"):
                await publishing
            rig.servers["a"].clear()
            for name in "abc":
                await rig.until(lambda name=name: _is_as_before(rig, name))
        await rig.heal()
        await rig.until(lambda: rig.segments() == [], what="no segment is left")

    rig.run(story())


def _is_as_before(rig: Rig, name: str) -> bool:
    """The server generates with the live version, and nothing of another one is under way there."""
    state = rig.servers[name].state()
    assert state.version == rig.live
    return not state.paused and state.update is not None and state.update.phase in ("aborted", "failed")


def test_the_next_optimizer_step_does_not_change_what_is_sent(rig: Rig) -> None:
    async def story() -> None:
        for name in "abc":
            rig.servers[name].fault("bucket-mid", "hold")
        publishing = rig.publishing()
        await rig.until(lambda: rig.servers["a"].reached("bucket-mid"))
        stepping = asyncio.create_task(rig.trainers.step())
        await asyncio.sleep(0.3)
        for name in "abc":
            rig.servers[name].clear()
        result = await publishing
        await stepping
        assert len(result.committed) == 3
        assert result.digest == rig.truth.digests[result.version]
        rig.ask(40)
        await rig.finished()

    rig.run(story())


# -- 7.2: hangs, shrink, flapping -------------------------------------------------------------------------------------


def test_a_receiver_that_hangs_costs_a_bucket_timeout_and_no_more(rig: Rig) -> None:
    """And not the time that the update may take in all."""

    async def story() -> None:
        async with rig.fleet_with(update_total_timeout_seconds=25.0, enable_health_monitor=False):
            server = rig.servers["a"]
            server.fault("bucket-mid", "hold")
            publishing = rig.publishing()
            await rig.until(lambda: server.reached("bucket-mid"))
            server.stop()
            server.clear()
            async with asyncio.timeout(12.0):
                result = await publishing
            assert len(result.committed) == 2
            server.cont()

    rig.run(story())


def test_a_slow_receiver_is_not_condemned(rig: Rig) -> None:
    async def story() -> None:
        rig.servers["a"].fault("bucket-mid", f"late {0.7 * BUCKET_S}")
        rig.servers["b"].fault("slow", "0.02")
        rig.ask(40)
        result = await rig.publish()
        assert len(result.committed) == 3
        assert result.attempts == 1
        assert not {"dead", "stale"} & {*rig.left("a"), *rig.left("b")}

    rig.run(story())


def test_all_servers_die_and_two_come_back(rig: Rig) -> None:
    async def story() -> None:
        for _ in range(6):
            rig.ask(60)
        for name in "abc":
            rig.servers[name].kill()
        publishing = rig.publishing()
        await asyncio.sleep(1.0)
        for name in "ab":
            rig.servers[name].start()
        await publishing
        await rig.ready("a", "b")
        assert len(await rig.finished()) == 6

    rig.run(story())


def test_no_server_comes_back(rig: Rig) -> None:
    async def story() -> None:
        for name in "abc":
            rig.servers[name].kill()
        for name in "abc":
            await rig.dead(name)
        began = time.monotonic()
        with pytest.raises(Failure, match="min_healthy_servers"):
            await rig.publish()
        assert time.monotonic() - began < PATIENCE_S + 4.0

    rig.run(story())


def test_a_flapping_server_holds_up_nobody(rig: Rig) -> None:
    """The others have deadlines that a busy machine keeps, too: whoever is late at one is left behind, and should be.
    They are longer than the stops of the flapper."""

    async def story() -> None:
        flapper = rig.servers["a"]
        deadlines = {"update_bucket_timeout_seconds": 5.0, "update_total_timeout_seconds": 15.0}
        async with rig.fleet_with(probe_timeout_seconds=4.0, **deadlines):
            publishing = rig.publishing()
            for turn in range(12):
                match turn % 4:
                    case 0:
                        flapper.kill()
                    case 1:  # not in the event loop, where deadlines of the others run
                        await asyncio.to_thread(flapper.start)
                    case 2:
                        flapper.stop()
                    case 3:
                        flapper.cont()
                rig.ask(20)
                if publishing.done():
                    publishing = rig.publishing()
                await asyncio.sleep(0.35)
            await publishing
            assert len(await rig.finished()) == 12
            result = await rig.publish()
            assert {rig.health(name).instance for name in "bc"} <= {*result.committed}
            assert {"dead", "stale"}.isdisjoint([*rig.left("b"), *rig.left("c")])

    rig.run(story())


@pytest.mark.parametrize("in_request", [False, True])
def test_tokens_of_base_weights_are_never_taken(rig: Rig, in_request: bool) -> None:
    async def story() -> None:
        await rig.publish()
        if in_request:
            for _ in range(12):
                rig.ask(200)
            await rig.until(lambda: rig.servers["a"].state().num_running > 0)
        rig.servers["a"].restart()
        for _ in range(12):
            rig.ask(30)
        for done in await rig.finished():
            assert min(done.versions) == rig.live
        await rig.ready("a")

    rig.run(story())


# -- 7.2: pause, capacity, routing ------------------------------------------------------------------------------------


def test_other_clients_of_the_servers_see_whole_versions(rig: Rig) -> None:
    async def story() -> None:
        url = rig.servers["a"].url
        clients = [Client(url, "/v1/completions", 80), Client(url, "/v1/chat/completions", 80)]
        for _ in range(5):
            rig.ask(60)
            await rig.publish()
        for client in clients:
            for told in await asyncio.to_thread(client.stop):
                assert not told.failure
                assert not rig.truth.why_not(told.prompt, told.token_ids, told.logprobs, told.versions)
                assert [rig.truth.digests[version] for version in told.versions] == told.digests
        assert len({version for client in clients for told in client.told for version in told.versions}) > 2

    rig.run(story())


def test_a_paused_server_takes_a_version(rig: Rig) -> None:
    async def story() -> None:
        hand = HandUpdate.of(rig.servers["a"], rig.truth.tensors[0], 0, rig.servers["a"].state().epoch)
        assert hand.pause(lease_s=20.0).status_code == 200
        assert len((await rig.publish()).committed) == 3
        assert not rig.servers["a"].state().paused
        for _ in range(6):
            rig.ask(20)
        await rig.finished()

    rig.run(story())


def test_capacity_follows_the_servers_that_serve(rig: Rig) -> None:
    async def story() -> None:
        before = rig.generators.capacity
        rig.servers["a"].kill()
        await rig.dead("a")
        assert rig.generators.capacity == before * 2 // 3
        rig.servers["a"].start()
        await rig.ready("a")
        assert rig.generators.capacity == before

    rig.run(story())


def test_a_slow_server_gets_less(rig: Rig) -> None:
    async def story() -> None:
        await asyncio.sleep(0)
        rig.servers["a"].fault("slow", "0.05")
        began = {name: rig.servers[name].state().num_sampled for name in "abc"}
        waiting: set[asyncio.Task] = set()
        for _ in range(30):
            waiting.add(rig.ask(12))
            if len(waiting) > 5:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await rig.finished()
        sampled = {name: rig.servers[name].state().num_sampled - before for name, before in began.items()}
        assert sampled["a"] < min(sampled["b"], sampled["c"])

    rig.run(story())


# -- 7.4 --------------------------------------------------------------------------------------------------------------


def test_of_two_controllers_one_rules(rig: Rig, tmp_path) -> None:
    from ductile.fleet.registry.authority import FolderAuthority

    async def story() -> None:
        registry = {"type": "file", "folder": str(tmp_path / "leases"), "ttl_seconds": 0.9}
        (tmp_path / "leases").mkdir(mode=0o700)
        async with rig.fleet_with(*rig.urls, registry=registry) as fleet:
            await rig.publish()
            other = FolderAuthority(tmp_path / "leases", "another", 0.9)
            assert await other.claim() is None, "it is ruled"
            epoch = rig.servers["a"].state().epoch
            zombie = HandUpdate.of(rig.servers["a"], rig.truth.tensors[0], 0, epoch - 1)
            assert zombie.prepare().status_code == 409
            newer = HandUpdate.of(rig.servers["a"], rig.truth.tensors[0], 0, epoch + 1000)
            assert newer.pause(lease_s=0.3).status_code == 200, "who has been cut off does not know that it is over"
            await rig.until(lambda: fleet._shared.fenced, 3.0, "the older one is fenced")
            with pytest.raises(Failure, match="another run has"):
                await rig.publish()
            assert await other.claim() is None
        assert rig.fleet.state.epoch > epoch + 1000
        await rig.publish()
        await rig.ready(*"abc")

    rig.run(story())


def test_when_nobody_answers_nobody_is_taken_out(rig: Rig) -> None:
    async def story() -> None:
        for name in "abc":
            rig.servers[name].stop()
        await rig.until(lambda: all(rig.health(name).probe_failures >= 4 for name in "abc"), 5.0)
        assert not {"dead"} & {*rig.left("a"), *rig.left("b"), *rig.left("c")}
        assert "our side" in rig.fleet._judge.own_fault
        for name in "abc":
            rig.servers[name].cont()
        await rig.ready(*"abc")

    rig.run(story())


@pytest.mark.parametrize("broadcast", ["filesystem", "nccl"])
def test_versions_go_every_way(rig: Rig, broadcast: str) -> None:
    async def story() -> None:
        carrier = {"filesystem": "disk", "nccl": "point_to_point"}[broadcast]
        async with rig.fleet_with(broadcast=broadcast):
            for _ in range(2):
                rig.ask(40)
                result = await rig.publish()
                assert {*result.carriers.values()} == {carrier}
                assert len(result.committed) == 3, result
            rig.servers["b"].fault("bucket-mid", "exit")
            result = await rig.publish()
            assert len(result.committed) == 2, result
            await rig.ready("a", "c")
            rig.servers["b"].restart()
            await rig.ready("b")
            await rig.finished()

    rig.run(story())


def test_two_servers_that_join_by_disk_get_the_same_version(rig: Rig) -> None:
    async def story() -> None:
        async with rig.fleet_with(*rig.urls[:2], broadcast="filesystem", join_transport="disk") as fleet:
            await rig.publish()
            for name in "ab":  # else they give it
                rig.servers[name].kill()
                await rig.dead(name)
            for name in "de":
                (joiner,) = rig.servers.start(name)
                fleet.register_server(joiner.url)
                await rig.ready(name)
                joiner.kill()
                await rig.dead(name)
            for name in "ab":
                rig.servers[name].restart()
                await rig.ready(name)

    rig.run(story())


def test_what_no_step_has_changed_is_not_sent_again(rig: Rig) -> None:
    async def story() -> None:
        whole = await rig.publish()
        await rig.publish(step=False)  # after it the fleet knows that looking for what has not changed pays
        same = await rig.publish(step=False)
        assert len(same.committed) == len(rig.names)
        assert same.num_bytes == 0 < same.num_bytes_unchanged <= whole.num_bytes
        assert same.digest == whole.digest
        assert rig.events("weights_updated")[-1]["num_bytes_unchanged"] == same.num_bytes_unchanged
        rig.servers["a"].restart()
        await rig.ready("a")
        changed = await rig.publish()
        assert changed.num_bytes > 0
        assert changed.digest != whole.digest
        rig.ask(20)
        await rig.finished()

    rig.run(story())


# -- Bugs that others had in review -----------------------------------------------------------------------------------


def test_who_restarts_during_an_update_is_not_promoted_by_it(rig: Rig) -> None:
    async def story() -> None:
        server = rig.servers["a"]
        for name in "bc":
            rig.servers[name].fault("bucket-mid", f"late {0.6 * BUCKET_S}")
        publishing = rig.publishing()
        await rig.until(lambda: rig.servers["b"].reached("bucket-mid"))
        old = rig.health("a").instance
        server.restart()
        result = await publishing
        outcome = next(each for each in result.outcomes if each.instance == old)
        assert outcome.outcome != "committed"
        await rig.ready("a")
        assert server.live[1] == rig.truth.digests[rig.live]
        assert rig.health("a").instance != old

    rig.run(story())


def test_a_restarted_server_has_no_history(rig: Rig) -> None:
    async def story() -> None:
        rig.fleet.request_failed(rig.health("a").instance, "a test says so")
        rig.fleet.request_failed(rig.health("a").instance, "a test says so")
        assert rig.health("a").request_failures == 2
        rig.servers["a"].restart()
        await rig.ready("a")
        assert rig.health("a").request_failures == 0

    rig.run(story())


def test_the_recovery_of_one_server_clears_no_other(rig: Rig) -> None:
    async def story() -> None:
        wedged = rig.health("a").instance
        for _ in range(2):
            rig.fleet.request_failed(wedged, "a test says so")
        rig.servers["b"].restart()
        await rig.ready("b")
        result = await rig.publish()
        assert wedged in result.committed
        assert rig.health("a").request_failures == 2, "a version does not mend an engine"
        await rig.until(lambda: rig.health("a").on_trial, 5.0, "it answers two probes")
        rig.servers["a"].fault("wedge", "on")
        for _ in range(6):
            rig.ask(20)
        await rig.until(
            lambda: rig.fleet.state.servers.get(InstanceId(wedged)) is None or rig.status("a") == "dead", 6.0
        )
        assert len(await rig.finished()) == 6

    rig.run(story())


def test_restarts_are_capped(rig: Rig) -> None:
    async def story() -> None:
        async with rig.fleet_with(max_rejoins=2) as fleet:
            await rig.publish()
            for _ in range(3):
                await rig.ready("a")
                rig.servers["a"].kill()
                await rig.dead("a")
                rig.servers["a"].start()
            await rig.until(lambda: "max_rejoins" in fleet.kept_out.get(rig.servers["a"].url, ""), 3.0)
            await asyncio.sleep(0.4)
            assert rig.servers["a"].url not in fleet.get_active_server_addresses()
            fleet.register_server(rig.servers["a"].url)
            await rig.ready("a")

    rig.run(story())


def test_a_wrong_key_is_a_refusal_and_asked_once(rig: Rig) -> None:
    async def story() -> None:
        (keyed,) = rig.servers.start("d", server={"api_key": "sk-this-is-a-secret"})
        rig.fleet.register_server(keyed.url)
        await rig.until(lambda: keyed.url in rig.fleet.kept_out, 4.0)
        assert "key" in rig.fleet.kept_out[keyed.url]
        events = json.dumps(rig.events("server_noted")) + rig.fleet.kept_out[keyed.url]
        assert "sk-this-is-a-secret" not in events
        assert len((await rig.publish()).committed) == 3

    rig.run(story())
