"""`--trace`: which slots trace what they do, and when."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ductile.config.schema.trace import TraceConfig
from ductile.dashboard.chrome_trace import write_trace
from ductile.messages.workers import BeginTrace, Command, EndTrace, Reply, Traced
from ductile.observe import Listener, read_jsonl
from ductile.roles import Failure
from ductile.transport.mailbox import Died, Mailbox, SlotEvent


class SlotTracer:
    """Has slots trace what they do.

    `begin` and `end` return at once, and each slot gets their commands before whatever is sent to it later. A trace
    that fails is told of on stderr, and is no failure of the run.
    """

    def __init__(self, mailbox: Mailbox, timeout_s: float) -> None:
        """timeout_s: how long a slot has to reply; it may be in the middle of a long command."""
        self._mailbox, self._timeout_s = mailbox, timeout_s
        self._tracing: set[int] = set()
        self._begun: list[asyncio.Task[Reply | None]] = []
        self._ended: dict[int, asyncio.Task[Reply | None]] = {}
        mailbox.subscribe(self._on_event)

    def begin(self, files: Mapping[int, str]) -> list[int]:
        """Begin a trace on each of these slots that has none under way, and return which these are. files: as in
        `BeginTrace`, by slot."""
        slots = [slot for slot in files if slot not in self._tracing and slot not in self._mailbox.lost]
        self._begun += [self._ask(slot, BeginTrace(files[slot])) for slot in slots]
        self._tracing.update(slots)
        return slots

    def end(self) -> None:
        """End all traces that are under way."""
        self._ended |= {slot: self._ask(slot, EndTrace()) for slot in self._tracing}
        self._tracing = set()

    async def replies(self) -> dict[int, Traced]:
        """Wait for all slots, and return what they said of their latest traces."""
        await asyncio.gather(*self._begun, *self._ended.values())
        replies = {slot: task.result() for slot, task in self._ended.items()}
        return {slot: reply for slot, reply in replies.items() if isinstance(reply, Traced)}

    def _ask(self, slot: int, command: Command) -> "asyncio.Task[Reply | None]":
        return asyncio.get_running_loop().create_task(self._reply(slot, command))

    async def _reply(self, slot: int, command: Command) -> Reply | None:
        try:
            return await self._mailbox.ask(slot, command, self._timeout_s)
        except Failure as error:
            print(f"Slot {slot} has no trace: {error}.", file=sys.stderr)
            return None

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if isinstance(event, Died):
            self._tracing.discard(slot)


class Tracing(Listener):
    """Follows a run's steps: a trace begins on every chosen slot before a chosen step, and ends after the last of those
    that follow each other. A slot that comes in the middle is traced from the next of them on."""

    def __init__(self, config: TraceConfig, folder: Path) -> None:
        """folder: the run's."""
        self._steps, self._slots, self._run = frozenset(config.steps), config.slots, folder
        self._folder = Path(config.dir) if config.dir else folder / "trace"
        self._began_s = time.time()
        self._files: dict[Path, int] = {}
        """Traces that slots were asked for, and their slots."""
        self._tracer: SlotTracer | None = None
        self._all_slots: Callable[[], Sequence[int]] = tuple

    def begin(self, tracer: SlotTracer, slots: Callable[[], Sequence[int]], step: int) -> None:
        """The slots have their roles. slots: returns those that there are. step: the last one that is done."""
        self._tracer, self._all_slots = tracer, slots
        self._after(step)

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._after(step)

    async def wait_for_replies(self) -> None:
        """Wait until the slots have written their traces; each request has its deadline."""
        if self._tracer is not None:
            self._tracer.end()
            await self._tracer.replies()

    def close(self, code: int) -> None:
        """Write the whole trace. Of an earlier life of the run nothing is in it."""
        if not self._files:
            print("There is no trace: the run ended before the first step of trace.steps.", file=sys.stderr)
            return
        rows = [read_jsonl(self._run / name) for name in ("events.jsonl", "metrics.jsonl")]
        events, metrics = ([row for row in of_run if row["time"] >= self._began_s] for of_run in rows)
        file = self._folder / "trace.json"
        for sentence in write_trace(file, events, metrics, self._files):
            print(f"In the trace, {sentence}.", file=sys.stderr)
        print(f"The trace is in {file}: open it in https://ui.perfetto.dev.")

    def _after(self, step: int) -> None:
        if self._tracer is None:
            return
        if step + 1 not in self._steps:
            self._tracer.end()
            return
        chosen = [slot for slot in self._all_slots() if self._slots is None or slot in self._slots]
        files = {slot: self._folder / f"slot_{slot}_step_{step + 1}.json" for slot in chosen}
        for slot in self._tracer.begin({slot: str(file) for slot, file in files.items()}):
            files[slot].unlink(missing_ok=True)  # of an earlier run, which is not to be taken for this one
            self._files[files[slot]] = slot
