"""Of the kinds of trials of `make node-trials` one: the network of a node that trains is broken for five seconds, and
then a node that generates is killed."""

from pathlib import Path

import pytest

from tests.cluster.namespaces import Network
from tests.cluster.node_faults import Fault, Trial
from tests.cluster.node_run import DEADLINE_S, Moment
from tests.cluster.node_trials import OneMachine, check, machine, network

__all__ = ["machine", "network"]

BOTH = (Fault("part", 1, Moment(1, "ForwardBackward", 3)), Fault("kill", 2, Moment(2, "Generate", 2)))


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_run_outlives_a_partition_and_a_node(network: Network, machine: OneMachine, tmp_path: Path) -> None:
    check(Trial(-1, "both", "away", BOTH), network, machine, tmp_path)
