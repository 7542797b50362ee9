"""[trace]: what slots do in a few steps, operator by operator, for Perfetto or chrome://tracing."""

from collections.abc import Iterator
from typing import Annotated

from annotated_types import Ge
from pydantic import Field

from ductile.config.finding import Finding
from ductile.config.schema.section import FilePath, Section


class TraceConfig(Section):
    steps: list[Annotated[int, Ge(1)]] = Field(default=[2, 3], min_length=1)
    """Steps that are traced; those that follow each other without a break."""
    slots: list[Annotated[int, Ge(0)]] | None = None
    """Slots that are traced. Default: all."""
    dir: FilePath | None = None
    """Folder for the traces: one of each slot, and `trace.json`, which has them all, with steps, roles and resizes.
    Default: `trace` in the run's folder. Also written `trace_path`, in `trainer` or at the root."""


def trace_findings(trace: TraceConfig | None, has_bench: bool, last_step: int | None) -> Iterator[Finding]:
    """Findings for a trace that could not be made. last_step: of the run; None where its data say it."""
    if trace is None:
        return
    if has_bench:
        what = "cannot be with --bench, which traces a step of its own. Write --max-steps 4 instead of --bench"
        yield Finding(("trace", "bench"), what)
    elif last_step is not None and min(trace.steps) > last_step:
        what = f"must have a step of the run, whose last one is {last_step}. Write [{last_step}]"
        yield Finding(("trace.steps", "max_steps"), what)
