"""Optimizer steps that were thrown away, as their gradient was not finite: each is told, and only so many endured."""

from ductile.core.instances.placement import many
from ductile.events.steps import StepSkipped
from ductile.observe import Recorder
from ductile.records import StepReport
from ductile.roles import Failure


class Diverged(Failure):
    """Gradients are not finite any more. The text is a sentence."""

    code = "diverged"


class SkippedSteps:
    def __init__(self, limit: int | None, record: Recorder, table: str = "") -> None:
        """limit: how many in a row are one too many; None: the run never ends for it. table: where in the config the
        trainer's keys stand, "trainer." for `ductile rl`."""
        self._limit, self._record, self._table = limit, record, table
        self._in_a_row = 0

    def note(self, report: StepReport) -> None:
        """An optimizer step is done."""
        if not report.metrics.get("skipped"):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        sentence = (
            f"Optimizer step {report.step} was thrown away: its gradient is not finite (loss {report.loss:g}). The "
            "weights are those of before."
        )
        self._record.event(StepSkipped(report.step, self._in_a_row, sentence=sentence))

    def check(self) -> None:
        """Raises Diverged when the last steps were all thrown away."""
        if self._limit is not None and self._in_a_row >= self._limit:
            table = self._table
            raise Diverged(
                f"the gradients of the last {many(self._in_a_row, 'optimizer step')} were not finite "
                f"({table}optim.max_skipped_steps), so nothing is learned any more. A lower {table}optim.lr, or "
                f'{table}model.compute_dtype = "float32", may help'
            )
