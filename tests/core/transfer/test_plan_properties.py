"""What every plan must hold, on random pairs of layouts, against index arrays."""

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from ductile.core.layout.geometry.topology import Topology
from ductile.core.transfer.planning import Planner
from tests.core.transfer.least_egress import least_egress
from tests.core.transfer.random_layouts import MAX_SLOTS, pairs
from tests.core.transfer.twin import PAD, Recipe, execute, filled, missing_bytes, number
from tests.nightly import examples

thorough = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
topologies = st.sampled_from(
    (
        Topology(),
        Topology(nodes=tuple(tuple(range(n, n + 4)) for n in range(0, 2 * MAX_SLOTS, 4))),
        Topology(nodes=tuple(tuple(range(n, 2 * MAX_SLOTS, 3)) for n in range(3))),
        Topology(nodes=((0, 1, 2),), network_bytes_s=1e6),
    )
)


def assert_equal(found: dict, expected: dict) -> None:
    assert {slot: sorted(names) for slot, names in found.items()} == {
        slot: sorted(names) for slot, names in expected.items()
    }
    for slot, names in expected.items():
        for name, values in names.items():
            np.testing.assert_array_equal(found[slot][name], values, err_msg=f"slot {slot}, {name}")


@given(pairs())
@thorough
def test_rows_lie_where_plain_slicing_puts_them(pair: tuple[Recipe, Recipe]) -> None:
    recipe, _ = pair
    layout = recipe.layout()
    found = filled(layout)
    number(found, layout, {tensor.name: tensor for tensor in recipe.tensors})
    expected = recipe.buffers()
    # Who holds nothing but padding has no row, and need not have the buffer.
    for slot, names in expected.items():
        expected[slot] = {name: values for name, values in names.items() if name in found[slot]}
        assert all((values == PAD).all() for name, values in names.items() if name not in found[slot])
    assert_equal(found, expected)


@given(pairs(), topologies, st.sampled_from((64, 256, 1 << 20)))
@thorough
def test_a_plan_brings_every_element_exactly_once(
    pair: tuple[Recipe, Recipe], topology: Topology, round_bytes: int
) -> None:
    source, target = pair
    plan = Planner(topology, round_bytes).plan(source.layout(), target.layout())
    old, expected = source.buffers(), target.buffers()
    new, written = execute(plan, old)
    for slot, names in new.items():
        for name, values in names.items():
            np.testing.assert_array_equal(values, expected[slot][name], err_msg=f"slot {slot}, {name}")
            np.testing.assert_array_equal(written[slot][name], expected[slot][name] != PAD)
    lacking = missing_bytes(old, expected, {tensor.first: tensor.dtype for tensor in target.tensors})
    assert plan.wire_bytes == plan.lower_bound_bytes == lacking
    assert sum(plan.egress.values()) == sum(plan.ingress.values())
    rounds = [step for slot in plan.slots for step in plan.rounds(slot)]
    assert all(sum(m.num_bytes for m in (*step.sends, *step.receives)) <= 2 * round_bytes for step in rounds)
    event("nothing moves" if not plan.wire_bytes else "relays" if plan.relayed_bytes else "direct")


@given(pairs(), st.sampled_from((64, 1 << 20)))
@thorough
def test_the_busiest_sender_is_near_the_optimum(pair: tuple[Recipe, Recipe], round_bytes: int) -> None:
    """Exactly levelled but for what rounding to messages and items moves about."""
    plan = Planner(round_bytes=round_bytes).plan(pair[0].layout(), pair[1].layout())
    unit = 16 + max(1, round_bytes // 256)
    slack = sum(unit * len(line.needers) ** 2 for line in plan.lines)
    assert max(plan.egress.values()) <= 1.1 * least_egress(plan.lines, plan.relayed_bytes > 0) + slack


@given(pairs())
@settings(thorough, max_examples=examples(15))
def test_every_slot_makes_the_same_plan(pair: tuple[Recipe, Recipe]) -> None:
    source, target = pair
    one = Planner(round_bytes=256).plan(source.layout(), target.layout())
    other = Planner(round_bytes=256).plan(source.layout(), target.layout())
    assert one.key == other.key
    assert [list(one.rounds(slot)) for slot in one.slots] == [list(other.rounds(slot)) for slot in one.slots]
