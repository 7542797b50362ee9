"""`ductile join`: make this machine a node of a run.

0     the run is over
1     the node was lost: the orchestrator is gone, or a process of the node ended that it needs
2     there is no such run, or it does not take this machine
130   asked to leave, by Ctrl-C or SIGTERM, also where its slots were emptied first
"""

import argparse
from collections.abc import Sequence

from ductile.config.reading.command_line import print_error
from ductile.user_files import BadPath, expanded

WAIT_S = 300.0
NOT_JOINED = 2


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ductile join",
        description="Make this machine a node of a run: slots run here until it is over. A run waits for its nodes "
        "(cluster.num_nodes), and takes more while it is at work, up to cluster.max_nodes.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="the run's output_dir, on a file system that both machines have; or host:port of the orchestrator, with "
        "what its cluster.key has in DUCTILE_CLUSTER_KEY",
    )
    parser.add_argument(
        "--node-rank", type=int, metavar="N", help="number of this node, from 0; default: in the order of arrival"
    )
    parser.add_argument(
        "--wait-s", type=float, default=WAIT_S, metavar="S", help="how long to wait for the run (default: %(default)g)"
    )
    parser.add_argument(
        "--interface",
        metavar="NAME",
        default="",
        help="interface or address of this machine that the other nodes reach; default: the one that leads to the "
        "orchestrator",
    )
    parser.add_argument(
        "--new-key",
        action="store_true",
        help="print a new key and stop: for DUCTILE_CLUSTER_KEY of a run and of its nodes, where they share no folder",
    )
    asked = parser.parse_args(list(words))
    if asked.new_key:
        from ductile.transport.curve import RunKey

        print(RunKey.new().secret)
        return 0
    if asked.run is None:
        parser.error("write which run: its output_dir, or host:port of its orchestrator")
    if asked.wait_s < 0:
        parser.error("--wait-s must not be negative")
    from ductile.cluster.join import CannotJoin, join_run  # what it imports takes a while

    try:
        return join_run(expanded(asked.run), asked.wait_s, asked.node_rank, asked.interface)
    except (CannotJoin, BadPath) as error:
        print_error("join", error)
        return NOT_JOINED
