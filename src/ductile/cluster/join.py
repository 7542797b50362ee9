"""`ductile join`: make this machine a node of a run.

0     the run is over
1     the node was lost: the orchestrator is gone, or a process of the node ended that it needs
2     there is no such run, or it does not take this machine
130   asked to leave, by Ctrl-C or SIGTERM
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ductile.cluster.invitation import KEY_VARIABLE, NotInvited, invitation_of
from ductile.config.reading.command_line import as_sentence, print_error
from ductile.error_text import capitalised
from ductile.transport.curve import RunKey
from ductile.transport.network import NoSuchInterface, address_of, address_towards
from ductile.user_files import BadPath, expanded

WAIT_S = 300.0
POLL_S = 0.5
HEARD_S = 10.0
"""An orchestrator says something within so long; else its folder is looked at again: it may have begun anew."""
NOT_JOINED, INTERRUPTED = 2, 130


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ductile join",
        description="Make this machine a node of a run: slots run here until it is over. A run waits for its nodes "
        "(cluster.num_nodes), and takes more while it is at work, up to cluster.max_nodes.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help=f"the run's output_dir, on a file system that both machines have; or host:port of the orchestrator, with "
        f"what its cluster.key has in {KEY_VARIABLE}",
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
    asked = parser.parse_args(list(words))
    if asked.wait_s < 0:
        parser.error("--wait-s must not be negative")
    try:
        return join(expanded(asked.run), asked.wait_s, asked.node_rank, asked.interface)
    except (NotInvited, NoSuchInterface, BadPath, OSError) as error:
        print_error("join", error)
        return NOT_JOINED


def join(
    where: str, wait_s: float, node_rank: int | None = None, interface: str = "", ends_with_run: bool = False
) -> int:
    """Be a node of the run until it is over; returns the exit status. In the main thread.

    where: the run's folder, or host:port. ends_with_run: whoever sends this process a signal sends it to the
    orchestrator, too, which then ends the run in order: a node that has joined does not leave by itself. Raises
    NotInvited, NoSuchInterface or OSError.
    """
    return asyncio.run(_join(where, wait_s, node_rank, interface, ends_with_run))


async def _join(where: str, wait_s: float, node_rank: int | None, interface: str, ends_with_run: bool) -> int:
    from ductile.cluster.agent import Agent, Departure, hello

    until = time.monotonic() + wait_s
    loop, asked_to_leave = asyncio.get_running_loop(), asyncio.Event()
    agent: Agent | None = None

    def on_signal() -> None:
        if not (ends_with_run and agent is not None and agent.was_heard.is_set()):
            asked_to_leave.set()

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, on_signal)
    while not asked_to_leave.is_set():
        address, key = await _invitation(where, until, wait_s, asked_to_leave)
        if asked_to_leave.is_set():
            break
        said = hello(_own_address(interface, address), node_rank)
        agent = Agent(address, key, said, lambda sentence: print(f"ductile join: {sentence}", file=sys.stderr))
        leaving = asyncio.create_task(asked_to_leave.wait())
        leaving.add_done_callback(lambda _, agent=agent: agent.end("the node was asked to leave", INTERRUPTED))
        running = asyncio.create_task(agent.run())
        if not await _is_heard(agent.was_heard, running, HEARD_S):
            agent.end("nobody is there")
        departure: Departure = await running
        leaving.cancel()
        if agent.was_heard.is_set() or asked_to_leave.is_set():
            print(f"ductile join: {as_sentence(capitalised(departure.why))}", file=sys.stderr)
            return departure.code
        if time.monotonic() >= until:
            raise NotInvited(
                f"nobody who has the run's key replies at {address}: is the orchestrator at work, is the key its own, "
                "and does this machine reach it (docs/cluster.md)?"
            )
    return INTERRUPTED


async def _is_heard(heard: asyncio.Event, running: "asyncio.Task[object]", within_s: float) -> bool:
    hearing = asyncio.create_task(heard.wait())
    await asyncio.wait([hearing, running], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    hearing.cancel()
    return heard.is_set()


async def _invitation(where: str, until: float, wait_s: float, leaving: asyncio.Event) -> tuple[str, RunKey]:
    """Wait for the run's folder to say where its orchestrator is. Raises NotInvited."""
    while (found := invitation_of(where)) is None:
        if time.monotonic() >= until:
            raise NotInvited(
                f"{Path(where)} has no cluster.json after {wait_s:g} s (--wait-s): no run is at work there that takes "
                "nodes. One that does has cluster.num_nodes or cluster.max_nodes above 1"
            )
        if leaving.is_set():
            return "", RunKey("")
        await asyncio.sleep(POLL_S)
    return found


def _own_address(interface: str, orchestrator: str) -> str:
    if interface:
        return address_of(interface)
    host, _, port = orchestrator.rpartition(":")
    try:
        return address_towards(host.strip("[]"), int(port))
    except OSError as error:
        raise NotInvited(f"no route leads from this machine to {orchestrator} ({error.strerror or error})") from None
