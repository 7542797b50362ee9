"""Joining a run: find it, start this machine's agent, and say how that ended (`ductile.cluster.join_command`)."""

import asyncio
import signal
import socket
import sys
import time
from pathlib import Path

from ductile.cluster.agent import INTERRUPTED, Agent, Departure, hello
from ductile.cluster.invitation import KEY_VARIABLE, NotInvited, invitation_of, json_file
from ductile.config.reading.command_line import as_sentence
from ductile.error_text import capitalised
from ductile.transport.curve import RunKey
from ductile.transport.network import NoSuchInterface, address_of, address_towards

POLL_S = 0.5
HEARD_S = 10.0
"""An orchestrator says something within so long; else its folder is looked at again: it may have begun anew."""
COMES_AGAIN = (0, 1)
"""Exit codes after which a run may begin anew: it is over, or the node was lost."""


class CannotJoin(Exception):
    """This machine cannot become a node of the run. The text is a sentence without its full stop."""


def join_run(
    where: str,
    wait_s: float,
    node_rank: int | None,
    interface: str = "",
    ends_with_run: bool = False,
    again: bool = False,
) -> int:
    """Be a node of a run until it is over; return the exit code of `ductile join`. Raises CannotJoin.

    where, interface, again: as `ductile join` has them. wait_s: how long to wait for the run. ends_with_run: whoever
    sends this process a signal sends it to the orchestrator, too, which then ends the run in order: a node that has
    joined does not leave by itself.
    """
    try:
        return asyncio.run(_join(where, wait_s, node_rank, interface, ends_with_run, again))
    except (NotInvited, NoSuchInterface, OSError) as error:
        raise CannotJoin(str(error)) from error


async def _join(
    where: str, wait_s: float, node_rank: int | None, interface: str, ends_with_run: bool, again: bool
) -> int:
    until = time.monotonic() + wait_s
    loop, asked_to_leave = asyncio.get_running_loop(), asyncio.Event()
    agent: Agent | None = None
    has_told = False

    def on_signal(signum: signal.Signals) -> None:
        has_joined = agent is not None and agent.was_heard.is_set()
        if ends_with_run and has_joined:
            return
        # SIGTERM is what comes before a machine is taken away.
        if signum != signal.SIGTERM or agent is None or not agent.give_notice():
            asked_to_leave.set()

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, on_signal, signum)
    while not asked_to_leave.is_set():
        address, key = await _invitation(where, until, wait_s, asked_to_leave)
        if asked_to_leave.is_set():
            break
        own = await _own_address(interface, address, until, asked_to_leave)
        if asked_to_leave.is_set():
            break
        said = hello(own, node_rank)
        agent = Agent(address, key, said, lambda sentence: print(f"ductile join: {sentence}", file=sys.stderr))
        leaving = asyncio.create_task(asked_to_leave.wait())
        leaving.add_done_callback(lambda _, agent=agent: agent.end("the node was asked to leave", INTERRUPTED))
        running = asyncio.create_task(agent.run())
        if not await _is_heard(agent.was_heard, running, HEARD_S):
            agent.end("nobody is there")
        departure: Departure = await running
        leaving.cancel()
        if departure.is_for_now and time.monotonic() < until and not asked_to_leave.is_set():
            if not has_told:
                why = as_sentence(capitalised(departure.why))
                print(f"ductile join: {why} It is tried again for {wait_s:g} s (--wait-s).", file=sys.stderr)
            has_told = True
            await asyncio.sleep(POLL_S)
            continue
        if agent.was_heard.is_set() or asked_to_leave.is_set():
            print(f"ductile join: {as_sentence(capitalised(departure.why))}", file=sys.stderr)
            if again and departure.code in COMES_AGAIN and not asked_to_leave.is_set():
                until = time.monotonic() + wait_s
                await asyncio.sleep(POLL_S)
                continue
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
            if json_file(Path(where)).exists():
                raise NotInvited(
                    f"{json_file(Path(where))} is of a run with another key, and has been for {wait_s:g} s (--wait-s): "
                    f"has this machine the {KEY_VARIABLE} that the run was given?"
                )
            raise NotInvited(
                f"{Path(where)} has no cluster.json after {wait_s:g} s (--wait-s): no run is at work there that takes "
                "nodes. One that does has cluster.num_nodes or cluster.max_nodes above 1"
            )
        if leaving.is_set():
            return "", RunKey("")
        await asyncio.sleep(POLL_S)
    return found


async def _own_address(interface: str, orchestrator: str, until: float, leaving: asyncio.Event) -> str:
    """Return the address of this machine at which the run's other machines reach it. A name of the orchestrator's that
    is not known yet, as that of a pod which has not begun, is waited for. Raises NotInvited."""
    if interface:
        return address_of(interface)
    host, _, port = orchestrator.rpartition(":")
    try:
        while not leaving.is_set():
            try:
                return await asyncio.to_thread(address_towards, host.strip("[]"), int(port))
            except socket.gaierror:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(POLL_S)
        return ""
    except OSError as error:
        raise NotInvited(f"no route leads from this machine to {orchestrator} ({error.strerror or error})") from None
