"""`--bench`: a few steps, the first ones to warm up, and a table of the others.

`Bench` listens to a run as the live view does. The figures are the same that `metrics.jsonl` has; whole steps are
timed, with optimizer and publishing, and only real tokens are counted. How fast devices are, and how much memory has
been used, the slots say when they are asked. The train slots trace one more step, which is not timed, for the share of
communication in it.
"""

import asyncio
import platform
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ductile import __version__
from ductile.config.schema.bench import BenchConfig
from ductile.core.layout.model.peak import Arithmetic
from ductile.host import cpu_name, memory_bytes, num_cores
from ductile.messages.workers import Surveyed, Traced
from ductile.observe import Listener, write_json
from ductile.orchestrator.commands.tracing import SlotTracer
from ductile.roles import Late, Refused, SlotLost

GIB = 1024**3

AskSlots = Callable[[Arithmetic | None], Awaitable[Mapping[int, Surveyed]]]
"""Asks each slot about its device; with an arithmetic, also how fast the device is at that."""
NO_SLOTS = "this command starts no slots: the server's devices and their memory are its own"
UNTRACED = "the run ended before the step that is traced"
PHASE = "seconds/"
"""Prefix of the names of metrics that are a phase's seconds."""
NOT_KNOWN = "how fast the train slots' devices are at best is not known"
NOT_TRAINED = "no step that was timed has trained anything"


@dataclass(slots=True)
class MeasuredStep:
    """One step of the benchmark, as it was measured."""

    step: int
    tokens_per_s: float
    step_s: float
    mfu: float | None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by phase; phases may overlap."""
    slots: Mapping[int, Surveyed] = field(default_factory=dict[int, Surveyed])
    """What each slot said of its peak memory after this step; empty where the slots have not replied."""

    @property
    def used_bytes(self) -> float | None:
        """Peak memory of all slots together; None where they have not replied."""
        return sum(slot.used_bytes for slot in self.slots.values()) if self.slots else None

    @property
    def shares(self) -> list[float]:
        """Share of each GPU's memory that was reserved at most; empty on CPUs."""
        known = [(slot.reserved_bytes, slot.total_bytes) for slot in self.slots.values()]
        return [reserved / total for reserved, total in known if reserved is not None and total]


class Bench(Listener):
    def __init__(self, asked: BenchConfig, config: Mapping[str, Any]) -> None:
        """config: the whole one, for the figures."""
        self._asked, self._config = asked, config
        self._ask: AskSlots | None = None
        """Asks the slots; None where there are none."""
        self._rows: list[MeasuredStep] = []
        self._asking: list[asyncio.Task[None]] = []
        self._at_best: Sequence[Surveyed] = ()
        self._tracer: SlotTracer | None = None
        self._trained_by: Callable[[], Sequence[int]] = tuple
        self._traced: Sequence[Traced] = ()

    async def begin(self, ask: AskSlots, arithmetic: Arithmetic) -> None:
        """Have every slot find out how fast its device is, before anything is at work. Raises what asking raises."""
        self._ask = ask
        self._at_best = list((await ask(arithmetic)).values())

    def trace(self, tracer: SlotTracer, train_slots: Callable[[], Sequence[int]]) -> None:
        """Have the train slots trace the step after the last one that is timed."""
        self._tracer, self._trained_by = tracer, train_slots

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._asked.warmup_steps < step <= self._asked.steps:
            self._rows.append(row := _measured(step, metrics))
            if self._ask is not None:
                self._asking.append(asyncio.get_running_loop().create_task(self._note_memory(row, self._ask)))
        if self._tracer is not None and step == self._asked.steps:
            self._tracer.begin(dict.fromkeys(self._trained_by(), ""))
        elif self._tracer is not None and step > self._asked.steps:
            self._tracer.end()

    async def wait_for_replies(self) -> None:
        """Wait until all slots have replied to what they were asked; each request has its deadline."""
        await asyncio.gather(*self._asking)
        if self._tracer is not None:
            self._traced = list((await self._tracer.replies()).values())

    def figures(self) -> dict[str, Any]:
        """What `bench.output_json` holds. What cannot be told is null, with the reason beside it."""
        return {
            "mfu": self._mfu(),
            "mfu_reason": None if self._mfu() else self._why_no_mfu(),
            "devices": self._devices(),
            "throughput": spread([row.tokens_per_s for row in self._rows]),
            "step_time": spread([row.step_s for row in self._rows]),
            "phases": self._phases(),
            "communication": self._communication(),
            "peak_memory": self._peak_memory(),
            "steps": len(self._rows),
            "warm_up_steps": self._asked.warmup_steps,
            **origin(self._config),
        }

    def table(self) -> Table:
        table = Table(title="Benchmark", title_justify="left", caption=self._caption(), caption_justify="left")
        for column in ("Step", "MFU", "Throughput", "Step Time", "Peak Memory"):
            table.add_column(column, justify="right")
        for row in self._rows:
            table.add_row(
                str(row.step),
                _percent(row.mfu),
                f"{row.tokens_per_s:,.0f} tokens/s",
                f"{row.step_s:.2f} s",
                _memory(row),
            )
        if self._rows:
            figures = self.figures()
            mfu = figures["mfu"]
            table.add_section()
            table.add_row(
                "Overall",
                shown({name: 100 * value for name, value in mfu.items()}, ".1f", "%") if mfu else "n/a",
                shown(figures["throughput"], ",.0f", "tokens/s"),
                shown(figures["step_time"], ".2f", "s"),
                _memory(self._largest()),
            )
        return table

    async def _note_memory(self, row: MeasuredStep, ask: AskSlots) -> None:
        try:
            row.slots = await ask(None)
        except (SlotLost, Refused, Late) as error:
            print(f"The memory of step {row.step} is not known: {error}.", file=sys.stderr)

    def _mfu(self) -> dict[str, float] | None:
        """Mean and spread of the steps' MFU; None without any. A step that trained nothing has none."""
        values = [row.mfu for row in self._rows if row.mfu is not None]
        return spread(values) if values else None

    def _why_no_mfu(self) -> str:
        if self._ask is None:
            return NO_SLOTS
        return NOT_TRAINED if any(slot.peak_flops_per_s for slot in self._at_best) else NOT_KNOWN

    def _phases(self) -> dict[str, dict[str, float]]:
        """Seconds of each phase in a step, the longest first; a step without the phase has 0 of it."""
        names = {name for row in self._rows for name, seconds in row.seconds.items() if seconds}
        found = {name: spread([row.seconds.get(name, 0.0) for row in self._rows]) for name in names}
        return dict(sorted(found.items(), key=lambda each: (-each[1]["mean"], each[0])))

    def _communication(self) -> dict[str, Any]:
        """Share of the traced step in which a train slot was in a collective, the mean of the slots."""
        if not self._traced:
            return {"share": None, "reason": NO_SLOTS if self._ask is None else UNTRACED}
        shares = [each.communication_s / max(each.seconds, 1e-9) for each in self._traced]
        return {"share": fmean(shares), "largest_slot_share": max(shares), "slots": len(shares)}

    def _devices(self) -> list[dict[str, Any]]:
        """One entry for all slots on devices of one kind; what was measured is their mean. One that has not said how
        fast it is has an entry of its own, without a figure."""
        kinds: dict[tuple[str, str | None], list[Surveyed]] = {}
        for slot in self._at_best:
            kinds.setdefault((slot.device_name, slot.peak_source), []).append(slot)
        found: list[dict[str, Any]] = []
        for (name, source), slots in kinds.items():
            peaks = [slot.peak_flops_per_s for slot in slots if slot.peak_flops_per_s is not None]
            mean = fmean(peaks) if peaks else None
            found.append({"name": name, "slots": len(slots), "peak_flops_per_s": mean, "source": source})
        return found

    def _largest(self) -> MeasuredStep:
        """The row with the most memory."""
        return max(self._rows, key=lambda row: row.used_bytes or 0.0)

    def _peak_memory(self) -> dict[str, Any]:
        slots = list(self._largest().slots.values()) if self._rows else []
        if not slots:
            return {"gib": None, "reason": NO_SLOTS if self._ask is None else "no slot has said it"}
        reserved = [slot.reserved_bytes for slot in slots if slot.reserved_bytes is not None]
        shares = self._largest().shares
        return {
            "gib": sum(slot.used_bytes for slot in slots) / GIB,
            "largest_slot_gib": max(slot.used_bytes for slot in slots) / GIB,
            "reserved_gib": sum(reserved) / GIB if reserved else None,
            "pct": 100 * max(shares) if shares else None,
            "of": "tensors on the slots' devices" if reserved else "resident memory of the slots' processes",
        }

    def _caption(self) -> str | None:
        """What stands behind MFU and memory, in a line each."""
        peaks = [
            f"{kind['name']} at {kind['peak_flops_per_s'] / 1e12:,.3g} TFLOP/s ({kind['source']})"
            for kind in self._devices()
            if kind["peak_flops_per_s"]
        ]
        memory, phases, shared = self._peak_memory(), self._phases(), self._communication()
        of = f"Memory: {memory['of']}, all together." if "of" in memory else f"No memory: {memory['reason']}."
        spent = ", ".join(f"{name} {found['mean']:.3g} s" for name, found in phases.items())
        said = [f"MFU: against {', '.join(peaks)}."] if peaks else []
        if self._rows:
            said += [of, f"Phases of a step, which may overlap: {spent}."] if spent else [of]
        if shared["share"] is not None:
            said.append(f"Communication: {_percent(shared['share'])} of a traced step, with waits for other slots.")
        return "\n".join(said)


def written(figures: Mapping[str, Any], table: Table, file: str | None) -> RenderableType:
    """What a benchmark prints at its end: its table, and where the figures are when they are to be written."""
    if file is None:
        return table
    write_json(Path(file), figures)
    return Group(table, f"The figures are in {Path(file)}.")


def origin(config: Mapping[str, Any]) -> dict[str, Any]:
    """Machine, versions, command and config that the figures come from."""
    machine = {
        "system": platform.platform(),
        "processor": cpu_name(),
        "cores": num_cores(),
        "memory_gib": memory_bytes() / GIB,
    }
    versions = {"ductile": __version__, "torch": _installed("torch"), "python": platform.python_version()}
    return {"machine": machine, "versions": versions, "command": sys.argv, "config": config}


def spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}
    return {"mean": fmean(values), "std": pstdev(values), "min": min(values), "max": max(values)}


def shown(found: Mapping[str, float], form: str, unit: str = "") -> str:
    """ "1,200 ± 30 tokens/s [1,150, 1,240]"."""
    mean, std, low, high = (format(found[name], form) for name in ("mean", "std", "min", "max"))
    return " ".join(filter(None, (mean, "±", std, unit, f"[{low}, {high}]")))


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"


def _memory(row: MeasuredStep) -> str:
    if row.used_bytes is None:
        return "n/a"
    share = f" ({100 * max(row.shares):.0f} %)" if row.shares else ""
    return f"{row.used_bytes / GIB:.2f} GiB{share}"


def _measured(step: int, metrics: Mapping[str, float]) -> MeasuredStep:
    seconds = {name.removeprefix(PHASE): value for name, value in metrics.items() if name.startswith(PHASE)}
    tokens_per_s = metrics["tokens"] / max(metrics["step_s"], 1e-9)
    return MeasuredStep(step, tokens_per_s, metrics["step_s"], metrics.get("mfu"), seconds)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
