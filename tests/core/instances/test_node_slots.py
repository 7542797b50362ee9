import pytest

from ductile.core.instances.node_groups import InGroup, groups_of_nodes, without_groups
from ductile.core.instances.node_slots import NodeSlots, SlotsPerNode, node_number, number_all, slots_per_node
from ductile.core.instances.placement import PlacementError, place


def test_slots_are_numbered_node_by_node() -> None:
    nodes = NodeSlots(8, 3)
    assert (nodes.of(1), nodes.num_slots) == (tuple(range(8, 16)), 24)
    assert [nodes.node_of(slot) for slot in (0, 7, 8, 23)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("num_slots", "num_nodes", "shared_out", "on_cpus"),
    [(4, 2, True, 2), (5, 2, True, 3), (1, 1, True, 1), (4, 2, False, 8)],
)
def test_on_cpus_the_slots_are_shared_out(num_slots: int, num_nodes: int, shared_out: bool, on_cpus: int) -> None:
    assert slots_per_node(8, num_slots, num_nodes, shared_out) == SlotsPerNode(8, on_cpus)


@pytest.mark.parametrize(
    ("asked", "taken", "head", "number"),
    [
        (None, {}, (), 0),
        (None, {}, (0,), 1),
        (None, {1}, (0,), 2),
        (None, {1, 2}, (0,), "all nodes that it may have: 3"),
        (2, {1}, (0,), 2),
        (1, {1}, (0,), "node 1 is there already"),
        (0, {1}, (0,), "node 0 is the orchestrator's own machine"),
        (3, {}, (), "--node-rank is at most 2"),
    ],
)
def test_the_number_of_a_node_that_joins(asked, taken, head, number) -> None:
    found = node_number(asked, taken, 3, head)
    assert found == number if isinstance(number, int) else number in str(found)


@pytest.mark.parametrize(
    ("asked", "first", "numbers"),
    [
        ([None, None], 1, [1, 2]),
        ([None, 1], 1, [2, 1]),
        ([2], 1, None),
        ([], 1, None),
        ([None, None, None], 0, [0, 1, 2]),
        ([3, None, None], 1, [3, 1, 2]),  # node 3 joins the run that is at work
        ([None, None, None], 1, [1, 2, None]),
    ],
)
def test_nodes_are_numbered_when_all_have_come(asked, first, numbers) -> None:
    assert number_all(asked, first, 3) == numbers


def test_a_run_of_one_node_waits_for_none() -> None:
    assert number_all([], 1, 1) == []


def test_placement_by_groups_of_nodes() -> None:
    nodes = groups_of_nodes([("a", "0-1"), ("b", [2])], 3)
    entries = {"actor": InGroup(("b",), "all"), "rollout": InGroup(("a",), "2-7"), "inference": "0-1"}
    found = place(without_groups(entries, nodes, 4))
    assert (found.train, found.generate, found.score) == ((8, 9, 10, 11), (2, 3, 4, 5, 6, 7), (0, 1))


@pytest.mark.parametrize(
    ("entry", "slots"),
    [
        (InGroup(("b", "a"), "0-4"), "0,8-11"),
        (InGroup(("cluster",), "all"), "0-11"),
        (InGroup(("a",), 7), "7"),
    ],
)
def test_groups_are_counted_through_in_the_order_in_which_they_are_named(entry: InGroup, slots: str) -> None:
    nodes = groups_of_nodes([("a", "0-1"), ("b", 2)], 3)
    assert without_groups({"actor": entry}, nodes, 4) == {"actor": slots}


@pytest.mark.parametrize(
    ("groups", "entry", "why"),
    [
        ([("a", "0-3")], "0", r"The node group `a` has node 3, and there are 3"),
        ([("a", 0), ("a", 1)], "0", "`a` is there twice"),
        ([("cluster", 0)], "0", "`cluster` is all nodes already"),
        ([("a", 0)], InGroup(("b",), 0), "names the node group `b`, which is not there: cluster.node_groups has a, cl"),
        ([("a", 0)], InGroup(("a",), "2-4"), "goes past slot 3, the last one of node group a: 4 is not there"),
        ([("a", "x")], "0", "`node_ranks: x` is not a slot"),
    ],
)
def test_groups_that_cannot_be(groups, entry, why: str) -> None:
    with pytest.raises(PlacementError, match=why):
        without_groups({"actor": entry}, groups_of_nodes(groups, 3), 4)


def test_all_slots_of_all_nodes() -> None:
    found = place({"actor,rollout": "all"}, num_all=16)
    assert found.train == tuple(range(16))
    assert found.reason.endswith("`all` is 16 slots, because the nodes have so many")
