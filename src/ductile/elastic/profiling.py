"""Writes down what a run is like, for `ductile plan` and `ductile report`: once its setting, and a profile a step."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from ductile.core.scheduling.costs.cost_model import CostModel
from ductile.core.scheduling.facts.ledger import Span
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.elastic.activity import SlotActivity
from ductile.events.steps import StepProfiled, WorkBegan
from ductile.observe import Listener, Recorder
from ductile.records import Generation

SHORT_S = 0.005
"""A stretch that is shorter belongs to the one before it: there may be a thousand gaps between commands in a step."""


class Profiler(Listener):
    """Listens to the recorder that it writes to: a step has ended when its metrics come."""

    def __init__(
        self,
        record: Recorder,
        activity: SlotActivity,
        cost_model: CostModel,
        prompt_tokens: Callable[[], float],
        num_switches: Callable[[], int],
        scorer_seconds: Callable[[], float],
        num_updates: int,
        began_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """scorer_seconds: as `RemoteScorer` has them; 0 without scorers. num_updates: optimizer
        steps of a step. began_s: on `clock`, when the slots had their roles."""
        self._record, self._activity, self._cost_model = record, activity, cost_model
        self._prompt_tokens, self._num_switches = prompt_tokens, num_switches
        self._scorer_seconds, self._num_updates = scorer_seconds, num_updates
        self._began_s, self._clock = began_s, clock
        self._step_began_s = self._scored_s = 0.0
        self._reported_until_s: dict[int, float] = {}
        self._spans: dict[int, list[Span]] = {}
        self._lengths: list[int] = []
        self._switched = 0
        activity.on_span.add(self._on_span)

    def open(self, setting: Setting) -> None:
        self._record.event(WorkBegan(setting))

    def on_finished(self, generation: Generation) -> None:
        if not generation.id.startswith("eval/"):  # an evaluation's completions are no part of a step
            self._lengths.append(len(generation.token_ids))

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        now_s = self._clock()
        if step:
            self._note_phases(metrics)
            self._tell(step, now_s)

    def _note_phases(self, metrics: Mapping[str, float]) -> None:
        """Note the seconds that the loop's stopwatch has seen."""
        if "seconds/optim_step" in metrics:
            self._cost_model.took("optim", metrics["seconds/optim_step"] / self._num_updates)
        if "seconds/publish" in metrics:
            self._cost_model.took("publish", metrics["seconds/publish"])
        if "seconds/receive" in metrics:
            self._cost_model.took("receive", metrics["seconds/receive"])
        scorer_seconds = self._scorer_seconds()
        if scorer_seconds > self._scored_s:
            self._cost_model.scored(metrics["tokens"], scorer_seconds - self._scored_s)
            self._scored_s = scorer_seconds

    def _tell(self, step: int, now_s: float) -> None:
        for slot in self._activity.slots:
            account = self._activity.account(slot)
            self._on_span(Span(slot, account.since_s, now_s, account.activity, account.cause))
        spans = tuple(span for slot in sorted(self._spans) for span in self._spans[slot])
        end_s, num_switches = now_s - self._began_s, self._num_switches()
        profile = StepProfile(
            step=step,
            start_s=round(self._step_began_s, 4),
            end_s=round(end_s, 4),
            spans=spans,
            lengths=tuple(self._lengths),
            prompt_tokens=self._prompt_tokens(),
            speeds=self._cost_model.speeds(),
            costs=self._cost_model.costs(),
            num_switches=num_switches - self._switched,
        )
        self._step_began_s, self._switched = end_s, num_switches
        self._spans, self._lengths = {}, []
        self._record.event(StepProfiled(profile))

    def _on_span(self, span: Span) -> None:
        """Spans that are still open at a step's end are cut there: what was told of them is not told again."""
        start_s = max(span.start_s, self._reported_until_s.get(span.slot, self._began_s))
        if span.end_s <= start_s:
            return
        self._reported_until_s[span.slot] = span.end_s
        span = replace(span, start_s=start_s - self._began_s, end_s=span.end_s - self._began_s)
        spans = self._spans.setdefault(span.slot, [])
        if spans and (_alike(spans[-1], span) or span.seconds < SHORT_S):
            spans[-1] = replace(spans[-1], end_s=span.end_s)
        else:
            spans.append(span)


def _alike(one: Span, other: Span) -> bool:
    return (one.activity, one.cause) == (other.activity, other.cause)
