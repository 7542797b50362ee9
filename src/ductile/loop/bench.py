"""`--bench`: a few steps, the first one to warm up, and a table of the others.

`Bench` listens to a run as the live view does. The figures are the same that `metrics.jsonl` has; whole steps are
timed, with optimizer and publishing, and only real tokens are counted.
"""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.table import Table

from ductile.observe import Event, write_json

NUM_WARM_UP = 1
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Measured:
    step: int
    tokens_per_s: float
    step_s: float
    peak_bytes: float


class Bench:
    """A `ductile.observe.Listener`."""

    def __init__(self, peak_bytes: Callable[[], float]) -> None:
        """peak_bytes: the largest memory so far, of all slots together."""
        self._peak_bytes = peak_bytes
        self._rows: list[Measured] = []

    def on_event(self, event: Event) -> None:
        pass

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > NUM_WARM_UP:
            tokens_per_s = metrics["tokens"] / max(metrics["step_s"], 1e-9)
            self._rows.append(Measured(step, tokens_per_s, metrics["step_s"], self._peak_bytes()))

    def close(self) -> None:
        pass

    def figures(self) -> dict[str, Any]:
        """What `bench.output_json` holds. MFU is null on a CPU, which has no peak to compare with."""
        return {
            "mfu": None,
            "throughput": _spread([row.tokens_per_s for row in self._rows]),
            "step_time": _spread([row.step_s for row in self._rows]),
            "peak_memory": {"gib": max((row.peak_bytes for row in self._rows), default=0.0) / GIB},
            "steps": len(self._rows),
            "warm_up_steps": NUM_WARM_UP,
            "machine": {
                "system": platform.platform(),
                "processor": platform.machine(),
                "python": sys.version.split()[0],
            },
            "command": sys.argv,
        }

    def write(self, file: str | Path) -> None:
        write_json(Path(file), self.figures())

    def table(self) -> Table:
        table = Table(title="Benchmark", title_justify="left")
        for column in ("Step", "MFU", "Throughput", "Step Time", "Peak Memory"):
            table.add_column(column, justify="right")
        for row in self._rows:
            memory = f"{row.peak_bytes / GIB:.2f} GiB"
            table.add_row(str(row.step), "n/a", f"{row.tokens_per_s:,.0f} tokens/s", f"{row.step_s:.2f} s", memory)
        if self._rows:
            figures = self.figures()
            table.add_section()
            table.add_row(
                "Overall",
                "n/a",
                _show(figures["throughput"], ",.0f", "tokens/s"),
                _show(figures["step_time"], ".2f", "s"),
                f"{figures['peak_memory']['gib']:.2f} GiB",
            )
        return table


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}
    return {"mean": fmean(values), "std": pstdev(values), "min": min(values), "max": max(values)}


def _show(spread: Mapping[str, float], form: str, unit: str) -> str:
    mean, std, low, high = (format(spread[name], form) for name in ("mean", "std", "min", "max"))
    return f"{mean} ± {std} {unit} [{low}, {high}]"
