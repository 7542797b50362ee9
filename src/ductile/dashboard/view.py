"""What a run looks like: a pure function from a `ViewState` to something that rich can print."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ductile.dashboard.printable import printable

BARS = "▁▂▃▄▅▆▇█"
TREND_WIDTH = 32
STYLES = {
    "train": "yellow", "generate": "green", "score": "cyan", "publish": "magenta", "switch": "red", "idle": "dim",
}  # fmt: skip
STATES = {"ready": "green", "suspect": "yellow", "draining": "dim"}


@dataclass(frozen=True, slots=True)
class SlotView:
    slot: int
    roles: tuple[str, ...]
    doing: str
    """An activity of `ductile.core.scheduling.facts.ledger`."""
    busy: float
    """Share of the time since the slot had its roles in which it was not idle, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ViewEvent:
    after_s: float
    sentence: str


@dataclass(frozen=True, slots=True)
class ViewState:
    title: str
    max_steps: int
    step: int = 0
    elapsed_s: float = 0.0
    rewards: tuple[float, ...] = ()
    """Mean reward of each step, oldest first. Empty in SFT, which shows `losses`."""
    lengths: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    eval_rewards: tuple[float, ...] = ()
    tokens_per_s_generate: float = 0.0
    tokens_per_s_train: float = 0.0
    off_policy_mean: float = 0.0
    slots: tuple[SlotView, ...] = ()
    servers: tuple[tuple[str, str], ...] = ()
    """Servers of the run's fleet, each with its state."""
    events: tuple[ViewEvent, ...] = ()


def render(state: ViewState) -> RenderableType:
    parts: list[RenderableType] = [_progress(state), _trends(state)]
    if state.slots:
        parts.append(_slots(state.slots))
    if state.servers:
        parts.append(_servers(state.servers))
    if state.events:
        parts.append(_events(state.events))
    return Panel(Group(*parts), title=state.title, title_align="left", border_style="dim")


def sparkline(values: Sequence[float], width: int = TREND_WIDTH) -> str:
    """A line of `width` bars at most. More values than that are averaged in equal parts, so that no step is left out.

    Example: `sparkline([0, 1, 2, 3])` is `▁▃▆█`. Equal values give a line at the bottom.
    """
    num_parts = min(width, len(values))
    parts = [values[i * len(values) // num_parts : (i + 1) * len(values) // num_parts] for i in range(num_parts)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] if span > 0 else BARS[0] for mean in means)


def duration(seconds: float) -> str:
    """`1:02:03`, `4:05`"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _progress(state: ViewState) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    left = ""
    if 0 < state.step < state.max_steps:
        left = f", about {duration(state.elapsed_s / state.step * (state.max_steps - state.step))} left"
    table.add_row(
        Text(f"step {state.step}/{state.max_steps}"),
        ProgressBar(total=state.max_steps, completed=state.step, width=TREND_WIDTH),
        Text(duration(state.elapsed_s) + left, style="dim"),
    )
    return table


def _trends(state: ViewState) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    rows: list[tuple[str, Sequence[float], str]] = [
        ("reward", state.rewards, ".3f"),
        ("held-out", state.eval_rewards, ".3f"),
        ("length", state.lengths, ".1f"),
        ("loss", state.losses, ".4f"),
    ]
    for name, values, form in rows:
        if values:
            first = f"from {values[0]:{form}}" if len(values) > 1 else ""
            trend = Text(sparkline(values), style="green" if name == "reward" else "")
            table.add_row(Text(name), Text(f"{values[-1]:{form}}", style="bold"), trend, Text(first, style="dim"))
    speeds = [
        f"{state.tokens_per_s_generate:,.0f} generated" if state.tokens_per_s_generate else "",
        f"{state.tokens_per_s_train:,.0f} trained" if state.tokens_per_s_train else "",
    ]
    if any(speeds):
        table.add_row(Text("tokens/s"), Text(""), Text(", ".join(filter(None, speeds))), Text(""))
    if state.rewards:
        table.add_row(Text("off-policy"), Text(""), Text(f"{state.off_policy_mean:.2f} versions"), Text(""))
    return table


def _slots(slots: Sequence[SlotView]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for slot in slots:
        table.add_row(
            Text(f"slot {slot.slot}", style="dim"),
            Text(", ".join(slot.roles)),
            Text(slot.doing, style=STYLES.get(slot.doing, "")),
            Text(f"{slot.busy:4.0%} busy", style="dim"),
        )
    return table


def _servers(servers: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for server, status in servers:
        table.add_row(Text("server", style="dim"), Text(server), Text(status, style=STATES.get(status, "red")))
    return table


def _events(events: Sequence[ViewEvent]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for event in events:
        table.add_row(Text(duration(event.after_s), style="dim"), Text(printable(event.sentence), overflow="fold"))
    return table
