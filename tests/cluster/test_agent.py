"""A node behind its agent: real processes, and every way in which one side may lose the other."""

import asyncio
import os
import re
import signal
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ductile.cluster.cluster import StartFailed
from ductile.cluster.invitation import Invitation, json_file, key_file
from ductile.cluster.joined import JoinedCluster
from ductile.core.scheduling.drains import Notice
from ductile.events.nodes import NodeJoined, NodesAwaited, NodeWasLost
from ductile.events.slots import SlotStarted
from ductile.messages.workers import Done, Ping
from ductile.observe import RunEvent
from ductile.transport.curve import RunKey
from ductile.transport.mailbox import Died
from tests.cluster.joining import GONE_S, HEAD, join, joined_cluster, started, stderr_of
from tests.cluster.processes import is_running, parent_of, processes_with
from tests.cluster.test_orphans import Orchestrator
from tests.transport.transports import eventually

LEASE_S = 2.5
Story = Callable[[JoinedCluster, list[tuple[int, str]]], Awaitable[None]]


def play(folder: Path, story: Story, events: list[RunEvent] | None = None, **keys) -> None:
    """Have a story take place above two slots of node 0, which is behind an agent; it gets the deaths as they are
    reported."""

    async def whole() -> None:
        cluster = joined_cluster(folder, [0, 1], 2, 1, events, head_is_node=False, **keys)
        async with started(cluster, folder, [0], DUCTILE_TEST=str(folder)):
            cluster.ends_without(lambda slot: False)
            deaths: list[tuple[int, str]] = []
            cluster.mailbox.subscribe(
                lambda slot, event: deaths.append((slot, event.reason)) if isinstance(event, Died) else None
            )
            await story(cluster, deaths)
        assert processes_with(f"DUCTILE_TEST={folder}") == {}

    asyncio.run(asyncio.wait_for(whole(), 240))


def agent_of(cluster: JoinedCluster) -> int:
    return cluster._remote[0].said.pid


def pids_of(cluster: JoinedCluster) -> list[int]:
    return [process.pid for process in cluster.processes.values()]


async def assert_lost_with_the_node(cluster: JoinedCluster, deaths: list[tuple[int, str]], how: str) -> None:
    agent, pids = agent_of(cluster), pids_of(cluster)
    await eventually(lambda: len(deaths) == 2, GONE_S)
    for slot, reason in deaths:
        about = rf"\S+, 127\.0\.0\.1: its agent, pid {agent}, {how}"
        assert re.fullmatch(rf"slot {slot} \(pid {pids[slot]}\) was lost with node 0 \({about}\) while idle", reason)
    assert [slot for slot, _ in deaths] == [0, 1]
    await eventually(lambda: not any(is_running(pid) for pid in [agent, *pids]), GONE_S)
    with pytest.raises(StartFailed, match=rf"slot 0 cannot be started: it was lost with node 0 .*{how}"):
        await cluster.add([0])


def test_a_killed_slot_is_reported_in_a_sentence_and_starts_anew(tmp_path: Path):
    async def story(cluster: JoinedCluster, deaths):
        pids = pids_of(cluster)
        os.kill(pids[1], signal.SIGKILL)
        await eventually(lambda: deaths)
        assert deaths == [(1, f"slot 1 (pid {pids[1]}) was killed by SIGKILL while idle")]
        assert await cluster.mailbox.ask(0, Ping(), 10) == Done()
        assert await cluster.add([0, 1]) == [1]
        assert await cluster.mailbox.ask(1, Ping(), 10) == Done()
        assert pids_of(cluster)[1] != pids[1]
        assert len(deaths) == 1

    play(tmp_path, story)


def test_a_condemned_slot_is_killed_through_the_agent(tmp_path: Path):
    async def story(cluster: JoinedCluster, deaths):
        pid = pids_of(cluster)[0]
        cluster.condemn(0, "slot 0 hangs")
        await eventually(lambda: not is_running(pid))
        assert deaths == [(0, "slot 0 hangs")]
        assert await cluster.mailbox.ask(1, Ping(), 10) == Done()

    play(tmp_path, story)


def test_slots_of_a_killed_agent_die_and_are_all_reported_lost(tmp_path: Path):
    events: list[RunEvent] = []

    async def story(cluster: JoinedCluster, deaths):
        agent = agent_of(cluster)
        os.kill(agent, signal.SIGKILL)
        await assert_lost_with_the_node(cluster, deaths, "is gone: its connection has ended")
        [lost] = [event for event in events if isinstance(event, NodeWasLost)]
        how = rf"Node 0 \(\S+, 127\.0\.0\.1\) is lost: its agent, pid {agent}, is gone: its connection has ended\."
        assert re.fullmatch(how, lost.sentence)

    play(tmp_path, story, events)


@pytest.mark.nightly
def test_a_silent_agent_loses_its_lease_and_its_slots(tmp_path: Path):
    async def story(cluster: JoinedCluster, deaths):
        os.kill(agent_of(cluster), signal.SIGSTOP)
        await eventually(lambda: len(deaths) == 2, GONE_S)
        assert all("was silent for 2.5 s (cluster.heartbeat_timeout_s)" in reason for _, reason in deaths)
        # It hears on its way back that it is not wanted any more.
        os.kill(agent_of(cluster), signal.SIGCONT)
        await assert_lost_with_the_node(cluster, deaths, r"was silent for 2\.5 s \(cluster\.heartbeat_timeout_s\)")

    play(tmp_path, story, heartbeat_timeout_s=LEASE_S)


@pytest.mark.nightly
def test_a_node_that_is_silent_as_a_whole_is_lost_as_one(tmp_path: Path):
    """Its slots are not lost one by one before it."""

    async def story(cluster: JoinedCluster, deaths):
        for pid in (*pids_of(cluster), agent_of(cluster)):
            os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: len(deaths) == 2, GONE_S)
        os.kill(agent_of(cluster), signal.SIGCONT)
        await assert_lost_with_the_node(cluster, deaths, r"was silent for 2\.5 s \(cluster\.heartbeat_timeout_s\)")

    play(tmp_path, story, heartbeat_timeout_s=LEASE_S)


@pytest.mark.nightly
def test_an_agent_that_hears_nothing_of_the_orchestrator_ends_its_slots(tmp_path: Path):
    async def story(cluster: JoinedCluster, deaths):
        cluster._remote[0]._keeping.cancel()
        how = rf"ended: nothing came from the orchestrator at {HEAD}:\d+ for 2.5 s"
        await assert_lost_with_the_node(cluster, deaths, how)

    play(tmp_path, story, heartbeat_timeout_s=LEASE_S)


@pytest.mark.nightly
def test_a_node_whose_process_server_dies_is_lost(tmp_path: Path):
    async def story(cluster: JoinedCluster, deaths):
        [server] = {parent_of(pid) for pid in pids_of(cluster)}
        assert parent_of(server) == agent_of(cluster)
        os.kill(server, signal.SIGKILL)
        how = rf"ended: the process 'process server' \(pid {server}\) was killed by SIGKILL"
        await assert_lost_with_the_node(cluster, deaths, how)

    play(tmp_path, story)


def test_an_agent_that_is_asked_to_leave_ends_its_slots_and_says_so(tmp_path: Path):
    async def story(cluster: JoinedCluster, deaths):
        os.kill(agent_of(cluster), signal.SIGINT)
        await assert_lost_with_the_node(cluster, deaths, "ended: the node was asked to leave")

    play(tmp_path, story)


def test_sigterm_to_an_agent_or_a_slot_is_a_notice_and_a_node_whose_slots_have_left_is_not_lost(tmp_path: Path):
    events: list[RunEvent] = []

    async def story(cluster: JoinedCluster, deaths):
        notices: list[Notice] = []
        cluster.on_notice.add(notices.append)
        agent, slots = agent_of(cluster), tuple(slot for slot in cluster.slots if cluster.node_of(slot) == 0)
        os.kill(cluster.processes[slots[0]].pid, signal.SIGTERM)
        await eventually(lambda: len(notices) == 1)
        os.kill(agent, signal.SIGTERM)
        await eventually(lambda: len(notices) == 2)
        assert [(notice.slots, notice.deadline_s) for notice in notices] == [(slots[:1], 30), (slots, 30)]
        assert [notice.source for notice in notices] == ["SIGTERM to its process", "SIGTERM to the agent of node 0"]
        assert await cluster.mailbox.ask(slots[0], Ping(), 10) == Done(), "it works on"
        await cluster.leave(slots)
        await eventually(lambda: not is_running(agent))
        assert (cluster.mailbox.gone, {slot for slot, _ in deaths}) == ({*slots}, {*slots})
        assert not [event for event in events if isinstance(event, NodeWasLost)]

    play(tmp_path, story, events)


def test_a_role_that_cannot_be_imported_on_the_node_is_reported_at_the_start(tmp_path: Path):
    async def story() -> None:
        roles = {"train": "ductile.nowhere:TrainRole"}
        cluster = joined_cluster(tmp_path, [0], 1, 1, roles=roles, head_is_node=False)
        with pytest.raises(StartFailed, match=r"importing ductile.nowhere failed: ModuleNotFoundError"):
            async with started(cluster, tmp_path, [0]):
                pass

    asyncio.run(asyncio.wait_for(story(), 90))


def test_who_is_missing_is_named_with_how_to_join(tmp_path: Path):
    """What says where the run is goes with it, and only its owner can read the key meanwhile."""
    events: list[RunEvent] = []

    async def story() -> None:
        cluster = joined_cluster(tmp_path, [0, 1, 2], 1, 3, events)
        starting = asyncio.create_task(cluster.start())
        await eventually(lambda: json_file(tmp_path).exists())
        assert stat.S_IMODE(key_file(tmp_path).stat().st_mode) == 0o600
        agent = join(tmp_path, 1)
        await eventually(lambda: cluster._reception.waiting)
        assert re.match(
            r"2 of 3 nodes \(cluster\.num_nodes\) have joined within 120 s \(cluster\.start_timeout_s\): the "
            r"orchestrator's own machine, \S+ \(127\.0\.0\.2\)\. Missing: 1 more node; on each, run ductile join ",
            said := cluster._missing(),
        )
        assert f"DUCTILE_CLUSTER_KEY=... ductile join {cluster.address}" in said
        starting.cancel()
        await asyncio.wait([starting])
        assert "The run is over." in await asyncio.to_thread(stderr_of, agent)
        assert agent.returncode == 0

    asyncio.run(asyncio.wait_for(story(), 90))
    assert not json_file(tmp_path).exists()
    assert not key_file(tmp_path).exists()
    assert [type(event) for event in events] == [NodesAwaited]


def test_nodes_that_do_not_come_are_not_waited_for_without_end(tmp_path: Path):
    async def story() -> None:
        cluster = joined_cluster(tmp_path, [0, 1], 1, 2, start_timeout_s=0.2)
        with pytest.raises(StartFailed, match=r"1 of 2 nodes \(cluster\.num_nodes\) have joined within 0\.2 s"):
            await cluster.start()
        assert not json_file(tmp_path).exists()

    asyncio.run(asyncio.wait_for(story(), 90))


def test_a_wrong_key_is_refused(tmp_path: Path):
    """Neither what it says nor what it connects to comes through: there is no handshake."""

    async def story(cluster: JoinedCluster, deaths):
        (tmp_path / "elsewhere").mkdir()
        wrong = RunKey.new()
        Invitation(cluster.address, 1, 1, wrong.public).write(tmp_path / "elsewhere", wrong)
        agents = [
            join(tmp_path / "elsewhere", 1, "--wait-s", "0"),
            join(cluster.address, 1, "--wait-s", "0", DUCTILE_CLUSTER_KEY=wrong.secret),
        ]
        for agent in agents:
            said = await asyncio.to_thread(stderr_of, agent)
            assert "nobody who has the run's key replies at 127.0.0.1:" in said
            assert wrong.secret not in said
            assert agent.returncode == 2
        assert cluster._reception.waiting == []
        assert await cluster.mailbox.ask(0, Ping(), 10) == Done()

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("arguments", "environment", "why"),
    [
        (["127.0.0.1:9"], {}, "the environment has no DUCTILE_CLUSTER_KEY"),
        (["127.0.0.1:9"], {"DUCTILE_CLUSTER_KEY": "short"}, "a key has 40 characters of Z85"),
        (["no/such/run", "--wait-s", "0"], {}, "no/such/run has no cluster.json after 0 s (--wait-s)"),
    ],
)
def test_what_cannot_be_joined_is_said(arguments: list[str], environment: dict[str, str], why: str):
    agent = join(arguments[0], 1, *arguments[1:], **environment)
    assert why in stderr_of(agent)
    assert agent.returncode == 2


def test_an_agent_refuses_a_key_that_others_can_read(tmp_path: Path):
    key = RunKey.new()
    Invitation("127.0.0.1:9", 2, 2, key.public).write(tmp_path, key)
    key_file(tmp_path).chmod(0o644)
    agent = join(tmp_path, 1)
    assert "can be read by others" in stderr_of(agent)
    assert agent.returncode == 2


def test_nodes_join_a_run_that_is_at_work_up_to_the_most_that_it_may_have(tmp_path: Path):
    events: list[RunEvent] = []

    async def story(cluster: JoinedCluster, deaths):
        second = join(tmp_path, 1)
        await eventually(lambda: cluster.slots == (0, 1, 2, 3), 60.0)
        assert await cluster.mailbox.ask(3, Ping(), 10) == Done()
        third = join(tmp_path, 2)
        assert "The run has all nodes that it may have: 2 (cluster.max_nodes" in await asyncio.to_thread(
            stderr_of, third
        )
        assert third.returncode == 2
        os.kill(cluster._remote[1].said.pid, signal.SIGKILL)
        await eventually(lambda: {2, 3} == {slot for slot, _ in deaths})
        await asyncio.to_thread(second.wait, GONE_S)
        another = join(tmp_path, 1)  # it takes the place of the one that was lost
        await eventually(lambda: sum(isinstance(event, SlotStarted) for event in events) == 4, 60.0)
        assert not cluster.mailbox.lost
        assert await cluster.mailbox.ask(2, Ping(), 10) == Done()
        assert [event.slots for event in events if isinstance(event, NodeJoined)] == [(0, 1), (2, 3), (2, 3)]
        another.send_signal(signal.SIGINT)
        await asyncio.to_thread(stderr_of, another)

    play(tmp_path, story, events, max_nodes=2)


def test_a_restarted_agent_waits_for_its_number(tmp_path: Path):
    """The loss of the one before is noticed only after a while, here when the test ends it."""
    events: list[RunEvent] = []

    async def story(cluster: JoinedCluster, deaths):
        agent = agent_of(cluster)
        os.kill(agent, signal.SIGSTOP)
        again = join(tmp_path, 0, "--node-rank", "0", "--wait-s", "200")
        assert again.stderr is not None
        said = (await asyncio.to_thread(again.stderr.readline)).decode()
        why = "Node 0 is there already: join with another --node-rank, or without it."
        assert said == f"ductile join: {why} It is tried again for 200 s (--wait-s).\n"
        os.kill(agent, signal.SIGKILL)
        await eventually(lambda: sum(isinstance(event, SlotStarted) for event in events) == 2, 60.0)
        assert agent_of(cluster) == again.pid
        assert await cluster.mailbox.ask(0, Ping(), 10) == Done()
        again.send_signal(signal.SIGINT)
        await asyncio.to_thread(stderr_of, again)

    play(tmp_path, story, events)


def test_a_slot_beyond_the_nodes_is_refused(tmp_path: Path):
    async def story(cluster: JoinedCluster, deaths):
        with pytest.raises(StartFailed, match="slot 2 would be on node 1, which has not joined: there are nodes 0"):
            await cluster.add([2])

    play(tmp_path, story)


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["running", "stopped"])
def test_an_agent_and_its_slots_end_with_a_killed_orchestrator(tmp_path: Path, stopped: bool):
    run = Orchestrator(tmp_path, "agents")
    try:
        # Orchestrator, its process server and store, the agent, its process server, three slots.
        assert len(processes_with(run.mark)) == 8
        if stopped:
            os.kill(run.pids["agent"], signal.SIGSTOP)
        run.process.kill()
        run.process.wait(GONE_S)
        if stopped:
            os.kill(run.pids["agent"], signal.SIGCONT)
        run.assert_all_gone()
    finally:
        run.close()
