"""Endings of a run in real processes: signals, deaths, a full disk. At a random moment, on a tiny model.

`Ending.of(seed)` draws one. `take_place` has it happen, looks at what is on disk, and goes on.
"""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.processes import parent_of, processes_with
from tests.end_to_end.runs import Run, checkpointed_steps, write_config, write_sft
from tests.full_disk import enlarge, small_disk

ENDS_WITHIN_S = 200.0
NEVER = 100_000
KEPT = 2
"""Checkpoints, where nothing else is said."""
DISK_BYTES = 3 << 20
KILLED_SILENTLY = -signal.SIGKILL


@dataclass(frozen=True)
class Ending:
    kind: str
    command: str
    interval: int
    """Of its checkpoints."""
    step: int
    """Trained before it is struck."""
    delay_s: float
    """After that step."""
    flags: tuple[str, ...] = ()

    @staticmethod
    def of(seed: int) -> "Ending":
        draw = random.Random(seed)
        kind, command = KINDS[seed % len(KINDS)]
        interval = 1 if kind == "disk full" else draw.choice([1, 3, NEVER])
        flags = ("--ckpt.keep-last", "1000") if kind == "disk full" else ()
        if command == "rl" and seed >= len(KINDS):  # slots change their roles meanwhile
            flags = (*flags, "--cluster.auto-scheduler", "--cluster.policy", draw.choice(["model", "rules"]))
        return Ending(kind, command, interval, draw.randint(1, 4), draw.uniform(0, 0.8), flags)

    def __str__(self) -> str:
        how = "saving at the end" if self.interval == NEVER else f"saving every {self.interval}"
        return (
            f"{' '.join((self.command, *self.flags))}: {self.kind}, {self.delay_s:.2f} s after step {self.step}, {how}"
        )


def _process_server(run: Run) -> int:
    forked = {event["pid"] for event in run.events("slot_started")}
    found = processes_with(run.mark).items()
    return min(pid for pid, command in found if "ductile.slot.forkserver" in command and pid not in forked)


def _store(run: Run) -> int:
    """What the process server has forked and is no slot."""
    server, slots = _process_server(run), {event["pid"] for event in run.events("slot_started")}
    return next(pid for pid in processes_with(run.mark) if parent_of(pid) == server and pid not in slots)


def _send(signum: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.process.send_signal(signum)


def _send_group(signum: signal.Signals) -> Callable[[Run], None]:
    return lambda run: os.killpg(run.process.pid, signum)


def _kill_trainer(run: Run) -> None:
    os.kill(run.pid_of("train"), signal.SIGKILL)


def _kill_slot(role: str) -> Callable[[Run], None]:
    """The run goes on without it, and with it again, unless a policy has it train by then; Ctrl-C ends the run."""

    def kill(run: Run) -> None:
        os.kill(run.pid_of(role), signal.SIGKILL)
        while run.process.poll() is None and not (run.events("slot_restarted") or TRAINED_TOO.search(run.said())):
            time.sleep(0.01)
        run.process.send_signal(signal.SIGINT)

    return kill


def _kill(pid_of: Callable[[Run], int]) -> Callable[[Run], None]:
    return lambda run: os.kill(pid_of(run), signal.SIGKILL)


def _lose_terminal(run: Run) -> None:
    assert run.terminal is not None
    run.terminal.close()


def _kill_grader(run: Run) -> None:
    """Nothing ends by that; Ctrl-C a moment later does."""
    killed = min(run.graders())
    os.kill(killed, signal.SIGKILL)
    run.until_step(run.metrics()[-1]["step"] + 1)
    assert killed not in run.graders()
    run.until(run.graders)  # others do its work
    run.process.send_signal(signal.SIGINT)


STRIKES: dict[str, tuple[Callable[[Run], None], int]] = {
    "SIGINT": (_send(signal.SIGINT), 130),
    "SIGTERM": (_send(signal.SIGTERM), 130),
    "SIGINT to the group": (_send_group(signal.SIGINT), 130),
    "SIGTERM to the group": (_send_group(signal.SIGTERM), 130),
    "SIGHUP to the group": (_send_group(signal.SIGHUP), 130),
    "terminal lost": (_lose_terminal, 130),
    "kill -9 of generate": (_kill_slot("generate"), 130),
    "kill -9 of score": (_kill_slot("score"), 130),
    "kill -9 of the store": (_kill(_store), 1),
    "kill -9 of a grader": (_kill_grader, 130),
    "kill -9 of train": (_kill_trainer, 1),
    "kill -9 of the process server": (_kill(_process_server), 1),
    "kill -9 of the orchestrator": (_send(signal.SIGKILL), KILLED_SILENTLY),
    "disk full": (lambda run: None, 1),
}
"""By kind: what is done, and the exit code."""
TRAINER_LOST = {"kill -9 of train", "kill -9 of the process server", "kill -9 of the orchestrator", "disk full"}
"""The last checkpoint that was due is there; after all others, whatever was trained."""
TRAINED_TOO = re.compile(r"lot \d+ \([a-z, ]*\btrain\b[a-z, ]*pid \d+\) was killed")
"""Of a slot that has several roles by then."""
ONLY_RL = {"kill -9 of generate", "kill -9 of score", "kill -9 of a grader"}
KINDS = tuple(
    (kind, command) for kind in STRIKES for command in ("rl", "sft") if command == "rl" or kind not in ONLY_RL
)


def take_place(ending: Ending, folder: Path, model: Path, start: Any) -> str:
    """Returns a line that tells of it."""
    write = write_config if ending.command == "rl" else write_sft
    config = write(folder, model, max_steps=NEVER, interval=ending.interval)
    if ending.kind == "disk full":
        with small_disk(folder / "run", DISK_BYTES) as disk:
            return _end_and_go_on(ending, config, start, lambda: enlarge(disk, 256 << 20))
    return _end_and_go_on(ending, config, start, lambda: None)


def _end_and_go_on(ending: Ending, config: Path, start: Any, mend: Callable[[], None]) -> str:
    strike, code = STRIKES[ending.kind]
    life = start(config, *ending.flags, command=ending.command, terminal=ending.kind == "terminal lost")
    if ending.kind != "disk full":
        life.until_step(ending.step)
        assert ending.command != "rl" or life.graders(), "`Run.ends` looks for them, so they can be found"
        time.sleep(ending.delay_s)
    before = checkpointed_steps(life.folder)
    strike(life)
    ended = life.ends(ENDS_WITHIN_S)
    assert ended == (1 if ended == 1 and TRAINED_TOO.search(life.said()) else code), life.said()
    saved, trained = checkpointed_steps(life.folder), life.metrics()[-1]["step"]
    assert not before or before[-1] in saved or (len(saved) == KEPT and saved[0] > before[-1]), (before, saved)
    if ending.kind in TRAINER_LOST or TRAINED_TOO.search(life.said()):
        due = [step for step in range(1, trained) if step % ending.interval == 0]
        assert max(saved, default=0) >= max(due, default=0), (saved, trained, life.said())
    else:
        assert max(saved, default=0) == trained, (saved, trained, life.said())
    if ending.kind == "disk full":
        assert "No space left on device" in life.said()
        assert not list((life.folder / "state").glob("partial_*"))
    if code != KILLED_SILENTLY and ending.kind != "terminal lost":
        assert ("Go on with: " in life.said()) == bool(saved), life.said()
    mend()
    last = max(saved, default=0)
    again = start(config, "--resume", "--max-steps", str(last + 2), command=ending.command)
    assert again.ends(ENDS_WITHIN_S) == 0, again.said()
    first = 0 if ending.command == "rl" else 1
    assert [row["step"] for row in again.metrics()] == list(range(first, last + 3))
    assert max(checkpointed_steps(again.folder)) == last + 2
    return f"{ending}: trained {trained}, saved {last}"
