"""A node behind its agent: real processes, and every way in which one side may lose the other."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from ductile.cluster.agents import AgentCluster
from ductile.cluster.cluster import StartFailed
from ductile.config.schema.cluster import ClusterConfig
from ductile.messages.agents import AgentSettings, NodeSettings
from ductile.messages.workers import Done, Ping
from ductile.transport.frames import FrameRouter
from ductile.transport.mailbox import Died
from tests.cluster.processes import is_running, parent_of, processes_with
from tests.cluster.test_orphans import GONE_WITHIN_S, Orchestrator
from tests.slot.echo import ECHO
from tests.transport.transports import ON_LOOPBACK, TOKEN, eventually

LEASE_S = 2.5
GONE_S = 30.0


def play(folder: Path, story: Callable[[AgentCluster, list[tuple[int, str]]], Awaitable[None]], **keys) -> None:
    """Have a story take place above two slots behind one agent; it gets the deaths as they are reported."""

    async def whole() -> None:
        config = ClusterConfig(device="cpu", **keys)
        async with AgentCluster([0, 1], config, folder, [()], 2, ECHO) as cluster:
            cluster.ends_without(lambda slot: False)
            deaths: list[tuple[int, str]] = []
            cluster.mailbox.subscribe(
                lambda slot, event: deaths.append((slot, event.reason)) if isinstance(event, Died) else None
            )
            await story(cluster, deaths)
            mark = f"DUCTILE_RUN={cluster._settings().run}"
        assert processes_with(mark) == {}

    asyncio.run(asyncio.wait_for(whole(), 60))


def agent_of(cluster: AgentCluster) -> int:
    return cluster._nodes[0]._agent.pid


def pids_of(cluster: AgentCluster) -> list[int]:
    return [process.pid for process in cluster.processes.values()]


async def assert_lost_with_the_node(cluster: AgentCluster, deaths: list[tuple[int, str]], how: str) -> None:
    agent, pids = agent_of(cluster), pids_of(cluster)
    await eventually(lambda: len(deaths) == 2, GONE_S)
    for slot, reason in deaths:
        lost = rf"slot {slot} \(pid {pids[slot]}\) was lost with node 1 \(its agent, pid {agent}, {how}\) while idle"
        assert re.fullmatch(lost, reason)
    assert [slot for slot, _ in deaths] == [0, 1]
    await eventually(lambda: not any(is_running(pid) for pid in [agent, *pids]), GONE_S)
    with pytest.raises(StartFailed, match=rf"slot 0 cannot be started: it was lost with node 1 .*{how}"):
        await cluster.add([0])


def test_a_killed_slot_is_reported_in_a_sentence_and_starts_anew(tmp_path: Path):
    async def story(cluster: AgentCluster, deaths):
        pids = pids_of(cluster)
        os.kill(pids[1], signal.SIGKILL)
        await eventually(lambda: deaths, 2.0)
        assert deaths == [(1, f"slot 1 (pid {pids[1]}) was killed by SIGKILL while idle")]
        assert await cluster.mailbox.ask(0, Ping(), 10) == Done()
        assert await cluster.add([0, 1]) == [1]
        assert await cluster.mailbox.ask(1, Ping(), 10) == Done()
        assert pids_of(cluster)[1] != pids[1]
        assert len(deaths) == 1

    play(tmp_path, story)


def test_a_condemned_slot_is_killed_through_the_agent(tmp_path: Path):
    async def story(cluster: AgentCluster, deaths):
        pid = pids_of(cluster)[0]
        cluster.condemn(0, "slot 0 hangs")
        await eventually(lambda: not is_running(pid), 5.0)
        assert deaths == [(0, "slot 0 hangs")]
        assert await cluster.mailbox.ask(1, Ping(), 10) == Done()

    play(tmp_path, story)


def test_slots_of_a_killed_agent_die_and_are_all_reported_lost(tmp_path: Path):
    async def story(cluster: AgentCluster, deaths):
        os.kill(agent_of(cluster), signal.SIGKILL)
        await eventually(lambda: deaths, 2.0)
        await assert_lost_with_the_node(cluster, deaths, "was killed by SIGKILL")

    play(tmp_path, story)


def test_a_silent_agent_loses_its_lease_and_its_slots(tmp_path: Path):
    async def story(cluster: AgentCluster, deaths):
        os.kill(agent_of(cluster), signal.SIGSTOP)
        await assert_lost_with_the_node(cluster, deaths, r"was silent for 2\.5 s \(cluster\.heartbeat_timeout_s\)")

    play(tmp_path, story, heartbeat_timeout_s=LEASE_S)


def test_an_agent_that_hears_nothing_of_the_orchestrator_ends_its_slots(tmp_path: Path):
    async def story(cluster: AgentCluster, deaths):
        cluster._nodes[0]._working[1].cancel()  # its beats
        await assert_lost_with_the_node(cluster, deaths, "ended: nothing came from the orchestrator for 2.5 s")
        log = (tmp_path / "agent_1.log").read_text()
        assert log == "the agent ends: nothing came from the orchestrator for 2.5 s\n"

    play(tmp_path, story, heartbeat_timeout_s=LEASE_S)


def test_a_node_whose_process_server_dies_is_lost(tmp_path: Path):
    async def story(cluster: AgentCluster, deaths):
        [server] = {parent_of(pid) for pid in pids_of(cluster)}
        assert parent_of(server) == agent_of(cluster)
        os.kill(server, signal.SIGKILL)
        how = rf"ended: the process 'process server' \(pid {server}\) was killed by SIGKILL"
        await assert_lost_with_the_node(cluster, deaths, how)

    play(tmp_path, story)


def test_a_wrong_token_is_refused(tmp_path: Path):
    """The agent's messages are dropped, and as nothing comes back it ends."""
    run = uuid.uuid4().hex
    node = NodeSettings(
        run=run,
        address="tcp://127.0.0.1:9",
        token=b"the token of yesterday's run....".hex(),
        logs=str(tmp_path),
        roles=ECHO,
        device="cpu",
        slots_per_device=1,
        cpu_slot_fraction=None,
        start_timeout_s=30.0,
        node=1,
    )

    async def story() -> None:
        frames = FrameRouter(TOKEN, ON_LOOPBACK)
        hearing = asyncio.create_task(frames.receive())
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "ductile.cluster.agent"), stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert agent.stdin is not None
        agent.stdin.write(msgspec.json.encode(AgentSettings(frames.address, LEASE_S, node)) + b"\n")
        await eventually(lambda: frames.dropped["unknown token"] > 1)
        assert agent.stderr is not None
        assert (await agent.stderr.read()).decode() == "the agent ends: nothing came from the orchestrator for 2.5 s\n"
        assert await agent.wait() == 1
        assert not hearing.done()
        assert frames.dropped.keys() == {"unknown token"}
        hearing.cancel()
        frames.close()

    asyncio.run(asyncio.wait_for(story(), 60))
    assert processes_with(f"DUCTILE_RUN={run}") == {}


def test_a_role_that_cannot_be_imported_on_the_node_is_reported_at_the_start(tmp_path: Path):
    async def story() -> None:
        roles = {"train": "ductile.nowhere:TrainRole"}
        with pytest.raises(StartFailed, match=r"importing ductile.nowhere failed: ModuleNotFoundError"):
            async with AgentCluster([0], ClusterConfig(device="cpu"), tmp_path, [()], 1, roles):
                pass

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_command_that_cannot_be_run_is_reported_at_the_start(tmp_path: Path):
    async def story() -> None:
        with pytest.raises(StartFailed, match=r"the agent of node 1 cannot be started: .*no-such-shell"):
            async with AgentCluster([0], ClusterConfig(device="cpu"), tmp_path, [("no-such-shell", "node7")], 1, ECHO):
                pass

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_slot_beyond_the_nodes_is_refused(tmp_path: Path):
    async def story(cluster: AgentCluster, deaths):
        with pytest.raises(StartFailed, match="slot 2 has no node: there is room for slots 0 to 1"):
            await cluster.add([2])

    play(tmp_path, story)


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_an_agent_and_its_slots_end_with_a_killed_orchestrator(tmp_path: Path, stopped: bool):
    run = Orchestrator(tmp_path, "agents")
    try:
        # Orchestrator, its process server and store, the agent, its process server, three slots.
        assert len(processes_with(run.mark)) == 8
        if stopped:
            os.kill(run.pids["agent"], signal.SIGSTOP)
        run.process.kill()
        run.process.wait(GONE_WITHIN_S)
        run.assert_all_gone()
    finally:
        run.close()
