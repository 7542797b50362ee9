"""What a slot says of a change that it cannot prepare."""

import io
import queue
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ductile.core.layout.geometry.parallel_layout import ParallelLayout, ResizeOrder
from ductile.messages.workers import PreparationEnded
from ductile.roles import OutOfMemory, RoleAssignment
from ductile.trainer.prepare import Preparation, ResizeFailed

EPOCH = 7
WITHIN_S = 60.0


def runs_out(preparation: Preparation) -> None:
    raise MemoryError("no room for the new trainer")


@pytest.mark.parametrize("log", ["/dev/full", "a file"])
def test_it_says_why_also_where_its_log_is_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str):
    told: queue.Queue[PreparationEnded] = queue.Queue()
    order = ResizeOrder(EPOCH, ParallelLayout.of((0,)), ParallelLayout.of((0, 1)))
    place = RoleAssignment(0, order.after, EPOCH, "cpu", tell=told.put)
    config = SimpleNamespace(resize=SimpleNamespace(timeout_s=1.0))
    monkeypatch.setattr(Preparation, "_prepare", runs_out)
    written = tmp_path / "slot.log"
    with open(written if log == "a file" else log, "wb", buffering=0) as file:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file, write_through=True))
        preparation = Preparation(order, place, config, None, None)
        preparation.start()
        event = told.get(timeout=WITHIN_S)
        monkeypatch.undo()
    assert event.epoch == EPOCH
    assert event.failure is not None
    assert event.failure.error == "could not prepare: MemoryError: no room for the new trainer"
    assert event.failure.code == OutOfMemory.code
    with pytest.raises(ResizeFailed, match="no room for the new trainer"):
        preparation.result()
    if log == "a file":
        assert "runs_out" in written.read_text(), "the traceback is in the log"
