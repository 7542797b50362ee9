"""Notices about slots in memory: what they may not do to a run."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from ductile.core.scheduling.drains import CannotDrain, Notice
from ductile.elastic.drains import ENDING_S, Drains
from ductile.observe import Recorder, read_jsonl
from ductile.transport.mailbox import Mailbox
from tests.cluster.memory_cluster import MemoryCluster
from tests.transport.transports import MemoryTransport


def test_a_slot_that_ends_before_its_notice_is_heeded_costs_no_more_than_itself(tmp_path: Path) -> None:
    async def play() -> MemoryCluster:
        cluster = MemoryCluster(Mailbox(MemoryTransport({slot: lambda message: None for slot in range(2)})), range(2))
        cluster.ends_without(lambda slot: False)
        record = Recorder(tmp_path)
        async with Drains(cluster, cast(Any, None), record, lambda: False) as drains:
            cluster.on_notice(Notice((1,), 5.0, "SIGTERM to its process"))
            cluster.kill(1)
            await asyncio.sleep(ENDING_S + 0.1)
            with pytest.raises(CannotDrain, match="slot 1 does not run"):
                await drains.drain(Notice((1,), 5.0, "ductile drain"))
        record.close()
        return cluster

    cluster = asyncio.run(play())
    assert not cluster.errors
    assert not cluster.has_failed
    assert "slot_noticed" not in {event["kind"] for event in read_jsonl(tmp_path / "events.jsonl")}
