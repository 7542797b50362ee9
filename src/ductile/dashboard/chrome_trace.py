"""A run as one trace for Perfetto or chrome://tracing: what its slots traced operator by operator, and beside that, on
the same clock, their roles, what they did, the steps and the trainer's resizes.

    process `slot 0`     roles, activity, then the threads and GPU streams of the slot's own trace
    process `run`        steps, resizes, other events as they were told

Each slot's trace has a clock of its own; its first event says what the time was (`CLOCK_EVENT`). Slots that were killed
have no trace, and all the rest.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ductile.core.instances.placement import Role
from ductile.dashboard.causes import said
from ductile.disk import write_whole
from ductile.events.lines import read_event
from ductile.events.resizes import ResizeRolledBack, TrainerResized
from ductile.events.run_state import RunState
from ductile.events.scheduling import OrdersDone
from ductile.events.slots import SlotRestarted, SlotStarted, SlotWasLost
from ductile.events.steps import WorkBegan
from ductile.messages.workers import CLOCK_EVENT
from ductile.observe import RunEvent

Row = Mapping[str, Any]
RUN = 1 << 20
"""Process number of the run; a slot's is its own number."""
LANES: dict[str, int] = {"train": 1 << 30, "generate": (1 << 30) + 1, "score": (1 << 30) + 2, "activity": (1 << 30) + 3}
STEPS, RESIZES, EVENTS = 1, 2, 3
"""Thread numbers; the kernel's and a GPU's streams have smaller ones than `LANES`. Slices of a thread may not overlap,
and a slot may have several roles."""
NAMES = {"thread_name", "thread_sort_index"}
"""Events about names that are kept of a slot's trace: its processes are one here."""


def write_trace(file: Path, events: Iterable[Row], metrics: Sequence[Row], slot_files: Mapping[Path, int]) -> list[str]:
    """Write the trace of a run. Returns a sentence for each slot's trace that is missing or cannot be read.

    events, metrics: rows of `events.jsonl` and `metrics.jsonl`. slot_files: the slots' traces, each with its slot.
    """
    run = [read_event(row) for row in events]
    base_s = min((event.time_s for event in run), default=0.0)
    found, missing = run_slices(run, metrics), list[str]()
    for path, slot in slot_files.items():
        try:
            found += slot_events(json.loads(path.read_bytes())["traceEvents"], slot)
        except (OSError, ValueError, KeyError) as error:
            missing.append(f"slot {slot} has no trace in {path.name} ({type(error).__name__})")
    for event in found:
        if "ts" in event:
            event["ts"] = round(event["ts"] - 1e6 * base_s, 3)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps({"traceEvents": found, "baseTimeNanoseconds": int(1e9 * base_s)}))
    return missing


def slot_events(events: Iterable[Row], slot: int) -> list[dict[str, Any]]:
    """Return the events of a slot's trace on the run's clock, in microseconds of Unix time, as those of one process.
    Raises ValueError where it does not say what the time was."""
    events = list(events)
    clock = next((event for event in events if str(event.get("name")).startswith(CLOCK_EVENT)), None)
    if clock is None:
        raise ValueError("it does not say what the time was")
    ahead_us = int(clock["name"].removeprefix(CLOCK_EVENT)) / 1e3 - clock["ts"]
    found: list[dict[str, Any]] = []
    for event in events:
        # torch draws the whole trace as processes with names.
        if not isinstance(event.get("pid"), int) or (event["ph"] == "M" and event["name"] not in NAMES):
            continue
        moved = {**event, "pid": slot}
        if "ts" in event:
            moved["ts"] = event["ts"] + ahead_us
        if "id" in event:  # arrows go from slot to slot where two have the same
            moved["id"] = f"{slot}/{event['id']}"
        found.append(moved)
    return found


def run_slices(events: Sequence[RunEvent], metrics: Iterable[Row]) -> list[dict[str, Any]]:
    """Return what the run has told of itself, in microseconds of Unix time."""
    state, found = RunState(), list[dict[str, Any]]()
    for event in events:
        state.apply(event)
    end_s = max([event.time_s for event in events] + [row["time"] for row in metrics], default=0.0)
    held = list(roles_held(events, end_s))
    for slot in sorted({slot for slot, _, _, _ in held}):
        found += _process(slot, f"slot {slot}", {tid: lane for lane, tid in LANES.items()})
    found += _process(RUN, "run", {STEPS: "steps", RESIZES: "resizes", EVENTS: "events"})
    found += [_slice(slot, LANES[role], role, start_s, stop_s) for slot, role, start_s, stop_s in held]
    began_s = state.began_s or 0.0
    for span in (span for profile in state.profiles for span in profile.spans):
        what = said(span.activity, span.cause)
        found.append(_slice(span.slot, LANES["activity"], what, began_s + span.start_s, began_s + span.end_s))
    for row in metrics:
        if step_s := row.get("step_s"):
            found.append(_slice(RUN, STEPS, f"step {row['step']}", row["time"] - step_s, row["time"]))
    for event in state.resizes:
        name = "resize" if isinstance(event, TrainerResized) else "resize, rolled back"
        about = {"before": event.before, "after": event.after, "pause_s": event.pause_s, "seconds": event.seconds}
        found.append(_slice(RUN, RESIZES, name, event.time_s - (event.took_s or 0.0), event.time_s, **about))
    for event in state.sentences:
        if not isinstance(event, TrainerResized | ResizeRolledBack):
            mark = {"ph": "i", "s": "p", "pid": RUN, "tid": EVENTS, "name": event.sentence, "ts": 1e6 * event.time_s}
            found.append(mark)
    return found


def roles_held(events: Iterable[RunEvent], end_s: float) -> Iterator[tuple[int, Role, float, float]]:
    """Yield which slot held which role, from when to when. end_s: until when the roles of the end were held."""
    held: dict[tuple[int, Role], float] = {}
    instances: dict[str, tuple[Role, tuple[int, ...]]] = {}

    def assign(slots: Iterable[int], roles: Iterable[Role], now_s: float) -> None:
        for slot in slots:
            for role in roles:
                held.setdefault((slot, role), now_s)

    for event in events:
        left: set[tuple[int, Role]] = set()
        match event:
            case SlotStarted(slot=slot, roles=roles) | SlotRestarted(slot=slot, roles=roles):
                assign([slot], roles, event.time_s)
            case TrainerResized(after=after):
                left = {(slot, role) for slot, role in held if role == "train" and slot not in after}
                assign(after, ["train"], event.time_s)
            case SlotWasLost(slot=lost):
                left = {(slot, role) for slot, role in held if slot == lost}
            case WorkBegan(setting=setting):
                instances = {each.id: (each.role, each.slots) for each in setting.instances}
            case OrdersDone(began=began, ended=ended):
                for role, slots in (instances.pop(name) for name in ended if name in instances):
                    left |= {(slot, role) for slot in slots}
                for each in began or ():
                    instances[each.id] = (each.role, each.slots)
                    assign(each.slots, [each.role], event.time_s)
            case _:
                pass
        for slot, role in sorted(left & held.keys()):
            yield slot, role, held.pop((slot, role)), event.time_s
    for (slot, role), start_s in held.items():
        yield slot, role, start_s, end_s


def _slice(pid: int, tid: int, name: str, start_s: float, end_s: float, **about: object) -> dict[str, Any]:
    times = {"ts": 1e6 * start_s, "dur": round(1e6 * (end_s - start_s), 3)}
    return {"ph": "X", "cat": "ductile", "pid": pid, "tid": tid, "name": name, **times, "args": about}


def _process(pid: int, name: str, threads: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    def named(kind: str, tid: int, **value: object) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": value}

    yield named("process_name", 0, name=name)
    yield named("process_sort_index", 0, sort_index=-1 if pid == RUN else pid)
    for place, (tid, thread) in enumerate(threads.items()):
        yield named("thread_name", tid, name=thread)
        yield named("thread_sort_index", tid, sort_index=place - len(threads))
