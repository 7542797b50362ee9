"""Slots that are killed or stopped at some moment of a change of roles, or of a migration, that a seed chooses."""

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ductile.cluster.local import LocalCluster
from ductile.messages.workers import Command

How = Literal["kill", "stop", "pause", "end"]
"""pause: stopped for PAUSE_S, and then let go on, as if nothing had been. end: the orchestrator is killed."""

PAUSE_S = 1.0
LONGEST_DELAY_S = 0.1
MOMENTS = (
    "MigrateOut",
    "Forget",
    "AssignRole",
    "OfferWeights",
    "ReleaseRole",
    "Prepare",
    "Freeze",
    "TransferState",
    "Commit",
    "Finalize",
)
"""Commands that only changes and migrations send. What comes between two is within the delay after the first."""
RESIZE_MOMENTS = (*MOMENTS[MOMENTS.index("Prepare") :], "ForwardBackward")
NUM_RESIZE_MOMENTS = 8
"""Of a kind, at the least, in a run that is resized all the time."""


@dataclass(frozen=True, slots=True)
class Strike:
    how: How
    command: str
    nth: int
    """Of such commands, counted over all slots."""
    delay_s: float
    """Counted from when the command is sent."""
    bystander: bool
    """Another slot is struck than the one that is told."""
    since: str = "Generate"
    """Commands count from when this one is first sent. Slots get their first roles before they generate."""

    @staticmethod
    def of(seed: int) -> "Strike":
        chance = random.Random(seed)
        return Strike(
            how=chance.choice(("kill", "kill", "stop", "stop", "pause")),
            command=chance.choice(MOMENTS),
            nth=chance.randint(1, 4),
            delay_s=LONGEST_DELAY_S * chance.random() ** 4,  # most parts of a change take a few milliseconds
            bystander=chance.random() < 0.3,
        )

    @staticmethod
    def of_resizes(seed: int) -> "Strike":
        """In any of the resizes of a run, or at its work between two: of three runs two have saved before."""
        chance = random.Random(seed)
        return Strike(
            how=chance.choice(("kill", "kill", "stop", "end")),
            command=chance.choice(RESIZE_MOMENTS),
            nth=chance.randint(1, NUM_RESIZE_MOMENTS),
            delay_s=LONGEST_DELAY_S * chance.random() ** 4,
            bystander=chance.random() < 0.3,
            since=chance.choice(("Generate", "SaveState", "SaveState")),
        )


class Striker:
    """Watches what the slots are told, and strikes once. What it did is in `path`, a JSON object."""

    def __init__(self, strike: Strike, cluster: LocalCluster, path: Path) -> None:
        self._strike, self._cluster, self._path = strike, cluster, path
        self._told: dict[int, str] = {}
        self._at_work = False
        self._num_left = strike.nth
        cluster.mailbox.watch(self._on_command)

    def _on_command(self, slot: int, running: type[Command] | None) -> None:
        command = running.__name__ if running else ""
        before, self._told[slot] = self._told.get(slot, ""), command
        self._at_work |= command == self._strike.since
        if self._at_work and command == self._strike.command != before:
            self._num_left -= 1
            if self._num_left == 0:
                asyncio.get_running_loop().call_later(self._strike.delay_s, self._hit, self._victim(slot))

    def _victim(self, told: int) -> int:
        lost = self._cluster.mailbox.lost
        others = [slot for slot in self._cluster.slots if slot != told and slot not in lost]
        return random.Random(told).choice(others) if self._strike.bystander and others else told

    def _hit(self, slot: int) -> None:
        process, how = self._cluster.processes[slot], self._strike.how
        roles = self._cluster.mailbox.roles(slot)
        told = {"time": time.time(), "slot": slot, "pid": process.pid, "roles": roles, **asdict(self._strike)}
        if how == "end":
            self._path.write_text(json.dumps(told))
            os.kill(os.getpid(), signal.SIGKILL)
        process.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "pause":
            asyncio.get_running_loop().call_later(PAUSE_S, process.signal, signal.SIGCONT)
        self._path.write_text(json.dumps(told))


def strike_of_environment() -> Strike | None:
    if seed := os.environ.get("STRIKE_SEED"):
        return Strike.of(int(seed))
    seed = os.environ.get("RESIZE_STRIKE_SEED")
    return Strike.of_resizes(int(seed)) if seed else None
