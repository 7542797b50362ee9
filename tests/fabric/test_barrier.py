"""All go or nobody does, whenever somebody is told to stop; and the last one out tidies up."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ductile.fabric import rendezvous
from ductile.fabric.barrier import AbortableBarrier
from ductile.fabric.carrier import TransferFailed

MEMBERS = (0, 3, 5)
Make = Callable[..., AbortableBarrier]


class Stopped(Exception):
    pass


@pytest.fixture
def gather() -> Iterator[Make]:
    """A member's barrier, with a connection of its own, as on a slot."""
    store = rendezvous.host_store()
    connections = {slot: rendezvous.connect(f"127.0.0.1:{store.port}", 20.0) for slot in MEMBERS}

    def make(slot: int, timeout_s: float = 20.0, name: str = "change/1/", **options: object) -> AbortableBarrier:
        return AbortableBarrier(connections[slot], name, slot, MEMBERS, timeout_s, **options)

    yield make
    del store  # it serves as long as the object lives


def go_on() -> None:
    pass


def outcome(barrier: AbortableBarrier, still: Callable[[], None] = go_on) -> str:
    try:
        barrier.all_or_none(still)
    except (Stopped, TransferFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "goes"


def test_whoever_is_told_to_stop_and_whenever_all_do_the_same(gather: Make) -> None:
    chance = random.Random(0)
    seen: set[bool] = set()
    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        for number in range(60):
            gatherings = [gather(slot, name=f"change/{number}/") for slot in MEMBERS]
            together = threading.Barrier(len(MEMBERS))

            def arrive(barrier: AbortableBarrier, after_s: float, stop_s: float, together: threading.Barrier) -> str:
                together.wait()
                time.sleep(after_s)
                until_s = time.monotonic() + stop_s

                def still() -> None:
                    if time.monotonic() >= until_s:
                        raise Stopped("enough")

                return outcome(barrier, still)

            delays = [(chance.random() * 0.004, chance.random() * 0.006) for _ in MEMBERS]
            found = list(pool.map(lambda g, d, t=together, a=arrive: a(g, *d, t), gatherings, delays))
            went = {said == "goes" for said in found}
            assert len(went) == 1, found
            seen |= went
    assert seen == {True, False}, "the delays do not meet in the middle any more"


def test_those_who_wait_hear_at_once_why_nobody_goes(gather: Make) -> None:
    def still() -> None:
        raise Stopped("the change has been taken back")

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(outcome, gather(0))
        assert outcome(gather(3), still) == "Stopped: the change has been taken back"
        said = "TransferFailed: slot 3 does not go on: the change has been taken back"
        assert waits.result(10.0) == said
    assert outcome(gather(5)) == said, "who comes late"


def test_who_is_told_to_stop_when_all_are_there_goes_too(gather: Make) -> None:
    first, last = gather(0), gather(5)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(outcome, one) for one in (gather(3), last)]
        assert outcome(first) == "goes"
        assert [other.result(10.0) for other in others] == ["goes", "goes"]

    def still() -> None:
        raise Stopped("too late")

    assert outcome(first, still) == "goes"


def test_who_does_not_come_is_named(gather: Make) -> None:
    assert outcome(gather(3, timeout_s=0.05)) == "TransferFailed: slots [0, 5] did not come within 0.05 s"


def test_the_last_one_out_takes_the_notes_down_and_nobody_before(gather: Make) -> None:
    one, other = (gather(slot, others=["groups/1/"]) for slot in (0, 3))
    one._store.set("groups/1/address", "x")
    one._store.set("groups/10/address", "x")
    one.enter()
    other.enter()
    one.leave()
    one.leave()
    assert other._store.check(["groups/1/address"])
    other.leave()
    assert [key for key in one._store.list_keys() if not key.startswith("init/")] == ["groups/10/address"]
