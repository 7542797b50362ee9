"""States move between real processes, by every carrier and in both memory modes, and every byte is in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.transfer.plan import Plan
from ductile.core.transfer.planning import Planner
from ductile.fabric.carrier import Carrier, PreparedTransfer, TransferInputs
from ductile.fabric.choice import choose
from ductile.fabric.exchange import StoreExchange
from ductile.fabric.fingerprint import MODULUS
from ductile.fabric.groups import Groups
from ductile.fabric.memory import Memory
from ductile.fabric.p2p import PeerToPeer
from ductile.fabric.transfer import Transfer, stream
from tests.core.transfer.twin import Buffers
from tests.fabric.cases import PAIRS
from tests.fabric.states import allocate, differences, padding, state
from tests.fabric.whole import fingerprint
from tests.nightly import mostly_nightly
from tests.ranks import run_alone, run_ranks

SLOTS = 8


@dataclass(frozen=True)
class Outcome:
    """What one slot has to say about one pair."""

    wrong: list[str]
    whole: tuple[int, int]
    """The slot's part of the whole state's fingerprint, before and after."""
    sent: dict[int, int]
    received: dict[int, int]


def carriers(groups: Groups, members: tuple[int, ...]) -> dict[str, Carrier]:
    slot, found = dist.get_rank(), {}
    for one_sided in (True, False):
        exchange = StoreExchange(groups._store, f"exchange {one_sided}", slot, members, 20.0)
        carrier, reason = choose(exchange, "cpu", lambda: groups.group(members), one_sided)
        assert reason.startswith(carrier.name)
        found[carrier.name] = carrier
    found["p2p through the host"] = PeerToPeer(groups.group(members), "cpu", 20.0, through_host=True)
    return found


def move(
    numbers: tuple[Buffers, Buffers],
    plan: Plan,
    slot: int,
    carrier: Carrier,
    mode: str,
    all_done: Callable[[], None],
) -> Outcome:
    before, after = numbers
    old, expected = state(plan.source, slot, before), state(plan.target, slot, after)
    whole_before = fingerprint(Memory(plan.source, slot, old))
    if mode != "streaming":
        transfer = Transfer(plan, slot, old, padding(plan.target, slot), carrier)
        moved, new = transfer.run(), transfer.buffers
        all_done()  # nobody frees what others still read
        wrong = differences(old, state(plan.source, slot, before))  # the way back is open
    else:
        new, moved = stream(plan, slot, old, carrier, allocate)
        wrong = [f"{name} is still there" for name in old]
    whole = whole_before, fingerprint(Memory(plan.target, slot, new))
    return Outcome(wrong + differences(new, expected), whole, moved.sent, moved.received)


def move_all(groups: Groups, members: tuple[int, ...], names: list[str], ways: list[tuple[str, str, int]]) -> dict:
    slot, found = dist.get_rank(), {}

    def all_done() -> None:
        dist.barrier(group=groups.group(members))

    by_name = carriers(groups, members)
    planner = cache(lambda round_bytes, relays: Planner(round_bytes=round_bytes, relays=relays))
    for name in names:
        source, target = (recipe.layout() for recipe in PAIRS[name])
        before, after = (recipe.buffers() for recipe in PAIRS[name])
        for carrier, mode, round_bytes in ways:
            if name == "large":
                round_bytes = max(round_bytes, 1 << 18)
            plan = planner(round_bytes, not by_name[carrier].one_sided).plan(source, target)
            key = f"{name}, {carrier}, {mode}, {round_bytes}"
            found[key] = move((before, after), plan, slot, by_name[carrier], mode, all_done)
    return found


SMALL, WHOLE = 512, 16 << 20
WAYS = [
    ("p2p", "shadow", SMALL),
    ("p2p", "shadow", WHOLE),
    ("p2p", "streaming", SMALL),
    ("p2p through the host", "streaming", WHOLE),
    ("peer_memory", "shadow", WHOLE),
]
"""(carrier, memory mode, bytes a round): many rounds with a part of a message each, or everything in one."""


@pytest.mark.parametrize("third", mostly_nightly(range(3), 0))
def test_every_byte_arrives(third: int) -> None:
    names = list(PAIRS)[third::3]
    outcomes = run_ranks(SLOTS, move_all, names, WAYS, timeout_s=50.0)
    assert all(outcome.wrong == [] for slot in outcomes for outcome in slot.values()), [
        (slot, key, outcome.wrong)
        for slot, of_slot in enumerate(outcomes)
        for key, outcome in of_slot.items()
        if outcome.wrong
    ]
    for key in outcomes[0]:
        sent = {(s, p): value for s, of_slot in enumerate(outcomes) for p, value in of_slot[key].sent.items()}
        got = {(p, s): value for s, of_slot in enumerate(outcomes) for p, value in of_slot[key].received.items()}
        assert sent == got, f"{key}: fingerprints of senders and receivers differ"
        before, after = (sum(of_slot[key].whole[side] for of_slot in outcomes) % MODULUS for side in (0, 1))
        assert before == after != 0, f"{key}: fingerprints of the whole state differ"


SPECIAL = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000]
"""Quiet and signalling NaNs with payloads, minus zero, denormals, infinities."""


def line(mesh: Mesh, *shards: Shard, dtype: str = "float32", length: int = 8) -> Layout:
    return Layout([Tensor("w", dtype, place((length,), mesh, shards))], mesh.slots)


def move_special(groups: Groups, members: tuple[int, ...]) -> dict[str, list[int]]:
    slot, found = dist.get_rank(), {}
    bits = torch.tensor(SPECIAL, dtype=torch.int64).to(torch.int32)
    for name, carrier in carriers(groups, members).items():
        one, two = Mesh.of((0,)), Mesh.of((1, 2), dp_shard=2)
        plan = Planner(relays=False).plan(line(one), line(two, Shard("dp_shard")))
        old = {"w": bits.clone().view(torch.float32)} if slot == 0 else {}
        new = {"w": torch.zeros(4)} if slot else {}
        Transfer(plan, slot, old, new, carrier).run()
        dist.barrier(group=groups.group(members))
        found[name] = [int(value) & 0xFFFFFFFF for value in new["w"].view(torch.int32)] if slot else []
    return found


def test_no_bit_of_a_float_changes() -> None:
    _, first, second = run_ranks(3, move_special)
    names = ("peer_memory", "p2p", "p2p through the host")
    assert first == dict.fromkeys(names, SPECIAL[:4])
    assert second == dict.fromkeys(names, SPECIAL[4:])


COUNT, LENGTH = 32, 1 << 19
"""Tensors of 2 MiB, 64 MiB together."""


def many(slots: range, shard: Shard, **axes: int) -> Layout:
    holdings = place((512, LENGTH // 512), Mesh.of(slots, **axes), [shard])
    return Layout([Tensor(f"w{index}", "float32", holdings) for index in range(COUNT)], slots)


def peak_bytes(groups: Groups, members: tuple[int, ...], streaming: bool) -> int:
    """How much more memory than before the old state the process has at its peak."""
    slot = dist.get_rank()
    carrier = carriers(groups, members)["p2p"]
    plan = Planner(round_bytes=1 << 20).plan(
        many(range(2), Shard("dp_shard"), dp_shard=2), many(range(2), Shard("tp", 1), tp=2)
    )
    dist.barrier(group=groups.group(members))
    before, seen = resident_bytes(), 0

    def watched(name: str, dtype: str, size: int) -> torch.Tensor:
        nonlocal seen
        seen = max(seen, resident_bytes())
        return allocate(name, dtype, size)

    old = padding(plan.source, slot)
    if streaming:
        new, _ = stream(plan, slot, old, carrier, watched)
    else:
        new = padding(plan.target, slot)
        Transfer(plan, slot, old, new, carrier).run()
    return max(seen, resident_bytes()) - before


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_streaming_needs_little_more_than_one_state() -> None:
    state_bytes = COUNT * LENGTH * 4 // 2
    staging_bytes = 8 << 20  # two rounds of a MiB each way, and what libraries allocate
    assert max(run_ranks(2, peak_bytes, True)) < 1.25 * state_bytes + staging_bytes
    assert min(run_ranks(2, peak_bytes, False)) > 1.9 * state_bytes


def hand_on(groups: Groups, members: tuple[int, ...]) -> list[str]:
    slot, said = dist.get_rank(), []
    whole, half = Mesh.of(range(2), dp_replicate=2), Mesh.of(range(2), dp_shard=2)
    source, target = line(whole) | named("v", half), line(whole) | named("v", whole)
    plan = Planner(relays=False).plan(source, target)
    for name, carrier in carriers(groups, members).items():
        old = {"w": torch.arange(8.0), "v": torch.arange(4.0) + 4 * slot}
        transfer = Transfer(plan, slot, old, {"v": torch.zeros(8)}, carrier)
        transfer.run()
        dist.barrier(group=groups.group(members))
        if transfer.handed_on != {"w"} or transfer.buffers["w"] is not old["w"]:
            said.append(f"{name}: handed on {transfer.handed_on}")
        copy = torch.zeros(8)
        Transfer(plan, slot, old, {"v": torch.zeros(8), "w": copy}, carrier).run()
        dist.barrier(group=groups.group(members))
        if not torch.equal(copy, old["w"]) or not torch.equal(transfer.buffers["v"], torch.arange(8.0)):
            said.append(f"{name}: {copy} {transfer.buffers}")
    return said


def named(name: str, mesh: Mesh) -> Layout:
    return Layout([Tensor(name, "float32", place((8,), mesh, [Shard("dp_shard")]))], mesh.slots)


def test_what_does_not_change_is_handed_on_unless_it_has_a_place_of_its_own() -> None:
    assert run_ranks(2, hand_on) == [[], []]


def refusals() -> list[str]:
    nobody = Misused()
    one = Mesh.of((0,))
    two = Mesh.of((0, 1), dp_replicate=2)
    plan = Planner(relays=False).plan(line(one), line(two))
    narrower = Planner().plan(line(two), line(Mesh.of((0, 1), dp_shard=2), Shard("dp_shard")))
    w = torch.zeros(8)
    attempts: list[Callable[[], object]] = [
        lambda: Transfer(plan, 0, {}, {"w": w}, nobody),
        lambda: Transfer(plan, 0, {"w": w.double()}, {"w": w}, nobody),
        lambda: Transfer(plan, 0, {"w": torch.zeros(9)}, {"w": w}, nobody),
        lambda: Transfer(plan, 0, {"w": torch.zeros(16)[::2]}, {"w": w}, nobody),
        lambda: Transfer(narrower, 0, {"w": w}, {"w": w[2:6]}, nobody),
        lambda: stream(plan, 0, {"w": w}, Misused(one_sided=True), allocate),
    ]
    said: list[str] = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the texts are compared below)
            attempt()
        said.append(str(caught.value))
    return said


@dataclass(frozen=True)
class Misused:
    one_sided: bool = False
    name: str = "misused"

    def prepare(self, inputs: TransferInputs) -> PreparedTransfer:
        raise AssertionError("nothing should get here")


def test_buffers_that_are_not_what_the_layout_says_are_refused() -> None:
    missing, dtype, size, strided, shared, streamed = run_alone(refusals)
    assert missing == "slot 0 has no buffer 'w', which its layout lists"
    assert "torch.float64, 8 elements; its layout says contiguous, float32, 8 elements" in dtype
    assert "9 elements" in size
    assert "is strided" in strided
    assert "share memory" in shared
    assert "misused cannot stream" in streamed
