"""Which slots of several nodes work together along which axis: tables of topologies, and what holds of any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules, choose_layout, layout_for
from ductile.core.layout.choice.planner import plan_layout
from ductile.core.layout.choice.requested_layout import LayoutRequest, requested_layout
from ductile.core.layout.geometry.node_order import arranged, chosen, inside_first, is_inside, split_groups
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.layout.model.spec import ModelSpec

FOURS = Topology.of(slots_per_node=4, num_nodes=3)
SPEC = ModelSpec("qwen3", 130, 64, 48, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=8, qk_norm=True)


def test_a_topology_says_the_node_of_each_slot():
    assert [FOURS.node(slot) for slot in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert FOURS.node(12) not in (0, 1, 2), "a slot of no node is one of its own"
    assert FOURS.whole_nodes(range(3, 12)) == (1, 2)
    assert [FOURS.spans(pair) for pair in ((3, 4), (4, 7))] == [True, False]
    assert (ONE_NODE.spans(range(100)), ONE_NODE.whole_nodes(range(100))) == (False, ())
    assert Topology.of(8, 1) == ONE_NODE
    assert Topology.of(1, 4).slots_per_node is None, "nothing can be kept inside a node of one slot"


@pytest.mark.parametrize(
    ("slots", "dims", "ranks"),
    [
        (range(8), ParallelDims(dp_shard=4, tp=2), [0, 1, 2, 3, 4, 5, 6, 7]),
        ([7, 0, 5, 1, 6, 4], ParallelDims(dp_shard=3, tp=2), [7, 5, 6, 4, 0, 1]),
        # What nodes have left over makes up the last group: no other one talks over the network.
        ([0, 1, 2, 4, 5, 6], ParallelDims(dp_shard=3, tp=2), [0, 1, 4, 5, 2, 6]),
        ([0, 4, 5, 6, 7, 1], ParallelDims(dp_shard=3, tp=2), [0, 1, 4, 5, 6, 7]),
        # cp groups of 4 are whole nodes; of 3 slots and 1, tp stays inside as long as it can.
        ([0, 1, 2, 3, 4, 5, 8, 9], ParallelDims(dp_shard=2, cp=2, tp=2), [0, 1, 2, 3, 4, 5, 8, 9]),
        ([8, 0, 1, 2, 3, 9, 10, 11], ParallelDims(cp=4, tp=2), [8, 9, 10, 11, 0, 1, 2, 3]),
        # Shards inside nodes, copies across; shards of 8 take two nodes each.
        ([0, 4, 8, 1, 5, 9], ParallelDims(dp_replicate=3, dp_shard=2), [0, 1, 4, 5, 8, 9]),
    ],
)
def test_the_innermost_axes_are_inside_nodes(slots, dims, ranks):
    assert arranged(slots, dims, FOURS) == tuple(ranks)


def test_on_one_node_slots_keep_their_order():
    assert arranged([3, 1, 2, 0], ParallelDims(dp_shard=2, tp=2), ONE_NODE) == (3, 1, 2, 0)
    assert arranged([3, 1, 2, 0], ParallelDims(dp_shard=2, tp=2), FOURS) == (3, 1, 2, 0)


@st.composite
def layouts(draw):
    """Any slots of up to five nodes, in any order, and sizes of a layout on them."""
    per_node = draw(st.integers(1, 6))
    topology = Topology.of(per_node, 5)
    sizes = {axis: draw(st.sampled_from([1, 1, 2, 3])) for axis in ("pp", "dp_replicate", "cp", "tp")}
    of_a_shard = sizes["pp"] * sizes["dp_replicate"] * sizes["cp"] * sizes["tp"]
    num_slots = 5 * per_node // of_a_shard * of_a_shard
    if not num_slots:
        return topology, tuple(range(5 * per_node)), ParallelDims(dp_shard=5 * per_node)
    slots = draw(st.permutations(range(5 * per_node)))[:num_slots]
    return topology, tuple(slots), ParallelDims(**sizes, dp_shard=num_slots // of_a_shard)


@given(layouts())
def test_as_many_tp_groups_are_inside_nodes_as_can_be(case):
    topology, slots, dims = case
    order = arranged(slots, dims, topology)
    assert sorted(order) == sorted(slots)
    assert order == arranged(order, dims, topology), "who stays where he is moves nothing"
    layout = ParallelLayout(order, dims)
    num_inside = len(slots) // dims.tp - len(split_groups(layout, topology))
    possible = sum(len(own) // dims.tp for own in topology.by_node(slots).values())
    assert num_inside == (possible if topology.spans(slots) else len(slots) // dims.tp)


@pytest.mark.parametrize(
    ("staying", "joining", "number", "size", "expected"),
    [
        ([0, 1, 4, 5], [8, 9], 6, 2, [0, 1, 4, 5, 8, 9]),
        ([0, 1, 2, 4, 5, 6, 7], [], 6, 2, [0, 1, 4, 5, 6, 7]),
        ([0, 1, 2], [4, 3], 4, 2, [0, 1, 2, 3]),
        ([0, 1, 2, 4], [8, 9], 4, 2, [0, 1, 8, 9]),
        ([0, 4], [5, 1], 2, 1, [0, 4]),
    ],
)
def test_a_trainer_takes_slots_that_are_whole_groups(staying, joining, number, size, expected):
    assert [*chosen(staying, joining, number, size, FOURS)] == expected


def test_the_state_moves_once_and_messages_go_in_every_step():
    by_nodes = ParallelLayout.of((0, 1, 4, 5), tp=2)
    assert inside_first(ParallelLayout.of((4, 5, 0, 1), tp=2), by_nodes, FOURS).slots == (4, 5, 0, 1)
    assert inside_first(ParallelLayout.of((0, 4, 1, 5), tp=2), by_nodes, FOURS) == by_nodes


def test_the_rules_of_a_run_arrange_slots():
    rules = LayoutRules(asked=AskedLayout(tp=2), topology=FOURS)
    assert layout_for((1, 4, 5, 0), rules).slots == (1, 0, 4, 5)
    by_hand = requested_layout(
        LayoutRequest("tp=2", train=(1, 4, 5, 0)), ParallelLayout.of(range(4)), rules, range(12), ()
    )
    assert by_hand.slots == (1, 0, 4, 5)


@pytest.mark.parametrize(
    ("num_slots", "nodes_per_group", "asked", "copies"),
    [
        (4, 1, AskedLayout(), 1),
        (8, 1, AskedLayout(), 2),
        (12, 1, AskedLayout(), 3),
        (8, 2, AskedLayout(), 1),
        (16, 2, AskedLayout(), 2),
        (12, 2, AskedLayout(), 1),  # a group and a half: one copy over three nodes
        (6, 1, AskedLayout(), 1),  # never a larger part for a slot than that of whole nodes
        (10, 1, AskedLayout(tp=2), 1),  # two copies of 5 slots are none with tp 2
        (8, None, AskedLayout(dp_replicate=4), 4),
    ],
)
def test_copies_follow_from_nodes_per_fsdp_group(num_slots, nodes_per_group, asked, copies):
    topology = Topology.of(slots_per_node=4, num_nodes=4)
    rules = LayoutRules(asked=asked, topology=topology, nodes_per_fsdp_group=nodes_per_group)
    assert choose_layout(num_slots, rules).layout.dims.dp_replicate == copies
    layout = layout_for(range(num_slots), rules)
    if nodes_per_group == 1 and num_slots % 4 == 0:
        assert split_groups(layout, topology, ("dp_shard", "cp", "tp")) == [], "shards of a copy are inside a node"


@pytest.mark.parametrize(
    ("reach", "num_slots", "per_node", "inside"),
    [(2, 8, 4, True), (8, 8, 4, False), (8, 8, None, True), (3, 12, 4, False), (8, 8, 8, True), (6, 6, 8, True)],
)
def test_groups_of_neighbours_are_inside_nodes_of_a_multiple(reach, num_slots, per_node, inside):
    assert is_inside(reach, num_slots, per_node) is inside


def test_tp_auto_stays_inside_nodes_and_a_larger_one_is_told():
    auto = plan_layout(16, AskedLayout(tp="auto"), SPEC, num_samples=2, slots_per_node=4)
    assert auto.layout.dims.tp == 4
    assert plan_layout(16, AskedLayout(tp="auto"), SPEC, num_samples=2).layout.dims.tp == 8
    (warning,) = [
        each for each in plan_layout(16, AskedLayout(tp=8), SPEC, slots_per_node=4).warnings if "node" in each.what
    ]
    assert warning.sentence.startswith("tp = 8 has groups on several nodes, which have 4 slots each")
    (warning,) = plan_layout(16, AskedLayout(tp=2, cp=4), None, slots_per_node=4).warnings
    assert warning.sentence.startswith("cp = 4 has groups with tp 2 on several nodes")


def test_rules_come_back_as_they_were_written():
    from dataclasses import asdict

    rules = LayoutRules(SPEC, topology=FOURS, nodes_per_fsdp_group=2)
    assert LayoutRules.from_fields(asdict(rules)) == rules
