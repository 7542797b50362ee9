"""A member dies or stops in the middle of a transfer: everybody else hears of it in time, and can go on without."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.transfer.planning import Planner
from ductile.fabric.carrier import PreparedTransfer, TransferFailed, TransferInputs
from ductile.fabric.choice import choose
from ductile.fabric.exchange import StoreExchange
from ductile.fabric.groups import Groups
from ductile.fabric.p2p import PeerToPeer
from ductile.fabric.peer_memory import PeerMemory
from ductile.fabric.transfer import Transfer
from tests.ranks import run_ranks

VICTIM = 2
FOREVER_S = 300.0
"""More than the harness waits: whoever replies did not wait for the timeout."""
SOON_S = 1.0


def layout(**axes: int) -> Layout:
    mesh = Mesh.of(range(4), **axes)
    dim = 1 if "tp" in axes else 0
    return Layout([Tensor("w", "float32", place((64, 4096), mesh, [Shard(tuple(axes), dim)]))], mesh.slots)


def buffer(value: float) -> torch.Tensor:
    return torch.full((64 * 1024,), value)


def strike(how: signal.Signals, groups: Groups) -> None:
    groups._store.set("victim", str(os.getpid()))
    os.kill(os.getpid(), how)


class Unlucky:
    """A carrier during whose transfer something happens to this process."""

    def __init__(self, carrier: PeerToPeer | PeerMemory, moment: str, accident: Callable[[], None]) -> None:
        self.name, self.one_sided = carrier.name, carrier.one_sided
        self._carrier, self._moment, self._accident = carrier, moment, accident

    def prepare(self, inputs: TransferInputs) -> PreparedTransfer:
        accident, steps = self._accident, inputs.steps

        class Steps:
            before = steps.before if self._moment != "before" else staticmethod(lambda index: accident())
            meanwhile = steps.meanwhile if self._moment != "meanwhile" else staticmethod(accident)
            after = steps.after if self._moment != "after" else staticmethod(lambda index: accident())
            finish = steps.finish

        return self._carrier.prepare(TransferInputs(inputs.plan, inputs.slot, inputs.old, inputs.new, Steps()))


def attempt(
    groups: Groups,
    members: tuple[int, ...],
    one_sided: bool,
    timeout_s: float,
    how: signal.Signals,
    moment: str,
) -> tuple[str, float, int | None]:
    """What slot 2's accident looks like to the others: (what they were told, after how long, whom it names)."""
    slot = dist.get_rank()
    old, new = {"w": buffer(float(slot))}, {"w": buffer(float(slot))}
    exchange = StoreExchange(groups._store, "exchange", slot, members, timeout_s)
    carrier, _ = choose(exchange, "cpu", lambda: groups.group(members), one_sided)
    plan = Planner(round_bytes=1 << 14, relays=False).plan(layout(dp_shard=4), layout(tp=4))
    if slot == VICTIM:
        Transfer(plan, slot, old, new, Unlucky(carrier, moment, lambda: strike(how, groups))).run()
    transfer = Transfer(plan, slot, old, new, carrier)
    start = time.monotonic()
    try:
        transfer.run()
        said, peer = "arrived", None
    except TransferFailed as error:
        said, peer = str(error), error.peer
        del transfer, carrier  # nothing may refer to the group when it is abandoned
        groups.abandon(error)
    took_s = time.monotonic() - start
    assert torch.equal(old["w"], buffer(float(slot))), "the old state is whole"
    survivors = Groups(slot, 1, "cpu", groups._store, 20.0)
    value = torch.ones(1)
    dist.all_reduce(value, group=survivors.group((0, 1, 3)))
    assert value.item() == 3.0
    if slot == 0 and how == signal.SIGSTOP:
        os.kill(int(groups._store.get("victim")), signal.SIGKILL)
    survivors.destroy()
    return said, took_s, peer


def outcomes(*arguments: object) -> list[tuple[str, float, int | None]]:
    return [told for told in run_ranks(4, attempt, *arguments, timeout_s=40.0, mourned=[VICTIM]) if told is not None]


@pytest.mark.parametrize("moment", ["before", "meanwhile", "after"])
def test_messages_end_with_the_peer_that_dies(moment: str) -> None:
    for said, took_s, _ in outcomes(False, FOREVER_S, signal.SIGKILL, moment):
        assert "is gone" in said or "cannot be reached" in said
        assert took_s < FOREVER_S / 10


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_messages_wait_for_a_peer_that_stops_no_longer_than_the_timeout(moment: str) -> None:
    told = outcomes(False, SOON_S, signal.SIGSTOP, moment)
    assert any(f"slot {VICTIM} for {SOON_S:g} s" in said for said, _, _ in told)
    assert all(said != "arrived" for said, _, _ in told)


def test_reads_end_with_the_peer_that_dies_before_it_says_where_its_memory_is() -> None:
    for said, took_s, peer in outcomes(True, FOREVER_S, signal.SIGKILL, "before"):
        assert (peer, "is gone" in said) == (VICTIM, True)
        assert took_s < FOREVER_S / 10


def test_a_peer_that_stops_before_it_says_where_its_memory_is_is_named() -> None:
    for said, _, peer in outcomes(True, SOON_S, signal.SIGSTOP, "before"):
        assert (said, peer) == (f"slots [{VICTIM}] did not reply within {SOON_S:g} s", VICTIM)


def test_a_peer_that_stops_later_can_still_be_read() -> None:
    assert [said for said, _, _ in outcomes(True, SOON_S, signal.SIGSTOP, "meanwhile")] == ["arrived"] * 3


def read_the_dead(groups: Groups, members: tuple[int, ...]) -> tuple[str, int | None]:
    slot = dist.get_rank()
    old, new = {"w": buffer(float(slot))}, {"w": buffer(float(slot))}
    carrier, _ = choose(
        StoreExchange(groups._store, "exchange", slot, members, 20.0), "cpu", lambda: groups.group(members)
    )
    assert isinstance(carrier, PeerMemory)
    plan = Planner(relays=False).plan(layout(dp_shard=4), layout(tp=4))
    transfer = Transfer(plan, slot, old, new, carrier)
    if slot == VICTIM:
        carrier._read = lambda *arguments: strike(signal.SIGKILL, groups)  # pyright: ignore
    else:
        read = carrier._read

        def read_when_it_is_dead(*arguments: object) -> None:
            while carrier._peers[VICTIM].alive:
                time.sleep(0.01)
            read(*arguments)  # pyright: ignore

        carrier._read = read_when_it_is_dead  # pyright: ignore
    said, peer = "arrived", None
    try:
        transfer.run()
    except TransferFailed as error:
        said, peer = str(error), error.peer
    end = StoreExchange(groups._store, "end", slot, (0, 1, 3), 20.0)
    end.all_gather("end", b"")  # they can read each other till then
    return said, peer


def test_nobody_reads_a_process_that_died() -> None:
    for said, peer in filter(None, run_ranks(4, read_the_dead, mourned=[VICTIM])):
        assert "cannot be read: No such process" in said
        assert peer == VICTIM
