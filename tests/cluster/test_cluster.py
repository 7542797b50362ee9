"""What everything above a cluster relies on, of the real ones and of their double in memory."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from ductile.cluster.cluster import Cluster
from ductile.cluster.local import LocalCluster
from ductile.cluster.nodes import NodesCluster
from ductile.config.schema.cluster import ClusterConfig
from ductile.messages.workers import Done, Ping
from ductile.roles import SlotLost
from ductile.transport.mailbox import Died, Mailbox
from tests.cluster.joining import join, joined_cluster, stderr_of
from tests.cluster.memory_cluster import MemoryCluster
from tests.cluster.processes import is_running
from tests.nightly import mostly_nightly
from tests.slot.echo import ECHO
from tests.transport.memory_transport import MemoryTransport
from tests.transport.transports import eventually

SLOTS = (0, 1)
Harness = tuple[Cluster, Callable[[int], None], Callable[[], set[int]]]
"""A cluster that has started, how one of its slots is killed from outside, and the process ids that are running."""


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[Harness]:
    async with real(LocalCluster(SLOTS, ClusterConfig(device="cpu"), folder, ECHO)) as harness:
        yield harness


@asynccontextmanager
async def agents(folder: Path) -> AsyncIterator[Harness]:
    """Slots 0 and 1 behind one agent, slot 2 behind another one."""
    agents = [join(folder, 0), join(folder, 1)]
    async with real(joined_cluster(folder, SLOTS, 2, 2, head_is_node=False)) as harness:
        yield harness
    for agent in agents:
        stderr_of(agent)


@asynccontextmanager
async def real(cluster: NodesCluster) -> AsyncIterator[Harness]:
    await cluster.start()
    seen: set[int] = set()

    def running() -> set[int]:
        seen.update(process.pid for process in cluster.processes.values())
        return {pid for pid in seen if is_running(pid)}

    try:
        yield cluster, lambda slot: os.kill(cluster.processes[slot].pid, signal.SIGKILL), running
    finally:
        await cluster.stop()


@asynccontextmanager
async def memory(folder: Path) -> AsyncIterator[Harness]:
    transport = MemoryTransport(dict.fromkeys(range(3), lambda slot, command: Done()))
    cluster = MemoryCluster(Mailbox(transport), SLOTS)
    await cluster.start()
    yield cluster, cluster.kill, lambda: {cluster.processes[slot].pid for slot in cluster.running}


@pytest.fixture(params=mostly_nightly([local, agents, memory], agents, memory), ids=lambda make: make.__name__)
def play(request: pytest.FixtureRequest, tmp_path: Path):
    """Have a story take place in a cluster of two slots."""
    make: Callable[[Path], AbstractAsyncContextManager[Harness]] = request.param

    def run(story: Callable[..., Awaitable[None]]) -> None:
        async def whole() -> None:
            async with make(tmp_path) as harness:
                await story(*harness)

        asyncio.run(asyncio.wait_for(whole(), 60))

    return run


def test_a_start_brings_processes_devices_and_addresses(play):
    async def story(cluster: Cluster, kill, running):
        assert cluster.slots == SLOTS
        assert cluster.devices == dict.fromkeys(SLOTS, "cpu")
        assert running() == {cluster.processes[slot].pid for slot in SLOTS}
        assert re.fullmatch(r"127\.0\.0\.1:\d+", cluster.rendezvous)
        for slot in SLOTS:
            assert await cluster.mailbox.ask(slot, Ping(), 10) == Done()

    play(story)


@pytest.mark.parametrize("needed", [True, False])
def test_a_death_is_reported_once_and_ends_the_run_only_if_it_is_needed(play, needed: bool):
    async def story(cluster: Cluster, kill, running):
        deaths: list[tuple[int, str]] = []
        cluster.mailbox.subscribe(
            lambda slot, event: deaths.append((slot, event.reason)) if isinstance(event, Died) else None
        )
        cluster.ends_without(lambda slot: needed)
        dying = asyncio.create_task(cluster.death())
        kill(1)
        await eventually(lambda: deaths)
        cluster.condemn(1, "slot 1 is not wanted any more")
        await asyncio.sleep(0.05)
        [(slot, reason)] = deaths
        assert (slot, cluster.mailbox.lost) == (1, {1: reason})
        assert "was killed by SIGKILL" in reason
        with pytest.raises(SlotLost, match=re.escape(reason)):
            await cluster.mailbox.ask(1, Ping(), 10)
        assert await cluster.mailbox.ask(0, Ping(), 10) == Done()
        assert dying.done() == needed
        if needed:
            assert await dying == reason
        dying.cancel()

    play(story)


def test_a_run_begins_again_on_the_slots_that_are_left_and_waits_for_another_death(play):
    async def story(cluster: Cluster, kill, running):
        kill(1)
        assert "slot 1" in await cluster.death()
        assert cluster.startable([0, 1]) == {0, 1}
        epoch = cluster.mailbox.epoch
        await cluster.begin_again([0])
        assert not cluster.has_failed
        assert cluster.mailbox.lost.keys() == {1}
        assert cluster.mailbox.epoch >= epoch
        await eventually(lambda: running() == {cluster.processes[0].pid})
        assert await cluster.mailbox.ask(0, Ping(), 10) == Done()
        with pytest.raises(SlotLost):
            await cluster.mailbox.ask(1, Ping(), 10)
        kill(0)
        assert "slot 0" in await cluster.death()
        await cluster.begin_again([0, 1])
        assert cluster.mailbox.lost == {}
        assert await cluster.mailbox.ask(1, Ping(), 10) == Done()

    play(story)


def test_slots_that_do_not_run_are_added_and_lost_ones_start_anew(play):
    async def story(cluster: Cluster, kill, running):
        cluster.ends_without(lambda slot: False)
        cluster.condemn(1, "slot 1 hangs")
        assert cluster.mailbox.lost == {1: "slot 1 hangs"}
        assert await cluster.add([0, 1, 2]) == [1, 2]
        assert await cluster.add([0, 1, 2]) == []
        assert cluster.slots == (0, 1, 2)
        assert cluster.mailbox.lost == {}
        for slot in (0, 1, 2):
            assert await cluster.mailbox.ask(slot, Ping(), 10) == Done()
        assert running() == {cluster.processes[slot].pid for slot in (0, 1, 2)}

    play(story)


def test_the_run_fails_with_the_first_sentence_or_the_error(play):
    async def story(cluster: Cluster, kill, running):
        cluster.fail("the last generator is gone")
        cluster.fail("so is the scorer")
        assert await cluster.death() == "the last generator is gone"

    async def mistake(cluster: Cluster, kill, running):
        cluster.fail_with("the books are wrong", KeyError("books"))
        with pytest.raises(KeyError, match="books"):
            await cluster.death()

    play(story)
    play(mistake)


def test_a_stop_leaves_none(play):
    async def story(cluster: Cluster, kill, running):
        await cluster.add([2])
        assert len(running()) == 3
        await cluster.stop()
        assert running() == set()
        await cluster.stop()

    play(story)
