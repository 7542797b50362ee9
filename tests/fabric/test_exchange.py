"""What slots tell each other while they do something else, which may fail."""

import pytest
import torch.distributed as dist

from ductile.fabric.exchange import Exchange, GroupExchange, StoreExchange
from ductile.fabric.groups import Groups
from tests.ranks import run_ranks


def fail() -> None:
    raise RuntimeError("no memory left for the copies")


def tell(groups: Groups, members: tuple[int, ...], kind: str) -> list[object]:
    slot = dist.get_rank()
    exchange: Exchange
    if kind == "group":
        exchange = GroupExchange(groups.group(members), slot, members, "cpu", 20.0)
    else:
        exchange = StoreExchange(groups._store, "exchange", slot, members, 20.0)
    found: list[object] = []
    for topic, meanwhile in (("first", fail if slot == 1 else int), ("second", int)):
        try:
            found.append(exchange.all_gather(topic, f"{topic} of {slot}".encode(), meanwhile=meanwhile))
        except RuntimeError as error:
            found.append((type(error).__name__, str(error)))
    dist.barrier(group=groups.group(members))
    return found


@pytest.mark.parametrize("kind", ["group", "store"])
def test_what_fails_meanwhile_is_not_a_slot_that_died(kind: str) -> None:
    first, second = ({slot: f"{topic} of {slot}".encode() for slot in range(3)} for topic in ("first", "second"))
    failed = ("RuntimeError", "no memory left for the copies")
    assert run_ranks(3, tell, kind) == [[first, second], [failed, second], [first, second]]


LENGTHS = [(0, 0), (3, 508), (0, 509), (508, 509), (2000, 5)]
"""Of the notes of two slots: short ones travel in one round, longer ones in two."""


def tell_uneven(groups: Groups, members: tuple[int, ...]) -> list[tuple[bool, int]]:
    slot, found = dist.get_rank(), []
    exchange = GroupExchange(groups.group(members), slot, members, "cpu", 20.0)
    for lengths in LENGTHS:
        counted = count_gathers(exchange)
        notes = exchange.all_gather("uneven", bytes([65 + slot]) * lengths[slot])
        right = notes == {other: bytes([65 + other]) * length for other, length in enumerate(lengths)}
        found.append((right, len(counted)))
    return found


def count_gathers(exchange: GroupExchange) -> list[object]:
    post, counted = GroupExchange._post, []
    exchange._post = lambda value: (counted.append(value), post(exchange, value))[1]  # pyright: ignore
    return counted


def test_notes_of_any_lengths_arrive_and_short_ones_at_once() -> None:
    assert run_ranks(2, tell_uneven) == [[(True, 1), (True, 1), (True, 2), (True, 2), (True, 2)]] * 2
