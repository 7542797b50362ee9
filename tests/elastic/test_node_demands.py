"""What a run asks for after each step, by what its slots have done since the one before."""

from ductile.config.schema.cluster import ClusterConfig
from ductile.core.scheduling.facts.ledger import Ledger
from ductile.core.scheduling.node_demand import NodeDemand
from ductile.elastic.node_demands import NodeDemands

LACKS_NONE = "its slots lacked work for 0% of the last step, and one more has some"


def test_each_step_counts_for_itself() -> None:
    """Two slots on two nodes of three. In the second step one of them has no requests; then it is lost with its node,
    and comes back."""
    wanted, now_s, num_there = list[NodeDemand](), 0.0, 2
    ledger = Ledger()
    config = ClusterConfig(num_nodes=2, max_nodes=3, auto_scheduler=True)
    demands = NodeDemands(config, lambda: ledger, lambda: num_there, wanted.append, lambda: now_s)

    demands.on_metrics(0, {})  # the evaluation before the first step
    for slot in (0, 1):
        ledger.open(slot, now_s)
        ledger.switch(slot, "generate", now_s)
    now_s = 10.0
    demands.on_metrics(1, {})
    ledger.switch(1, "idle", now_s, "queue_full")
    now_s = 20.0
    demands.on_metrics(2, {})
    num_there = 1
    demands.on_metrics(3, {})
    num_there, now_s = 2, 30.0
    ledger = Ledger()  # as where slots begin anew
    ledger.open(0, now_s)
    ledger.switch(0, "train", now_s)
    now_s = 40.0
    demands.on_metrics(4, {})
    assert wanted == [
        NodeDemand(2, "it is not known yet how busy its slots are"),
        NodeDemand(3, LACKS_NONE),
        NodeDemand(2, "its slots lacked work for 50% of the last step"),
        NodeDemand(2, "it has 1 node, and began with 2"),
        NodeDemand(3, LACKS_NONE),
    ]
