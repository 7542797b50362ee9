"""What a run writes down about itself, as it happens.

    events.jsonl    one line an event: a sentence for a person, fields for a program
    metrics.jsonl   one line a training step
    samples.jsonl   some rollouts of each step, with their rewards, for people to read
    decisions.jsonl one line a decision of the scheduler: what its policy was asked with, and what it decided
    summary.json    the run in a dozen numbers, written at its end

`Recorder` writes them; what watches a run (the live view, TensorBoard, W&B) is a `Listener` of it. The kernel has a
line as soon as it is written: after a kill -9 the files tell everything up to that moment.

Watching never ends a run: half a character is written as its escape, a listener that raises is not told again, and
what the disk has no room for waits in memory until it has.
"""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

import msgspec

from ductile.disk import named, write_whole
from ductile.error_text import error_text
from ductile.surrogates import ESCAPED, escaped

K = TypeVar("K", bound=str)


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", rename={"time_s": "time"}):
    """Something that has happened in a run. Each kind is a class in `ductile.events`, whose tag is the word for it in
    `events.jsonl`, and whose fields are those of the line."""

    sentence: str = ""
    """What happened, as a sentence for people; "" when there is nothing to say to them."""
    time_s: float = 0.0
    """Unix time, rounded to milliseconds; the recorder sets it."""

    def as_row(self) -> dict[str, Any]:
        """The event as a line has it."""
        kind = type(self).__struct_config__.tag
        return {"time": self.time_s, "kind": kind, "sentence": self.sentence, **self.as_fields()}

    def as_fields(self) -> dict[str, Any]:
        """What the line has for programs; a field that is None is left out."""
        fields = cast(dict[str, Any], msgspec.to_builtins(self, enc_hook=_builtin))
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The event of a line. Raises KeyError, TypeError or ValueError when something is missing or is another
        type's."""
        return msgspec.convert(row, cls)


class ListenerFailed(RunEvent, tag="listener_failed", frozen=True):
    """A listener raises and is told no more of the run."""

    traceback: str


class JournalUnwritable(RunEvent, tag="journal_unwritable", frozen=True):
    """A file of the run cannot be written and its lines wait in memory; only listeners are told."""


class Listener(Protocol):
    """Follows a run. It is called in the orchestrator's event loop and must return at once. One that raises is not
    called again. A listener overrides what it follows."""

    def on_event(self, event: RunEvent) -> None:
        """Something has happened."""

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, or the evaluation before the first one (step 0)."""

    def close(self, code: int) -> None:
        """The run is over. code: the command's exit code."""


class Recorder:
    """Writes these files in `folder` and tells the listeners. Files of an earlier life are continued."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.clock = clock
        self.listeners: list[Listener] = []
        self.last_step: int | None = None
        """The latest step whose metrics this process has recorded; None before the first."""
        folder.mkdir(parents=True, exist_ok=True)
        self._events = _Journal(folder / "events.jsonl", self._unwritable)
        self._metrics = _Journal(folder / "metrics.jsonl", self._unwritable)
        self._samples = _Journal(folder / "samples.jsonl", self._unwritable)
        self._decisions = _Journal(folder / "decisions.jsonl", self._unwritable)
        for journal in (self._events, self._metrics):
            journal.open()

    def event(self, event: RunEvent) -> None:
        time_s = round(self.clock(), 3)
        event = msgspec.structs.replace(event, time_s=time_s, sentence=escaped(event.sentence))
        self._events.append(event.as_row())
        self._tell(lambda listener: listener.on_event(event))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.last_step = step
        self._metrics.append({"step": step, "time": round(self.clock(), 3), **values})
        self._tell(lambda listener: listener.on_metrics(step, values))

    def add_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record further metrics of the latest step, which were due when its row was written, or its first ones.
        Listeners are told of all that the row has."""
        rows = self.rows()
        row = rows[-1] if rows and rows[-1]["step"] == step else {}
        self._metrics.rewind(step - 1)
        written = {name: value for name, value in row.items() if name not in ("step", "time") and value is not None}
        self.metrics(step, {**written, **values})

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self._samples.append({"step": step, **row})

    def decision(self, row: Mapping[str, Any]) -> None:
        """A policy has decided (`ductile.events.decisions`)."""
        self._decisions.append(row)

    def rewind(self, last_step: int) -> int:
        """Drop metrics and samples of steps after `last_step`, which a resume from there repeats, and the summary,
        which is of another end. Returns how many lines of metrics were dropped."""
        (self.folder / "summary.json").unlink(missing_ok=True)
        if self.last_step is not None:
            self.last_step = min(self.last_step, max(0, last_step))
        self._samples.rewind(last_step)
        return self._metrics.rewind(last_step)

    def rows(self) -> list[dict[str, Any]]:
        """Metrics of all steps, those of earlier lives too, whatever has become of the folder."""
        return self._metrics.rows()

    def is_lost(self) -> bool:
        """Return whether the folder has been removed or moved: its files are not those that are written."""
        return not (self._events.has_its_name() or self._metrics.has_its_name())

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write the summary, unless the folder is lost: what lies there now is no whole run, or another one's."""
        if not self.is_lost():
            write_json(self.folder / "summary.json", dict(values))

    def close(self, code: int = 0) -> None:
        """code: the command's exit code."""
        self._tell(lambda listener: listener.close(code))
        for journal in (self._events, self._metrics, self._samples, self._decisions):
            if lost := journal.close():
                with suppress(OSError):
                    print(f"ductile: {lost}", file=sys.stderr)

    def _tell(self, tell: Callable[[Listener], None]) -> None:
        for listener in list(self.listeners):
            try:
                tell(listener)
            except Exception as error:
                if listener in self.listeners:  # a listener may raise again while its failure is recorded
                    self.listeners.remove(listener)
                why = error_text(error)
                sentence = f"{type(listener).__name__} is not told of the run any more: {why}."
                self.event(ListenerFailed(sentence=sentence, traceback=traceback.format_exc()))

    def _unwritable(self, sentence: str) -> None:
        event = JournalUnwritable(sentence=sentence, time_s=self.clock())
        self._tell(lambda listener: listener.on_event(event))


class _Journal:
    """Lines at the end of a file, each whole or not there. The first line makes the file.

    While the disk is full they wait in memory: what is trained and not yet saved is worth more than its metrics.
    """

    def __init__(self, file: Path, on_error: Callable[[str], None]) -> None:
        """on_error: called with a sentence at the first write that fails, and again only after one has succeeded."""
        self._file, self._on_error = file, on_error
        self._stream: FileIO | None = None
        self._waiting = b""
        self._is_reported = False

    def open(self) -> FileIO:
        """Raises OSError when the file cannot be opened."""
        if self._stream is None:
            self._stream = self._file.open("a+b", buffering=0)
            if not _ends_whole(self._file):  # the next line must not be glued to one that a kill cut
                self._waiting = b"\n" + self._waiting
        return self._stream

    def append(self, value: Mapping[str, Any]) -> None:
        self._waiting += json_line(value).encode(errors=ESCAPED)
        self._write()

    def rows(self) -> list[dict[str, Any]]:
        """The lines' objects, with those that wait for room; also of a file that has been removed since."""
        descriptor = self.open().fileno()
        return _objects(os.pread(descriptor, os.fstat(descriptor).st_size, 0) + self._waiting)

    def has_its_name(self) -> bool:
        """Return whether the file that is open lies where it was opened."""
        try:
            return self._stream is None or os.path.samestat(os.fstat(self._stream.fileno()), self._file.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def rewind(self, last_step: int) -> int:
        """Drop the lines of steps after `last_step`. Returns how many were dropped."""
        rows = read_jsonl(self._file)
        kept = [row for row in rows if row["step"] <= last_step]
        self.close()
        if self._file.exists():
            write_whole(self._file, "".join(json_line(row) for row in kept))
            self.open()
        return len(rows) - len(kept)

    def close(self) -> str:
        """Close the file. Returns a sentence when lines are lost because the disk is still full, else ""."""
        if len(self._waiting) > 1:
            self._write()
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        if not self._is_reported:
            return ""
        num_lost = self._waiting.strip().count(b"\n") + 1
        lines = "line is" if num_lost == 1 else f"{num_lost} lines are"
        return f"{self._file} cannot be written, and its last {lines} lost"

    def _write(self) -> None:
        try:
            self._write_to(self.open())
        except OSError as error:
            if not self._is_reported:
                self._on_error(f"{named(error, self._file)}. Its lines wait in memory until it can be.")
            self._is_reported = True
        else:
            self._waiting, self._is_reported = b"", False

    def _write_to(self, stream: FileIO) -> None:
        end, written = stream.seek(0, os.SEEK_END), 0
        try:
            while written < len(self._waiting):  # a disk that is nearly full takes only a part
                written += stream.write(self._waiting[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(stream.fileno(), end)
            raise


@contextmanager
def timed(
    seconds: MutableMapping[K, float], phase: K, clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Adds what the block takes to the phase's seconds, also when the block raises."""
    start_s = clock()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + clock() - start_s


class Stopwatch:
    """Seconds by phase. Phases may overlap (the trainer works while the loop waits for groups), so they need not add
    up to the step's wall time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._began_s: dict[str, float] = {}
        self._started_s = clock()

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        return timed(self._seconds, phase, self._clock)

    def begin(self, phase: str) -> None:
        self._began_s[phase] = self._clock()

    def end(self, phase: str) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - self._began_s.pop(phase)

    def lap(self) -> tuple[float, dict[str, float]]:
        """(seconds since the last lap, seconds by phase in it); starts the next one."""
        now_s = self._clock()
        total_s, seconds = now_s - self._started_s, dict(self._seconds)
        self._started_s = now_s
        self._seconds.clear()  # the same dictionary: a phase that is under way now is the next lap's
        return total_s, seconds


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The file's objects. Lines that a kill, a full disk or a power cut left half written are left out."""
    return _objects(file.read_bytes()) if file.exists() else []


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all (`ductile.disk.write_whole`), with null for a number that is not
    finite."""
    write_whole(file, json.dumps(_finite(value), indent=2, sort_keys=False) + "\n")


def _objects(content: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    # Not splitlines(): a JSON string may hold U+2028 and its like, which are no line ends here.
    for line in content.split(b"\n"):
        with suppress(ValueError):  # half a line, or half a character (UnicodeDecodeError is a ValueError)
            row = cast(object, json.loads(line))
            if isinstance(row, dict):
                rows.append(cast(dict[str, Any], row))
    return rows


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, end - 1))
        return stream.read(1) in (b"", b"\n")


def json_line(value: Mapping[str, Any]) -> str:
    """The value as JSON, with null for a number that is not finite, and a line's end."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False) + "\n"
    except ValueError:  # looking for the number takes ten times as long, and most lines have none
        return json.dumps(_finite(value), ensure_ascii=False, default=str) + "\n"


def _builtin(value: object) -> object:
    """What msgspec takes for a value of a type that it does not know, such as numpy's float64, which is a float."""
    return float(value) if isinstance(value, float) else str(value)


def _plain(value: object) -> object:
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity; null says "no number" in every reader."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
