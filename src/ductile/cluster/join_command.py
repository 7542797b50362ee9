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


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return what a command line says; SystemExit where it is wrong."""
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
        "--again",
        action="store_true",
        help="when the run is over or was lost, wait for it to begin anew (as a job that is started again goes on from "
        "its checkpoint), until asked to leave",
    )
    parser.add_argument(
        "--new-key",
        action="store_true",
        help="print a new key and stop: for DUCTILE_CLUSTER_KEY of a run and of its nodes, where they share no folder",
    )
    asked = parser.parse_args(list(words))
    if asked.run is None and not asked.new_key:
        parser.error("write which run: its output_dir, or host:port of its orchestrator")
    if asked.wait_s < 0:
        parser.error("--wait-s must not be negative")
    return asked


def main(words: Sequence[str]) -> int:
    asked = arguments(words)
    if asked.new_key:
        from ductile.transport.curve import RunKey

        print(RunKey.new().secret)
        return 0
    from ductile.cluster.join import CannotJoin, join_run  # what it imports takes a while

    try:
        return join_run(expanded(asked.run), asked.wait_s, asked.node_rank, asked.interface, again=asked.again)
    except (CannotJoin, BadPath) as error:
        print_error("join", error)
        return NOT_JOINED
