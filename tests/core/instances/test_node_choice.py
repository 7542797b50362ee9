"""Which machines of a pool become nodes, and with which numbers."""

import pytest

from ductile.core.instances.node_choice import PoolNode, choose_nodes

GPUS = {"CPU": 8.0, "GPU": 8.0}
HEAD = PoolNode("h", "10.0.0.1", {"CPU": 4.0}, is_own=True)
NINTH, TENTH = PoolNode("a", "10.0.0.10", GPUS), PoolNode("b", "10.0.0.9", GPUS)
POOL = (NINTH, HEAD, TENTH)


@pytest.mark.parametrize(
    ("needed", "numbers", "unfit", "max_nodes", "chosen"),
    [
        ({"CPU": 1.0}, {}, "", 3, [(0, "h"), (1, "b"), (2, "a")]),  # its own machine, then by address
        ({"CPU": 1.0}, {}, "", 2, [(0, "h"), (1, "b")]),
        ({"GPU": 8.0}, {}, "", 3, [(0, "b"), (1, "a")]),  # the head has no GPU
        ({"GPU": 8.0, "big": 1.0}, {}, "", 3, []),
        ({"CPU": 1.0}, {"b": 0, "h": 1}, "", 3, [(2, "a")]),  # one that has come later
        ({"CPU": 1.0}, {"b": 0, "h": 2}, "", 3, [(1, "a")]),  # in the place of one that was lost
        ({"CPU": 1.0}, {}, "h", 3, [(0, "b"), (1, "a")]),
        ({"CPU": 1.0}, {"a": 0}, "", 1, []),
    ],
)
def test_choice(
    needed: dict[str, float], numbers: dict[str, int], unfit: str, max_nodes: int, chosen: list[tuple[int, str]]
) -> None:
    found = choose_nodes(POOL, needed, numbers, unfit, max_nodes)
    assert [(number, node.id) for number, node in found] == chosen
