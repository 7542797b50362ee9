"""Reads out of a process: here our own, which the kernel treats like any other."""

import ctypes
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ductile.core.transfer.plan import Plan
from ductile.core.transfer.planning import Planner
from ductile.fabric import peer_memory, slabs
from ductile.fabric.exchange import Missing
from ductile.fabric.memory import Memory, flat_bytes, num_bytes, pack, unpack
from ductile.fabric.peer_memory import PeerMemory, read
from ductile.fabric.process import Process
from ductile.fabric.transfer import Moved, Transfer, Verify
from tests.fabric.cases import PAIRS
from tests.fabric.states import State, differences, padding, state
from tests.ranks import start, stop


def test_scattered_on_both_sides() -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    remote = np.array([[source.ctypes.data + 10, 5], [source.ctypes.data + 50, 3]])
    local = np.array([[target.ctypes.data, 2], [target.ctypes.data + 90, 6]])
    read(Process.own(), local, remote)
    assert target[:2].tolist() + target[90:96].tolist() == [10, 11, 12, 13, 14, 50, 51, 52]
    assert not target[2:90].any()


class Alone:
    """The exchange of a process in which all slots run one after the other."""

    timeout_s = 1.0

    def __init__(self, slot: int, members: tuple[int, ...], notes: dict[int, bytes]) -> None:
        self.slot, self.members, self._notes = slot, members, notes

    def all_gather(
        self,
        topic: str,
        note: bytes,
        missing: Missing | None = None,
        longest: int | None = None,
        meanwhile: Callable[[], None] = int,
    ) -> dict[int, bytes]:
        assert note == self._notes[self.slot]
        assert longest is not None
        assert len(note) <= longest
        meanwhile()
        return self._notes


def move(plan: Plan, olds: dict[int, State], verify: Verify) -> tuple[dict[int, State], dict[int, Moved]]:
    memories = {slot: Memory(plan.source, slot, old) for slot, old in olds.items()}
    notes = {
        slot: np.array([memory.words(name).data_ptr() for name in memory.sizes], dtype="<i8").tobytes()
        for slot, memory in memories.items()
    }
    news, moved = {}, {}
    for slot in plan.slots:
        carrier = PeerMemory(Alone(slot, plan.slots, notes), dict.fromkeys(plan.slots, Process.own()))
        transfer = Transfer(plan, slot, olds[slot], padding(plan.target, slot), carrier, verify)
        moved[slot], news[slot] = transfer.run(), transfer.buffers
    return news, moved


LIMITS = [("moved", 16, 4, 0), ("moved", 64, 3, 1000), ("moved", 512, 1024, 24), ("off", 64, 1024, 8)]
"""(verify, bytes of a slab, pieces, bytes of a gap)"""


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", [*[*PAIRS][::4], "large"])
def test_every_byte_arrives_however_small_the_slabs(
    name: str, limits: tuple[Verify, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, slab_bytes, most_pieces, gap_bytes = limits
    if name == "large":
        slab_bytes, gap_bytes = 500 * slab_bytes, 500 * gap_bytes
    for where in (slabs, peer_memory):
        monkeypatch.setattr(where, "SLAB_BYTES", slab_bytes)
        monkeypatch.setattr(where, "ACROSS_BYTES", 4 * slab_bytes)
        monkeypatch.setattr(where, "MAX_PIECES", most_pieces)
    monkeypatch.setattr(slabs, "GAP_BYTES", gap_bytes)
    source, target = PAIRS[name]
    plan = Planner(relays=False).plan(source.layout(), target.layout())
    olds = {slot: state(plan.source, slot, source.buffers()) for slot in plan.slots}
    news, moved = move(plan, olds, verify)
    for slot in plan.slots:
        assert differences(news[slot], state(plan.target, slot, target.buffers())) == []
        assert differences(olds[slot], state(plan.source, slot, source.buffers())) == []
    sent, received = fingerprints(moved)
    assert sent == received
    assert len(sent) == (sum(len(plan.at_once(slot).sends) for slot in plan.slots) if verify == "moved" else 0)


def fingerprints(moved: dict[int, Moved]) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """What went from slot to slot, as the one and as the other saw it."""
    sent = {(slot, peer): value for slot, one in moved.items() for peer, value in one.sent.items()}
    received = {(peer, slot): value for slot, one in moved.items() for peer, value in one.received.items()}
    return sent, received


@pytest.mark.parametrize("name", ["fsdp2 to 3", "tp2 to 1", "tp1 to 2", "fsdp on tp"])
def test_a_byte_that_arrives_changed_shows_wherever_it_lands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = PAIRS[name]
    plan = Planner(relays=False).plan(source.layout(), target.layout())
    original = peer_memory._read

    def spoiled(process: Process, local: int, *rest: int) -> None:
        original(process, local, *rest)
        first = ctypes.c_ubyte.from_address(ctypes.c_int64.from_address(local).value)
        first.value ^= 1

    monkeypatch.setattr(peer_memory, "_read", spoiled)
    _, moved = move(plan, {slot: state(plan.source, slot, source.buffers()) for slot in plan.slots}, "moved")
    sent, received = fingerprints(moved)
    assert sent.keys() == received.keys()
    assert all(sent[pair] != received[pair] for pair in sent)


def test_many_small_parts_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = PAIRS["fsdp2 to 3"]
    plan = Planner(relays=False).plan(source.layout(), target.layout())
    calls: list[int] = []
    original = peer_memory._read
    monkeypatch.setattr(peer_memory, "_read", lambda *call: (calls.append(call[2]), original(*call)))
    move(plan, {slot: state(plan.source, slot, source.buffers()) for slot in plan.slots}, "moved")
    messages = [message for slot in plan.slots for message in plan.at_once(slot).receives]
    assert max(len(message.parts) for message in messages) > 3
    assert len(calls) == len(messages)


def sleep_on() -> None:
    os.read(os.pipe()[0], 1)


def test_a_process_is_known_by_its_start() -> None:
    process, _ = start(sleep_on)
    assert process.pid is not None
    found = np.array([[np.zeros(1).ctypes.data, 8]])
    mine = Process(process.pid, Process.own().started)
    assert not mine.alive, "the number is right, the start is not"
    process.kill()
    stop(process)
    with pytest.raises(ProcessLookupError):
        read(mine, found, found)


def test_an_address_that_nobody_has() -> None:
    target = np.zeros(8, dtype=np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        read(Process.own(), np.array([[target.ctypes.data, 8]]), np.array([[4096, 8]]))


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_packing_at_any_place_and_back(offset: int) -> None:
    box = torch.arange(24, dtype=torch.int64).view(4, 6)[1:3, ::2]
    staging = torch.zeros(offset + num_bytes(box), dtype=torch.uint8)
    pack(box, staging[offset:])
    back = torch.zeros(4, 6, dtype=torch.int64)[1:3, ::2]
    unpack(staging[offset:], back)
    assert torch.equal(back, box)
    assert flat_bytes(box) is None
    assert flat_bytes(back.contiguous()) is not None
