"""How many nodes a run asks for, and why."""

import pytest

from ductile.core.scheduling.facts.ledger import IdleCause
from ductile.core.scheduling.node_demand import NodeDemand, first_demand, lacked_share, node_demand


@pytest.mark.parametrize(
    ("there", "is_scheduled", "lacked", "asks_for", "why"),
    [
        (2, True, 0.0, 3, "its slots lacked work for 0% of the last step, and one more has some"),
        (3, True, 0.1, 4, "its slots lacked work for 10% of the last step, and one more has some"),
        (4, True, 0.0, 4, "it has all 4 nodes that it may have"),
        (3, True, 0.4, 3, "its slots lacked work for 40% of the last step"),
        (3, True, None, 3, "it is not known yet how busy its slots are"),
        (3, False, 0.0, 3, "no policy would give the slots of another node work (cluster.auto_scheduler)"),
        (1, True, 0.0, 2, "it has 1 node, and began with 2"),
    ],
)
def test_a_run_that_may_have_four_nodes_asks_for_what_it_could_use(
    there: int, is_scheduled: bool, lacked: float | None, asks_for: int, why: str
) -> None:
    assert node_demand(2, 4, there, is_scheduled, lacked) == NodeDemand(asks_for, why)


@pytest.mark.parametrize(("lacked", "asks_for"), [(0.15, 4), (0.21, 3)])
def test_a_node_that_is_on_its_way_is_not_given_up_at_once(lacked: float, asks_for: int) -> None:
    assert node_demand(2, 4, 3, True, lacked, num_asked=4).num_nodes == asks_for


def test_a_run_that_is_not_at_work_asks_for_what_it_begins_with() -> None:
    assert first_demand(1) == NodeDemand(1, "the run begins with 1 node")


@pytest.mark.parametrize(
    ("idle_s", "slot_s", "share"),
    [
        ({}, 10.0, 0.0),
        ({"tail": 1.0, "queue_full": 2.0, "no_role": 2.0}, 10.0, 0.5),
        ({"waiting_for_batch": 5.0, "start_up": 2.0, "lost": 1.0}, 10.0, 0.0),
        ({}, 0.0, None),
    ],
)
def test_a_train_slot_that_waits_for_completions_lacks_none(
    idle_s: dict[IdleCause, float], slot_s: float, share: float | None
) -> None:
    assert lacked_share(idle_s, slot_s) == share
