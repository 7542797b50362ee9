"""Log of a policy's decisions: events with a sentence each.

`OrdersGiven`    orders, and why; with what the policy expects of them
`TrainingHeld`   training waits, or goes on again, or there is something to say; no slot changes roles for it
`OrdersDone`     a change is done, or what of it is not
`PolicyFailed`   the policy is not asked any more
"""

import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ductile.config.reading.command_line import as_sentence
from ductile.core.instances.instances import Instance, in_order
from ductile.core.scheduling.orders import Decision, sentence
from ductile.error_text import capitalised
from ductile.events.scheduling import OrdersDone, OrdersGiven, PolicyFailed, TrainingHeld
from ductile.observe import Recorder


@dataclass(frozen=True, slots=True)
class ExecutedDecision:
    """A decision as it was carried out."""

    at_s: float
    seconds: float
    decision: Decision
    failures: tuple[str, ...] = ()


class DecisionLog:
    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._training_held = False
        self._topic = ""
        """Topic of the last decision that had something to tell."""

    def decided(self, decision: Decision, at_s: float) -> None:
        """A decision without orders is told of when training begins or ceases to wait, or about another topic."""
        pauses, began = decision.hold_training, decision.hold_training != self._training_held
        topic = decision.topic or decision.reason
        if decision.orders:
            expected, why = decision.prediction, as_sentence(capitalised(decision.reason))
            costs = (expected.cost_s, expected.gain_s) if expected else ()
            self._record.event(OrdersGiven(round(at_s, 3), *costs, sentence=why))
        elif began or (decision.reason and topic != self._topic):
            said = decision.reason or ("training waits" if pauses else "training goes on")
            self._record.event(TrainingHeld(round(at_s, 3), pauses, sentence=as_sentence(capitalised(said))))
        self._training_held = pauses
        if decision.orders or decision.reason or began:
            self._topic = topic

    def dropped(self, decision: Decision, gone: Collection[int], at_s: float) -> None:
        """The decision is not carried out: these slots were lost while it was made."""
        lost = ", ".join(map(str, sorted(gone)))
        why = f"Not carried out, as slot {lost} was lost meanwhile: {decision.reason or sentence(decision.moves)}"
        self._record.event(TrainingHeld(round(at_s, 3), decision.hold_training, sentence=as_sentence(why)))

    def changed(self, change: ExecutedDecision, before: Sequence[Instance], after: Sequence[Instance]) -> None:
        """A change is at its end. before, after: the instances that were and are there."""
        what = sentence(change.decision.moves or change.decision.migrations)
        said = f"Done in {change.seconds:.2f} s: {what}."
        if change.failures:
            said = f"Not all was done of {what}: {'; '.join(change.failures)}."
        switched = OrdersDone(
            at_s=round(change.at_s, 3),
            seconds=round(change.seconds, 4),
            slots=tuple(sorted({move.slot for move in change.decision.moves})),
            num_migrations=len(change.decision.migrations),
            failures=change.failures,
            began=in_order({*after}.difference(before)),
            ended=tuple(each.id for each in in_order({*before}.difference(after))),
            sentence=said,
        )
        self._record.event(switched)

    def refused(self, error: Exception) -> str:
        """Write down that the policy is not asked any more; call it while `error` is handled. Returns the sentence."""
        why = as_sentence(str(error))
        said = f"The policy is not asked any more, and the slots go back to what the configuration gave them: {why}"
        self._record.event(PolicyFailed(traceback=traceback.format_exc(), sentence=said))
        return said
