"""`benchmarks/publish.py` with a tiny model, its processes being threads: what it measures is what it says."""

import argparse
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

import publish
from budget import Budget


@pytest.fixture
def processes() -> Iterator[SimpleNamespace]:
    made = [*(publish.Rank(number, 1) for number in range(publish.RANKS)), *(publish.Instance(n, 1) for n in range(2))]
    pipes = [Pipe() for _ in made]
    threads = [Thread(target=publish.obey, args=(pipe[1], each)) for pipe, each in zip(pipes, made, strict=True)]
    for thread in threads:
        thread.start()
    mine = [pipe[0] for pipe in pipes]
    yield SimpleNamespace(ranks=mine[: publish.RANKS], instances=mine[publish.RANKS :])
    for connection in mine:
        connection.close()
    for thread in threads:
        thread.join()


def test_a_row_for_each_transport(processes: SimpleNamespace, tmp_path: Path) -> None:
    options = argparse.Namespace(
        bucket_mib=0.25, slots=2, repeats=1, reserve_s=0.0, transports=publish.TRANSPORTS, peers=()
    )
    publishing = publish.Publishing(processes, "tp2.pp2", 2, {"tmpfs": str(tmp_path), "disk": str(tmp_path)})
    rows = list(publish.measured(publishing, options, Budget(60)))  # which compares what came to what was sent
    assert [row["transport"] for row in rows] == list(publish.TRANSPORTS)
    for row in rows:
        assert (row["layout"], row["instances"], row["staged"]) == ("tp2.pp2", 2, True)
        assert row["fraction_of_limit"] == row["limit_s"] / row["seconds"]
        assert row["seconds"] > 0 < row["limit_s"]
        assert row.keys() >= {"pause_s", "trainer_extra_bytes", "instance_extra_bytes", "pipeline_ratio"}
