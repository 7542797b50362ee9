"""Plans of real pairs of layouts carried out on index arrays, and the choices that a plan makes, as stories."""

from dataclasses import replace

import numpy as np
import pytest

from ductile.core.layout.geometry.holdings import Holdings
from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.geometry.topology import Topology
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer.cells import NotReshardable
from ductile.core.transfer.plan import Plan
from ductile.core.transfer.planning import Planner
from tests.core.other_layouts import zero_layout
from tests.core.transfer.twin import PAD, Logical, execute, filled, number

SPEC = ModelSpec("qwen3", 130, 32, 48, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=8, qk_norm=True)


def state(slots: range, zero: bool = False, spec: ModelSpec = SPEC, **axes: int) -> Layout:
    parallel = ParallelLayout.of(slots, **axes)
    params = model_layout(spec, parallel)
    return params | zero_layout(params, parallel.mesh).kind("master.", "float32") if zero else params


def run(source: Layout, target: Layout, planner: Planner) -> Plan:
    """Plan, carry out on arrays, compare with what the target's own rows say."""
    plan = planner.plan(source, target)
    logical = {}
    for index, tensor in enumerate(target):
        logical[tensor.name] = Logical(chr(1 + index), tensor.shape)
    old, expected = filled(source), filled(target)
    number(old, source, logical)
    number(expected, target, logical)
    new, written = execute(plan, old)
    for slot, names in expected.items():
        for name, values in names.items():
            np.testing.assert_array_equal(new[slot][name], values, err_msg=f"slot {slot}, {name}")
            np.testing.assert_array_equal(written[slot][name], values != PAD)
    assert plan.wire_bytes == plan.lower_bound_bytes
    return plan


PAIRS = {
    "more replicas": (dict(tp=2, slots=range(2)), dict(dp_replicate=4, tp=2, slots=range(8))),
    "fewer replicas": (dict(dp_replicate=4, tp=2, slots=range(8)), dict(tp=2, slots=range(2))),
    "one to three": (dict(slots=range(1), dp_replicate=1), dict(slots=range(3), dp_replicate=3)),
    "two to three, flat": tuple(dict(slots=range(size), dp_replicate=size, zero=True) for size in (2, 3)),
    "five to four, flat": tuple(dict(slots=range(size), dp_replicate=size, zero=True) for size in (5, 4)),
    "tp for dp, flat": (dict(slots=range(4), dp_replicate=2, tp=2, zero=True), dict(slots=range(4), tp=4, zero=True)),
    "tp 4 to 2": (dict(slots=range(4), tp=4), dict(slots=range(4), dp_replicate=2, tp=2)),
    "tp 1 to 4": (dict(slots=range(4), dp_replicate=4), dict(slots=range(4), tp=4)),
    "pp for tp": (dict(slots=range(4), pp=2, tp=2), dict(slots=range(4), pp=4)),
    "pp and tp": (dict(slots=range(2), pp=2), dict(slots=range(8), pp=2, tp=4)),
    "fsdp 2 to 3": (dict(slots=range(2), dp_shard=2), dict(slots=range(3), dp_shard=3)),
    "fsdp 4 to 1": (dict(slots=range(4), dp_shard=4), dict(slots=range(2, 3), dp_shard=1)),
    "hsdp to fsdp": (dict(slots=range(6), dp_replicate=2, dp_shard=3), dict(slots=range(6), dp_shard=6)),
    "fsdp on tp, uneven": (dict(slots=range(6), dp_shard=3, tp=2), dict(slots=range(5, 9), dp_shard=1, tp=4)),
    "moves house": (dict(slots=range(4), dp_shard=2, tp=2), dict(slots=range(4, 8), dp_shard=2, tp=2)),
    "some leave, some join": (dict(slots=range(4), dp_shard=4), dict(slots=range(2, 7), dp_shard=5)),
    "empty shards": (dict(slots=range(3), dp_shard=3), dict(slots=range(40), dp_shard=40)),
    "fsdp to flat": (dict(slots=range(4), dp_shard=4), dict(slots=range(4), dp_replicate=2, tp=2)),
    "many replicas": (dict(slots=range(2), tp=2), dict(slots=range(44), dp_replicate=22, tp=2)),
}  # fmt: skip


@pytest.mark.parametrize("round_bytes", [1 << 10, 1 << 15, 1 << 24], ids=["1KiB", "32KiB", "16MiB"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_state_arrives(pair: str, round_bytes: int) -> None:
    source, target = PAIRS[pair]
    run(state(**source), state(**target), Planner(round_bytes=round_bytes))  # pyright: ignore[reportArgumentType]


def test_replicas_that_leave_cost_nothing_and_buffers_stay() -> None:
    plan = run(state(range(8), dp_replicate=4, tp=2), state(range(2), tp=2), Planner())
    assert (plan.wire_bytes, plan.num_rounds) == (0, 0)
    assert plan.unchanged_buffers(1) == {tensor.name for tensor in plan.target}


def whole(slots: range, length: int = 3 << 20, **axes: int) -> Layout:
    mesh = Mesh.of(slots, **axes)
    shards = [Shard("dp_shard", 0)]
    return Layout([Tensor("w", "float32", place((length,), mesh, shards))], slots)


def test_receivers_pass_on_what_they_got_when_the_only_holder_would_send_it_thrice() -> None:
    plan = Planner().plan(whole(range(1)), whole(range(4), dp_replicate=4))
    assert max(plan.egress.values()) <= 12 << 20, "each byte leaves the holder once"
    assert plan.wire_bytes == 36 << 20
    assert "receivers pass on" in plan.reason


def test_nobody_passes_on_where_there_are_holders_enough() -> None:
    plan = Planner().plan(whole(range(2), dp_replicate=2), whole(range(4), dp_replicate=4))
    assert plan.relayed_bytes == 0
    assert (plan.egress[0], plan.egress[1]) == (12 << 20, 12 << 20)


def test_the_same_machine_comes_first() -> None:
    topology = Topology(nodes=((0, 1), (2, 3)))
    plan = Planner(topology).plan(whole(range(0, 4, 2), dp_replicate=2), whole(range(4), dp_replicate=4))
    assert {(edge.source, edge.target) for flow in plan.flows for edge in flow.edges} == {(0, 1), (2, 3)}


def test_every_byte_enters_a_machine_once() -> None:
    topology = Topology(nodes=(tuple(range(4)), tuple(range(4, 8)), tuple(range(8, 12))))
    plan = Planner(topology).plan(whole(range(1)), whole(range(12), dp_replicate=12))
    entering = {1: 0, 2: 0}
    for flow in plan.flows:
        for edge in flow.edges:
            if topology.node(edge.source) != topology.node(edge.target):
                entering[topology.node(edge.target)] += flow.num_bytes
    assert entering == {1: 12 << 20, 2: 12 << 20}


def test_slow_links_do_not_change_what_arrives() -> None:
    topology = Topology(nodes=((0, 1, 2), (3, 4)), network_bytes_s=1e6)
    run(state(range(2), dp_shard=2), state(range(5), dp_replicate=5), Planner(topology, round_bytes=1 << 12))


def test_what_nobody_has_is_named() -> None:
    source, target = state(range(2), tp=2), state(range(2), dp_shard=2)
    del source.tensors["norm.weight"]
    with pytest.raises(NotReshardable, match=r"norm\.weight: the target needs bfloat16 \[32\], the source has nothing"):
        Planner().plan(source, target)
    half = Layout([Tensor("embed.weight", "bfloat16", first_rows(place((130, 32), Mesh.of((5,)))))], (5,))
    with pytest.raises(NotReshardable, match=r"embed\.weight: slots \(0,\) need the block from \[0, 0\]"):
        Planner().plan(half, Layout([target["embed.weight"]], (0, 1)))
    wide = Layout([Tensor(t.name, "float32", t.holdings) for t in target], (0, 1))
    with pytest.raises(NotReshardable, match=r"the target needs float32 .* the source has bfloat16"):
        Planner().plan(state(range(2), tp=2), wide)


def first_rows(holdings: Holdings) -> Holdings:
    """What is left when a slot lost all but its first rows."""
    return replace(holdings, stop=np.minimum(holdings.stop, [[10, 32]]))


def test_plans_are_remembered_by_content() -> None:
    planner = Planner()
    plan = planner.plan(state(range(4), dp_shard=4), state(range(3), dp_shard=3))
    assert planner.plan(state(range(4), dp_shard=4), state(range(3), dp_shard=3)) is plan
    # Equal sizes are not equal layouts: other slots, or the same ones in another order, need another plan.
    assert planner.plan(state(range(4), dp_shard=4), state(range(1, 4), dp_shard=3)) is not plan


def test_a_plan_prints_what_it_does() -> None:
    plan = Planner().plan(whole(range(1)), whole(range(3), dp_replicate=3))
    text = str(plan)
    assert "1 tensors in 1 classes, 12.0 MiB, 1 slots to 3" in text
    assert "wire 24.0 MiB (lower bound 24.0), relayed 12.0, kept in place 12.0" in text
    assert "     0       12.0       12.0        0.0" in text
    assert f"predicted {plan.predicted_s * 1e3:.2f} ms at 200 GB/s\n" in text
    assert "0 -> 1 -> 2" in plan.describe_flows()
    assert "0 -> 2 -> 1" in plan.describe_flows()


def test_a_small_plan_prints_kib() -> None:
    plan = Planner().plan(whole(range(1), 256), whole(range(2), 256, dp_replicate=2))
    text = str(plan)
    assert "1 tensors in 1 classes, 1.0 KiB, 1 slots to 2" in text
    assert "wire 1.0 KiB (lower bound 1.0), relayed 0.0, kept in place 1.0" in text
    assert "  slot      keeps      sends   receives   KiB" in text
    assert plan.describe_flows().endswith("1.0 KiB")


def test_a_prediction_says_which_links_it_is_for() -> None:
    machines = Topology(nodes=((0,), (1,)), node_bytes_s=8e9, network_bytes_s=1.5e9)
    text = str(Planner(machines).plan(whole(range(1)), whole(range(2), dp_replicate=2)))
    assert " ms at 8 GB/s inside a node and 1.5 GB/s across\n" in text


def test_too_small_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="round_bytes is 63"):
        Planner(round_bytes=63).plan(whole(range(1)), whole(range(2), dp_replicate=2))
