"""What a run's folder says about the run: everything that `ductile report` tells, as plain values.

`events.jsonl` and `metrics.jsonl` are enough; `config.toml` and `summary.json` add to it where they are there. A run
without profiles (`core.scheduling.facts.profile`) has no ownership timeline, and the report says so.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ductile.core.scheduling.facts.ledger import Activity, IdleCause, Span
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.events.resizes import ResizeRolledBack, TrainerResized
from ductile.events.run_state import InstanceSpan, RunState
from ductile.events.scheduling import OrdersDone, OrdersGiven, PolicyFailed
from ductile.observe import RunEvent, read_jsonl
from ductile.user_files import read_text

Row = Mapping[str, Any]

RESIZES = (TrainerResized, ResizeRolledBack)
DECISIONS = (OrdersGiven, OrdersDone, PolicyFailed)
NUM_SAMPLES = 64


class NoReport(Exception):
    """The folder tells nothing. The text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class ReportEvent:
    """An event: when, and its sentence."""

    after_s: float
    """Seconds since the slots had their roles, as the profiles count them; negative before they had them."""
    sentence: str


@dataclass(frozen=True, slots=True)
class RunReport:
    folder: str
    setting: Setting | None
    profiles: tuple[StepProfile, ...]
    metrics: tuple[Row, ...]
    """Metrics of each step; the first row may be step 0, the evaluation before training."""
    decisions: tuple[ReportEvent, ...]
    waits: tuple[ReportEvent, ...]
    """Events in which the policy had training wait, and those in which it let training go on."""
    num_waits: int
    resizes: tuple[ReportEvent, ...]
    others: tuple[ReportEvent, ...]
    instances: tuple[InstanceSpan, ...]
    """Generators and scorers in the order in which they began; none of a run whose events do not name them."""
    samples: tuple[Row, ...]
    """Rollouts of the last steps, with their rewards."""
    config: Row
    missing: tuple[str, ...]
    """Sentences about what cannot be told, and why."""

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for profile in self.profiles for span in profile.spans)

    @property
    def steps(self) -> tuple[Row, ...]:
        return tuple(row for row in self.metrics if row["step"] > 0)

    def seconds(self) -> dict[tuple[Activity, IdleCause | None], float]:
        """Slot-seconds by activity and cause, the most first."""
        spent: dict[tuple[Activity, IdleCause | None], float] = {}
        for span in self.spans:
            spent[span.activity, span.cause] = spent.get((span.activity, span.cause), 0.0) + span.seconds
        return dict(sorted(spent.items(), key=lambda item: -item[1]))

    @property
    def idle_share(self) -> float:
        """Share of the slot-seconds in the profiles that slots were idle, 0 to 1."""
        spent = self.seconds()
        total_s = sum(spent.values())
        idle_s = sum(seconds for (activity, _), seconds in spent.items() if activity == "idle")
        return idle_s / total_s if total_s else 0.0


def read_run_report(folder: Path) -> RunReport:
    """The report of a run since its last start or resume; its metrics are those of the whole run. Raises NoReport."""
    if not folder.is_dir():
        raise NoReport(f"there is no run {folder}: write the output_dir of one")
    rows = read_jsonl(folder / "events.jsonl")
    metrics = read_jsonl(folder / "metrics.jsonl")
    if not rows and not metrics:
        raise NoReport(f"{folder} holds no run that has begun: events.jsonl and metrics.jsonl are missing or empty")
    state, missing = RunState.of(rows), list[str]()
    if state.unreadable:
        missing.append(f"Who did what when: events.jsonl is of another version of ductile ({state.unreadable}).")
        state = RunState(
            began_s=state.began_s, unread_kinds=state.unread_kinds, waits=state.waits, sentences=state.sentences
        )
    elif not state.profiles:
        missing.append("Who did what when, and where the time went: this run wrote no profiles of its steps.")
    if state.unread_kinds:
        kinds = ", ".join(sorted(state.unread_kinds))
        missing.append(f"What some events have besides their sentences: another version of ductile wrote {kinds}.")

    def shown(events: Iterable[RunEvent]) -> tuple[ReportEvent, ...]:
        return tuple(ReportEvent(each.time_s - (state.began_s or 0.0), each.sentence) for each in events)

    config = folder / "config.toml"
    if not config.exists():
        missing.append("The configuration: there is no config.toml.")
    if not any(row["step"] > 0 for row in metrics):
        missing.append("Curves: no step is finished.")
    return RunReport(
        folder=str(folder),
        setting=state.setting,
        profiles=tuple(state.profiles),
        metrics=tuple(metrics),
        decisions=shown(each for each in state.sentences if isinstance(each, DECISIONS)),
        waits=shown(state.waits),
        num_waits=sum(each.waits for each in state.waits),
        resizes=shown(each for each in state.sentences if isinstance(each, RESIZES)),
        others=shown(each for each in state.sentences if not isinstance(each, DECISIONS + RESIZES)),
        instances=tuple(state.instances.values()),
        samples=tuple(read_jsonl(folder / "samples.jsonl")[-NUM_SAMPLES:]),
        config=tomllib.loads(read_text(config)) if config.exists() else {},
        missing=tuple(missing),
    )
