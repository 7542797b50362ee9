"""What a run writes down about itself, as it happens.

    events.jsonl    one line an event: a sentence for a person, fields for a program
    metrics.jsonl   one line a training step
    summary.json    the run in a dozen numbers, written at its end

`Recorder` writes them; whoever wants to watch (the live view, TensorBoard, W&B) is a `Listener` of it. A line is
flushed when it is written: after a kill -9 the files tell everything up to that moment.

Watching never ends a run: half a character is written as its escape, a listener that raises is not told again, and
an event that the disk has no room for is left out.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

HALF_CHARACTERS = "backslashreplace"
"""How a lone surrogate is written: half an emoji, which a policy may sample. In a JSON string this is its escape."""


@dataclass(frozen=True, slots=True)
class Event:
    time_s: float
    """Unix time."""
    kind: str
    """For programs: "saved", "slot_lost", "group_dropped"."""
    sentence: str
    """For people; "" when there is nothing to say to them."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Listener(Protocol):
    """Follows a run. Called in the orchestrator's event loop: must return at once. One that raises is told no more."""

    def on_event(self, event: Event) -> None: ...

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Writes the three files in `folder` and tells the listeners. Files of an earlier life are continued."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        self.listeners: list[Listener] = []
        self.last_step: int | None = None
        """The latest step that was told of in this life."""
        self._complained = False
        folder.mkdir(parents=True, exist_ok=True)
        self._events = _open_to_append(folder / "events.jsonl")
        self._metrics = _open_to_append(folder / "metrics.jsonl")

    def event(self, kind: str, sentence: str, **fields: Any) -> None:
        event = Event(self.clock(), kind, _whole(sentence), fields)
        row = {"time": round(event.time_s, 3), "kind": kind, "sentence": event.sentence, **fields}
        try:
            _write_line(self._events, row)
        except OSError as error:  # the run has lost a line, and must not lose a step for it
            self._complain(f"events.jsonl cannot be written: {error.strerror}")
        self._tell(lambda listener: listener.on_event(event))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Raises OSError, with the file's name, when the row cannot be written: a run without its curve is none."""
        self.last_step = step
        try:
            _write_line(self._metrics, {"step": step, "time": round(self.clock(), 3), **values})
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._metrics.name) from error
        self._tell(lambda listener: listener.on_metrics(step, values))

    def rewind(self, last_step: int) -> int:
        """Drop the metrics of steps after `last_step`, which a resume from there repeats. Returns how many lines."""
        file = self.folder / "metrics.jsonl"
        rows = read_jsonl(file)
        kept = [row for row in rows if row["step"] <= last_step]
        self._metrics.close()
        write_text(file, "".join(_line(row) for row in kept))
        self._metrics = _open_to_append(file)
        return len(rows) - len(kept)

    def summary(self, values: Mapping[str, Any]) -> None:
        write_json(self.folder / "summary.json", dict(values))

    def close(self) -> None:
        self._tell(lambda listener: listener.close())
        for stream in (self._events, self._metrics):
            try:
                stream.close()
            except OSError as error:  # what a full disk did not take is still in its buffer
                self._complain(f"{stream.name} is not whole: {error.strerror}")

    def _tell(self, tell: Callable[[Listener], None]) -> None:
        for listener in list(self.listeners):
            try:
                tell(listener)
            except Exception as error:
                if listener in self.listeners:  # it may have failed again while this was told
                    self.listeners.remove(listener)
                why = f"{type(error).__name__}: {error}"
                sentence = f"{type(listener).__name__} is not told of the run any more: {why}."
                self.event("listener_failed", sentence, traceback=traceback.format_exc())

    def _complain(self, sentence: str) -> None:
        """Once, and on the terminal: the files are what there is to complain about."""
        if not self._complained:
            self._complained = True
            with suppress(OSError):
                print(f"ductile: {sentence}", file=sys.stderr)


class Stopwatch:
    """Seconds by phase. Phases may overlap (the trainer works while the loop waits for groups), so they need not add
    up to the step's wall time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._started_s = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start_s = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start_s

    def lap(self) -> tuple[float, dict[str, float]]:
        """(seconds since the last lap, seconds by phase in it); starts the next one."""
        now_s = self._clock()
        total_s, seconds = now_s - self._started_s, self._seconds
        self._started_s, self._seconds = now_s, {}
        return total_s, seconds


def described(error: BaseException) -> str:
    """The error in a line, with the place that raised it: "ZeroDivisionError: float division by zero (adv.py:12)"."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The file's objects. A last line that was cut off by a kill is left out."""
    rows: list[dict[str, Any]] = []
    # Not splitlines(): a JSON string may hold U+2028 and its like, which are no line ends here.
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def write_json(file: Path, value: Any) -> None:
    write_text(file, json.dumps(_finite(value), indent=2, sort_keys=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Atomic: a reader sees the old content or the new, also after a power cut."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8", errors=HALF_CHARACTERS) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def _open_to_append(file: Path) -> TextIO:
    stream = file.open("a+", encoding="utf-8", errors=HALF_CHARACTERS)
    end = stream.seek(0, os.SEEK_END)
    if end:
        # A kill may have cut the last line; the next one must not be glued to it.
        stream.seek(end - 1)
        if stream.read(1) != "\n":
            stream.write("\n")
    return stream


def _whole(text: str) -> str:
    """The text as any file and terminal can take it."""
    return text.encode(errors=HALF_CHARACTERS).decode()


def _write_line(stream: TextIO, value: Mapping[str, Any]) -> None:
    stream.write(_line(value))
    stream.flush()


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(_finite(value), ensure_ascii=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity; null says "no number" in every reader."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
