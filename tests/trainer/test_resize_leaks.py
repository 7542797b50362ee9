"""A run that resizes all the time does not grow: memory, files, threads, shared memory."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ductile.config.schema.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.resizes import Prepare
from ductile.trainer.train_role import TrainRole
from tests.nightly import mostly_nightly
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet
from tests.trainer.naive import make_samples

CYCLE = [(0, 1), (0, 1, 2), (1, 2), (2,), (0, 2), (2, 1, 0)]
DEADLINE_S = 10.0
NUM_TAKEN_BACK, NUM_TAKEN_BACK_WARM = 8, 5
KIB_A_RESIZE = 12
"""A slot's memory may grow by this. Between 0.6 and 2 are measured."""
CYCLES_THAT_SHOW_MEMORY = 20
"""In fewer, what allocators keep is more than what a leak would be."""


def keep_no_records(role: TrainRole | None) -> None:
    """torch records the last 2000 collectives, resizes or not: until then memory grows by 10 to 25 KiB a step."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"


def footprint(role: TrainRole) -> dict[str, int]:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "KiB": int(status["RssAnon"].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": len(os.listdir("/dev/shm")),
    }


@pytest.mark.parametrize(
    ("num_cycles", "num_warm"), mostly_nightly([(4, 2), (34, 5)], (4, 2)), ids=["24 resizes", "204 resizes"]
)
@pytest.mark.slow
def test_resizes_leave_nothing_behind(tmp_path: Path, num_cycles: int, num_warm: int) -> None:
    """num_warm: cycles until allocators and caches have what they need, and memory several more."""
    folder = make_model_folder(tmp_path / "model", "qwen3")
    sections: dict[str, Any] = {"model": {"name": str(folder)}, "loss": SFTLoss(), "optim": AdamWConfig(lr=1e-4)}
    settings = TrainerConfig.model_validate(sections).model_dump()
    seen: list[dict[int, dict[str, int]]] = []
    with Fleet(settings, range(3)) as fleet:
        fleet.call(range(3), keep_no_records)
        fleet.assign(CYCLE[0])
        for _ in range(num_cycles):
            for members in (*CYCLE[1:], CYCLE[0]):
                fleet.forward_backward(make_samples((9, 14, 5)))
                fleet.resize(ParallelLayout.of(members), release=False)
                fleet.optim_step(20.0)
            seen.append(fleet.call(range(3), footprint))
    for slot in range(3):
        warm, last = seen[num_warm - 1][slot], seen[-1][slot]
        assert last["files"] == warm["files"]
        assert last["threads"] == warm["threads"]
        assert last["segments"] <= warm["segments"]
        if num_cycles >= CYCLES_THAT_SHOW_MEMORY:
            most = KIB_A_RESIZE * len(CYCLE) * (num_cycles - num_warm)
            assert last["KiB"] - warm["KiB"] < most, [each[slot] for each in seen]


def threads(role: TrainRole) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prepare")]


@pytest.mark.parametrize("when", ["ready", "one never comes", "soon"])
def test_changes_that_are_taken_back_leave_nothing_behind(tmp_path: Path, when: str) -> None:
    """And nobody waits for those that have left, however far each was."""
    folder = make_model_folder(tmp_path / "model", "qwen3")
    sections: dict[str, Any] = {"model": {"name": str(folder)}, "loss": SFTLoss(), "optim": AdamWConfig(lr=1e-4)}
    settings = TrainerConfig.model_validate(sections).model_dump()
    assert settings["resize"]["timeout_s"] > DEADLINE_S
    seen: list[dict[int, dict[str, int]]] = []
    with Fleet(settings, range(4)) as fleet:
        fleet.assign((0, 1))
        fleet.assign_joining((2, 3))
        for round in range(NUM_TAKEN_BACK):
            change = fleet.prepare_change(ParallelLayout.of((0, 2, 3)))
            told = change.slots[:-1] if when == "one never comes" else change.slots
            fleet.ask(dict.fromkeys(told, Prepare(change)))
            # What is left of groups that were caught half made is closed with the next ones: the last are whole.
            if when == "ready" or (when == "soon" and round == NUM_TAKEN_BACK - 1):
                fleet.until_prepared(change)
            elif when == "soon":
                time.sleep(0.006 * round)  # at once, or while they make groups, or near it
            fleet.roll_back(change)
            until_s = time.monotonic() + DEADLINE_S
            while any(fleet.call(range(4), threads).values()):
                assert time.monotonic() < until_s, "somebody still waits"
                time.sleep(0.01)
            left = [key for key in fleet._store.list_keys() if f"/{change.epoch}/" in key]
            assert left == []
            seen.append(fleet.call(range(4), footprint))
    for slot in range(4):
        warm, last = seen[NUM_TAKEN_BACK_WARM][slot], seen[-1][slot]
        assert last["files"] <= warm["files"]
        assert last["threads"] <= warm["threads"]
