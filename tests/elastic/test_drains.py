"""Notices about slots in memory: what they may not do to a run, and what becomes of them however a slot ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ductile.cluster.notices import Notices
from ductile.core.scheduling.drains import CannotDrain, Notice
from ductile.elastic.drains import ENDING_S, Drains
from ductile.observe import Recorder, read_jsonl
from ductile.transport.mailbox import Mailbox
from tests.cluster.memory_cluster import MemoryCluster
from tests.transport.transports import MemoryTransport, eventually


class SlowCluster(MemoryCluster):
    """Its slots take long to leave."""

    def __init__(self, mailbox: Mailbox, slots: Collection[int]) -> None:
        super().__init__(mailbox, sorted(slots))
        self.may_leave = asyncio.Event()

    async def leave(self, slots) -> None:
        await self.may_leave.wait()
        await super().leave([slot for slot in slots if slot in self.running])


class HeldMover:
    """Empties slots when it may, and keeps which are gone."""

    def __init__(self) -> None:
        self.may_go_on, self.asked = asyncio.Event(), asyncio.Event()
        self.gone: set[int] = set()
        self.may_go_on.set()

    @asynccontextmanager
    async def emptied(self, slots: Collection[int]) -> AsyncIterator[set[int]]:
        self.asked.set()
        await self.may_go_on.wait()
        gone = {*slots}
        yield gone
        self.gone |= gone

    async def restore(self, slots: Collection[int]) -> None: ...


class IdleTrainer:
    layout = SimpleNamespace(slots=())

    async def has_withdrawn(self, slot: int, limit_s: float) -> None: ...


def play(folder: Path, story: Callable[[SlowCluster, Drains, HeldMover], Awaitable[None]]) -> list[dict[str, Any]]:
    """Have a story take place above slots 0 and 1; returns the events."""

    async def whole() -> None:
        cluster = SlowCluster(Mailbox(MemoryTransport({slot: lambda message: None for slot in range(2)})), range(2))
        cluster.ends_without(lambda slot: False)
        record = Recorder(folder)
        async with Drains(cluster, cast(Any, IdleTrainer()), record, lambda: False) as drains:
            await story(cluster, drains, HeldMover())
        record.close()
        assert not cluster.errors
        assert not cluster.has_failed

    asyncio.run(asyncio.wait_for(whole(), 60))
    return list(read_jsonl(folder / "events.jsonl"))


def test_a_slot_that_ends_before_its_notice_is_heeded_costs_no_more_than_itself(tmp_path: Path) -> None:
    async def story(cluster: SlowCluster, drains: Drains, mover: HeldMover) -> None:
        cluster.on_notice(Notice((1,), 5.0, "SIGTERM to its process"))
        cluster.kill(1)
        await asyncio.sleep(ENDING_S + 0.1)
        with pytest.raises(CannotDrain, match="slot 1 does not run"):
            await drains.drain(Notice((1,), 5.0, "ductile drain"))

    assert "slot_noticed" not in {event["kind"] for event in play(tmp_path, story)}


def test_a_notice_that_comes_before_the_roles_is_heeded_once_slots_can_be_emptied(tmp_path: Path) -> None:
    async def story(cluster: SlowCluster, drains: Drains, mover: HeldMover) -> None:
        cluster.on_notice(Notice((1,), 60.0, "SIGTERM to its process"))
        await eventually(lambda: drains.leaving == {1})
        assert not mover.asked.is_set()
        cluster.may_leave.set()
        drains.begin(mover)
        await eventually(lambda: cluster.mailbox.gone == {1} == mover.gone)

    assert [event["kind"] for event in play(tmp_path, story)] == ["slot_noticed", "slot_gone"]


def test_a_run_that_starts_for_longer_than_the_notice_says_so(tmp_path: Path) -> None:
    async def story(cluster: SlowCluster, drains: Drains, mover: HeldMover) -> None:
        with pytest.raises(CannotDrain, match=r"the run is still starting, and its slots have no roles, after 0\.05 s"):
            await drains.drain(Notice((1,), 0.05, "ductile drain"))

    play(tmp_path, story)


def test_what_nobody_heard_while_the_run_started_is_kept_with_the_seconds_that_are_left() -> None:
    now_s, heard = 100.0, list[Notice]()
    notices = Notices(lambda: now_s)
    notices(Notice((1,), 30.0, "SIGTERM to its process"))
    now_s = 110.0
    notices(Notice((1,), 30.0, "SIGTERM to its process"))
    notices(Notice((2,), 30.0, "SIGTERM to its process"))
    now_s = 135.0
    notices.add(heard.append)
    assert [(notice.slots, notice.deadline_s) for notice in heard] == [((1,), 0.0), ((2,), 5.0)]
    notices(Notice((0,), 30.0, "SIGTERM to its process"))
    assert [notice.slots for notice in heard] == [(1,), (2,), (0,)]
    notices.add(heard.append)
    assert len(heard) == 3


def test_a_slot_that_has_begun_to_leave_is_let_go_after_the_deadline_and_when_the_run_ends(tmp_path: Path) -> None:
    async def story(cluster: SlowCluster, drains: Drains, mover: HeldMover) -> None:
        drains.begin(mover)
        leaving = asyncio.create_task(drains.drain(Notice((1,), 0.2, "ductile drain")))
        await asyncio.sleep(0.5)
        assert not leaving.done()
        cluster.may_leave.set()
        assert (await leaving).slots == (1,)
        cluster.may_leave.clear()
        at_the_end = asyncio.create_task(drains.drain(Notice((0,), 60.0, "ductile drain")))
        await eventually(lambda: drains.leaving == {0})
        await asyncio.sleep(0.1)
        await drains.__aexit__(None, None, None)
        assert at_the_end.done()
        cluster.may_leave.set()
        await eventually(lambda: cluster.mailbox.gone == {0, 1})

    assert "slot_not_emptied" not in {event["kind"] for event in play(tmp_path, story)}


def test_a_slot_that_dies_while_it_is_emptied_is_lost_and_not_gone(tmp_path: Path) -> None:
    """Its restart is one that policies use: nothing waits for `--back`. The other one of the notice is gone."""

    async def story(cluster: SlowCluster, drains: Drains, mover: HeldMover) -> None:
        cluster.may_leave.set()
        mover.may_go_on.clear()
        drains.begin(mover)
        leaving = asyncio.create_task(drains.drain(Notice((0, 1), 60.0, "ductile drain")))
        await mover.asked.wait()
        cluster.kill(1)
        mover.may_go_on.set()
        with pytest.raises(CannotDrain, match="slot 1 was killed by SIGKILL"):
            await leaving
        assert mover.gone == {0} == cluster.mailbox.gone
        with pytest.raises(CannotDrain, match="slot 1 is not gone"):
            await drains.bring_back([1])

    assert [event["kind"] for event in play(tmp_path, story)] == ["slot_noticed", "slot_not_emptied"]
