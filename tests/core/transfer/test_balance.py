"""Levelled shares against the exact optimum of a flow network."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import least_egress
from ductile.core.transfer.balance import Demand, level, pour
from ductile.core.transfer.cells import Entry, Line

amounts = st.one_of(st.integers(1, 10**9), st.integers(10**6, 10**7))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 200))
def test_pouring_fills_one_unit_after_the_other(levels: list[int], amount: int) -> None:
    dumb = list(levels)
    for _ in range(amount):
        dumb[dumb.index(min(dumb))] += 1
    added = pour(np.array(levels), amount)
    assert int(added.sum()) == amount
    assert sorted((np.array(levels) + added).tolist()) == sorted(dumb)


@st.composite
def random_lines(draw: st.DrawFn) -> list[Line]:
    slots = range(draw(st.integers(2, 10)))
    lines: list[Line] = []
    for index in range(draw(st.integers(1, 12))):
        order = draw(st.permutations(slots))
        holders = draw(st.integers(1, len(order) - 1))
        needers = draw(st.integers(1, len(order) - holders))
        entry = Entry((f"t{index}",), ((0,), (draw(amounts),)), 1, 0)
        lines.append(Line(tuple(sorted(order[:holders])), tuple(sorted(order[holders : holders + needers])), (entry,)))
    return lines


@pytest.mark.parametrize("relay", [False, True])
@given(lines=random_lines())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_levelling_comes_to_rest_at_the_optimum(relay: bool, lines: list[Line]) -> None:
    demands = [Demand(i, 0, x.num_bytes, x.holders, x.needers, network=False, relay=relay) for i, x in enumerate(lines)]
    slots = tuple(sorted({slot for line in lines for slot in (*line.holders, *line.needers)}))
    shares = level(demands, slots)
    sent = dict.fromkeys(slots, 0)
    for demand, share in zip(demands, shares, strict=True):
        copies = len(demand.needers)
        assert int(share.holders.sum() + share.relays.sum()) == demand.num_bytes * copies
        assert int(share.holders.sum()) >= demand.num_bytes, "every byte leaves a holder at least once"
        for slot, amount in zip(
            (*demand.holders, *demand.needers), (*share.holders.tolist(), *share.relays.tolist()), strict=True
        ):
            sent[slot] += amount
    assert max(sent.values()) <= 1.1 * least_egress(lines, relay) + len(lines)
