"""A schedule of slots that are taken away and come back, as a file: which, when, and with how much notice.

    at_s,event,slots,notice_s          CSV, with these columns in any order
    120,preempt,2-3,30                 at 120 s slots 2 and 3 hear that they will be gone within 30 s
    300,return,2-3,                    at 300 s they are there again

    [[preemptions]]                    TOML, with the same keys
    at_s = 120
    event = "preempt"
    slots = "2-3"
    notice_s = 30

Seconds count from the moment at which the run's slots have their roles. Without `notice_s` a notice is one of 30 s.
"""

import csv
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from ductile.core.instances.placement import slots_of
from ductile.messages.control import Unfit
from ductile.orchestrator.control.run_commands import slot_list
from ductile.user_files import read_text

NOTICE_S = 30.0
EVENTS = ("preempt", "return")
KEYS = ("at_s", "event", "slots", "notice_s")


class BadSchedule(ValueError):
    """A file that is no schedule. The text names the file, the place and what to write instead."""


@dataclass(frozen=True, slots=True)
class Preemption:
    at_s: float
    event: Literal["preempt", "return"]
    slots: tuple[int, ...]
    notice_s: float = NOTICE_S
    """Seconds from the notice until the slots are gone; of a return it means nothing."""


def read_preemptions(file: Path, slots: Iterable[int]) -> tuple[Preemption, ...]:
    """Return the schedule in the order of time. slots: those of the run. Raises BadSchedule or OSError."""
    if file.suffix not in (".csv", ".toml"):
        raise BadSchedule(f"{file}: a schedule of preemptions is a .csv or a .toml file")
    rows = _csv_rows(file) if file.suffix == ".csv" else _toml_rows(file)
    schedule = sorted((_preemption(where, row) for where, row in rows), key=lambda each: each.at_s)
    if not schedule:
        raise BadSchedule(
            f"{file} has no preemptions: write lines such as 120,preempt,2-3,30 below at_s,event,slots,notice_s"
        )
    _check_order(file, schedule, frozenset(slots))
    return tuple(schedule)


def _csv_rows(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(read_text(file).splitlines(), skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or ()]
    if not {"at_s", "event", "slots"} <= {*names} or not {*names} <= {*KEYS}:
        raise BadSchedule(
            f"{file}: the first line names {', '.join(names) or 'nothing'}; write at_s,event,slots,notice_s"
        )
    rows = list[tuple[str, Mapping[str, Any]]]()
    for row in reader:
        own = {name: (value or "").strip() for name, value in zip(names, row.values(), strict=False)}
        rows.append((f"{file}, line {reader.line_num}", {name: value for name, value in own.items() if value}))
    return rows


def _toml_rows(file: Path) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        read = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise BadSchedule(f"{file} is no TOML: {error}") from error
    tables = read.get("preemptions")
    if not isinstance(tables, list) or read.keys() != {"preemptions"}:
        raise BadSchedule(f"{file} has the keys {', '.join(read) or 'none'}: write tables [[preemptions]]")
    return [(f"{file}, preemptions[{place}]", table) for place, table in enumerate(tables) if isinstance(table, dict)]


def _preemption(where: str, row: Mapping[str, Any]) -> Preemption:
    if strange := sorted({*row}.difference(KEYS)):
        raise BadSchedule(f"{where}: {strange[0]} is no key; write {', '.join(KEYS)}")
    event = row.get("event")
    if event not in EVENTS:
        raise BadSchedule(f"{where}: event = {event!r}; write preempt or return")
    try:
        slots = slot_list(str(row.get("slots", "")), "slots =")
    except Unfit as error:
        raise BadSchedule(f"{where}: {error}") from error
    at_s, notice_s = (
        _seconds(where, "at_s", row.get("at_s")),
        _seconds(where, "notice_s", row.get("notice_s", NOTICE_S)),
    )
    return Preemption(at_s, "preempt" if event == "preempt" else "return", slots, notice_s)


def _seconds(where: str, key: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not (isfinite(seconds) and seconds >= 0):
        raise BadSchedule(f"{where}: {key} = {value!r}; write seconds, 0 or more")
    return seconds


def _check_order(file: Path, schedule: Sequence[Preemption], slots: frozenset[int]) -> None:
    """Raise BadSchedule where slots are taken away that are gone, or come back that are not."""
    gone_at_s: dict[int, float] = {}
    for each in schedule:
        at = f"{file}: at {each.at_s:g} s"
        if strange := sorted({*each.slots} - slots):
            raise BadSchedule(f"{at}: the run has no {slots_of(strange)}; it has {slots_of(slots)}")
        for slot in each.slots:
            if each.event == "preempt":
                if slot in gone_at_s:
                    raise BadSchedule(f"{at}: slot {slot} is gone already; have it return before")
                gone_at_s[slot] = each.at_s + each.notice_s
            elif (when_s := gone_at_s.pop(slot, None)) is None or when_s > each.at_s:
                since = "is not gone" if when_s is None else f"is gone only at {when_s:g} s"
                raise BadSchedule(f"{at}: slot {slot} {since}; have it return later")
