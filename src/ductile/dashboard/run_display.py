"""The run on the user's terminal: a live view where there is one, else a line a step.

with show("ductile rl: runs/quickstart", max_steps=60, run=state) as view:
    record.listeners += [state, view]
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live

from ductile.core.scheduling.facts.ledger import SlotLedger
from ductile.dashboard.follower import Follower
from ductile.dashboard.printable import printable
from ductile.dashboard.view import render
from ductile.events.rollouts import GroupDropped, PromptDroppedTwice, PromptSkipped, RequestRestarted, RewardError
from ductile.events.run_state import RunState
from ductile.events.scheduling import TrainingHeld
from ductile.events.steps import NothingToLearn, StepSkipped
from ductile.observe import Listener, RunEvent

REFRESH_HZ = 2
OFTEN = (
    GroupDropped,
    PromptDroppedTwice,
    StepSkipped,
    RewardError,
    PromptSkipped,
    RequestRestarted,
    NothingToLearn,
    TrainingHeld,
)
"""Events that may come in hundreds: the first of each kind is printed, all are in events.jsonl."""


class RunDisplay(Listener, Protocol):
    def on_slot(self, roles: Sequence[str], account: SlotLedger) -> None:
        """What a slot does from now on, and what it has done since it had its roles. Cheap enough for every command and
        heartbeat."""


@contextmanager
def show(title: str, max_steps: int, run: RunState, stream: TextIO | None = None) -> Iterator[RunDisplay]:
    """The last view stays on the screen. run: follows the same run as the display."""
    out = stream or sys.stdout
    if not out.isatty():
        yield Lines(max_steps, out)
        return
    follower = Follower(title, max_steps, run, time.monotonic, time.time())
    live = Live(
        console=Console(file=out),
        get_renderable=lambda: render(follower.state),
        refresh_per_second=REFRESH_HZ,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    live.start()
    try:
        yield follower
    finally:
        with suppress(OSError):  # the terminal may be gone, and the run goes on to save its step
            live.stop()


class Lines(RunDisplay):
    """One plain line a step, and the events in their sentences."""

    def __init__(self, max_steps: int, stream: TextIO) -> None:
        self._max_steps, self._stream = max_steps, stream
        self._shown: set[type[RunEvent]] = set()

    def on_event(self, event: RunEvent) -> None:
        if not event.sentence:
            return  # it is for programs
        if isinstance(event, OFTEN):
            if type(event) in self._shown:
                return
            self._shown.add(type(event))
            self._print(f"{event.sentence} (Further ones like this are in events.jsonl.)")
        else:
            self._print(event.sentence)

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > 0:
            self._print(step_line(step, self._max_steps, metrics))

    def _print(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)


PARTS = (
    ("reward_mean", "reward {:.3f}"),
    ("reward_error_share", "{:.0%} of rewards failed"),
    ("eval_reward", "held-out {:.3f}"),
    ("eval_reward_error_share", "{:.0%} of held-out rewards failed"),
    ("length_mean", "length {:.1f}"),
    ("loss", "loss {:.4f}"),
    ("grad_norm", "grad norm {:.3f}"),
    ("off_policy_mean", "off-policy {:.2f}"),
    ("tokens_per_s_generate", "{:,.0f} tokens/s generated"),
    ("tokens_per_s_train", "{:,.0f} tokens/s trained"),
    ("step_s", "{:.1f} s"),
)

TROUBLE = frozenset({"reward_error_share", "eval_reward_error_share"})
"""Metrics that a line has only where they are not 0."""

FAILED = {"timeout": "timed out", "lost": "lost their process", "raised": "raised", "wrong": "returned no number"}
"""Kinds of failure that make up `reward_error_share`, each with its words."""


def step_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """`step 12/60  reward 0.531  length 23.1  loss 0.0123  ...`: what the row has, always in this order."""
    parts = [
        form.format(metrics[name]) + (_how_failed(metrics) if name == "reward_error_share" else "")
        for name, form in PARTS
        if name in metrics and (metrics[name] or name not in TROUBLE)
    ]
    if "train_slots" in metrics and "loss" not in metrics:
        parts.append("nothing learned: all rewards of each group are equal")
    return "  ".join([f"step {step:>{len(str(max_steps))}}/{max_steps}", *parts])


def _how_failed(metrics: Mapping[str, float]) -> str:
    """` (3% timed out, 1% raised)`."""
    shares = {said: metrics.get(f"reward_error_share/{how}", 0.0) for how, said in FAILED.items()}
    parts = [f"{share:.0%} {said}" for said, share in shares.items() if share]
    return f" ({', '.join(parts)})" if parts else ""
