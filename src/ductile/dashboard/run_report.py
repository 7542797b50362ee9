"""What a run's folder says about the run: everything that `ductile report` tells, as plain values.

`events.jsonl` and `metrics.jsonl` are enough; `config.toml` and `summary.json` add to it where they are there. A run
without profiles (`core.cluster.profile`) has no ownership timeline, and the report says so.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ductile.core.cluster.instances import Instance, instances_from
from ductile.core.cluster.ledger import Activity, IdleCause, Span
from ductile.core.cluster.profile import Setting, StepProfile
from ductile.observe import read_jsonl

Row = Mapping[str, Any]

RESIZES = frozenset({"resized", "resize_rolled_back"})
DECISIONS = frozenset({"decided", "switched", "refused"})
WAITS = "held"
"""Kind of the events in which training begins to wait, or goes on: several a step."""
NUM_SAMPLES = 64


class NoReport(Exception):
    """The folder tells nothing. The text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class ReportEvent:
    """An event: when, and its sentence."""

    after_s: float
    """Seconds since the slots had their roles, as the profiles count them; negative before they had them."""
    sentence: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class InstanceSpan:
    """A generator or scorer, and when it was there. Seconds are those of the timeline."""

    instance: Instance
    began_s: float
    ended_s: float | None = None
    """Moment from which it was gone; None when it was there at the end."""


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
    starts = [place for place, row in enumerate(rows) if row["kind"] == "setting"]
    latest = rows[starts[-1] :] if starts else rows
    began_s = float(latest[0]["time"]) if latest else 0.0
    setting, profiles, instances, missing = _latest_run(latest, began_s)
    events = [
        ReportEvent(float(row["time"]) - began_s, str(row["sentence"]), str(row["kind"]))
        for row in rows
        if row["sentence"]
    ]
    config = folder / "config.toml"
    if not config.exists():
        missing.append("The configuration: there is no config.toml.")
    if not any(row["step"] > 0 for row in metrics):
        missing.append("Curves: no step is finished.")
    return RunReport(
        folder=str(folder),
        setting=setting,
        profiles=profiles,
        metrics=tuple(metrics),
        decisions=tuple(each for each in events if each.kind in DECISIONS),
        waits=tuple(each for each in events if each.kind == WAITS),
        num_waits=sum(bool(row.get("holds")) for row in rows if row["kind"] == WAITS),
        resizes=tuple(each for each in events if each.kind in RESIZES),
        others=tuple(each for each in events if each.kind not in DECISIONS | RESIZES | {WAITS}),
        instances=instances,
        samples=tuple(read_jsonl(folder / "samples.jsonl")[-NUM_SAMPLES:]),
        config=tomllib.loads(config.read_text()) if config.exists() else {},
        missing=tuple(missing),
    )


def _latest_run(
    latest: Sequence[Row], began_s: float
) -> tuple[Setting | None, tuple[StepProfile, ...], tuple[InstanceSpan, ...], list[str]]:
    settings = [row for row in latest if row["kind"] == "setting"]
    rows = [row for row in latest if row["kind"] == "profile"]
    try:
        setting = Setting.from_fields(settings[-1]) if settings else None
        profiles = tuple(StepProfile.from_fields(row) for row in rows)
        instances = tuple(_instances(setting, latest, began_s)) if setting else ()
    except (KeyError, TypeError, ValueError) as error:
        what = f"Who did what when: events.jsonl is of another version of ductile ({error!r})."
        return None, (), (), [what]
    missing: list[str] = []
    if not profiles:
        missing.append("Who did what when, and where the time went: this run wrote no profiles of its steps.")
    return setting, profiles, instances, missing


def _instances(setting: Setting, latest: Sequence[Row], began_s: float) -> Iterator[InstanceSpan]:
    if setting.version == 1 and any(row["kind"] == "switched" for row in latest):
        return  # its slots changed roles, and its events name no instances
    lives = {each.id: InstanceSpan(each, 0.0) for each in setting.instances}
    for row in latest:
        if row["kind"] not in ("switched", "slot_lost", "slot_restarted"):
            continue
        at_s = float(row["time"]) - began_s
        if row["kind"] != "slot_lost":
            lives |= {each.id: InstanceSpan(each, at_s) for each in instances_from(row["began"])}
        for name, known in lives.items():
            lost = row["kind"] == "slot_lost" and row["slot"] in known.instance.slots
            if known.ended_s is None and (lost or name in row.get("ended", ())):
                lives[name] = replace(known, ended_s=at_s)
    yield from lives.values()
