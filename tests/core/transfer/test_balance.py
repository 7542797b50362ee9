"""Levelled shares against the exact optimum of a flow network."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer.balance import Demand, level, pour
from ductile.core.transfer.cells import Entry, Line
from ductile.core.transfer.planning import Planner
from tests.core.transfer.least_egress import least_egress
from tests.nightly import examples

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
@settings(max_examples=examples(150), deadline=None, derandomize=True)
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


GPT = ModelSpec("llama", 32_000, 1024, 4096, num_layers=12, num_heads=16, num_kv_heads=8, head_dim=64)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelLayout.of(range(2), tp=2), ParallelLayout.of(range(8), dp_replicate=4, tp=2)),
        (ParallelLayout.of(range(4), tp=4), ParallelLayout.of(range(8), dp_replicate=4, tp=2)),
        (
            ParallelLayout.of(range(8), pp=2, dp_replicate=2, tp=2),
            ParallelLayout.of(range(8), dp_replicate=2, tp=4),
        ),
        (ParallelLayout.of(range(4), dp_replicate=2, tp=2), ParallelLayout.of(range(4, 12), dp_replicate=2, tp=4)),
        (ParallelLayout.of(range(4), dp_replicate=4), ParallelLayout.of(range(4, 12), tp=8)),
        (
            ParallelLayout.of(range(64), dp_replicate=8, tp=8),
            ParallelLayout.of(range(64), pp=2, dp_replicate=8, tp=4),
        ),
    ],
)
def test_the_busiest_sender_of_a_model_sends_a_hundredth_more_than_it_must(
    before: ParallelLayout, after: ParallelLayout
) -> None:
    plan = Planner().plan(model_layout(GPT, before, "float32"), model_layout(GPT, after, "float32"))
    assert max(plan.egress.values()) <= 1.01 * least_egress(plan.lines, plan.relayed_bytes > 0)
