"""The scorers behind one call: `score` splits samples among the score slots and puts the log-probs back in order."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ductile.columns import Floats
from ductile.concurrency.deadline import said
from ductile.core.batch.packing import split_by_tokens
from ductile.core.instances.instances import Instance, InstanceId
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.requests.weight_offers import WeightOffers
from ductile.fleet.requests.worker_pool import MOST_LOST, WorkerPool
from ductile.messages.workers import Score, Scores
from ductile.records import Sample
from ductile.roles import Failure, Late, Refused, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.fanout import raise_worst
from ductile.transport.mailbox import Outcome

MOST_FAILURES = 3
"""Scorers that may be late or refuse in one call before it fails: then the fault is the samples'."""


class RemoteScorer(WorkerPool):
    """Follows `ductile.roles.Scorer`. Each instance holds a whole model, on one slot or in parts on several; samples
    are split by their tokens."""

    def __init__(
        self,
        slots: RoleSlots,
        instances: Iterable[Instance],
        deadlines: Deadlines,
        offers: WeightOffers | None = None,
    ) -> None:
        """slots, instances, offers: as `WorkerPool` has them."""
        super().__init__("score", slots, instances, deadlines, offers)
        self.scorer_seconds = 0.0
        """Seconds of all scorers together that they have been asked to score."""
        self._num_scoring: Counter[InstanceId] = Counter()
        """Calls of `score` that need the instance."""

    async def score(self, samples: Sequence[Sample], model: Literal["policy", "reference"]) -> list[Floats]:
        """Waits for a scorer while there is none. The scorers that it begins with stay until it has ended.

        What was under way at a scorer that is lost, late or refuses is scored by others, once all have replied; such a
        scorer comes back as a new one (`WorkerPool.leave_behind`). Raises Refused or Late when MOST_FAILURES of
        them have failed so, SlotLost when scorers were lost MOST_LOST times with the same samples, which may be what
        ends them, and Late when no scorer comes.
        """
        scores: dict[int, Floats] = {}
        num_lost = [0] * len(samples)
        failures = dict[Instance, Failure]()
        left, lost = list(range(len(samples))), set[Instance]()
        while left:
            scorers = await self.some(f"{len(left)} samples", lost)
            shares = zip(scorers, split_by_tokens([samples[index] for index in left], len(scorers)), strict=True)
            asked = {scorer: [left[part] for part in share] for scorer, share in shares if share}
            outcomes = await self._score(samples, asked, model)
            failed = {scorer: outcome for scorer, outcome in outcomes.items() if isinstance(outcome, Failure)}
            failures |= {scorer: failure for scorer, failure in failed.items() if not isinstance(failure, SlotLost)}
            if len(failures) >= MOST_FAILURES:
                raise_worst(failures)
            self.leave_behind(failed)
            for scorer, outcome in outcomes.items():
                if isinstance(outcome, Scores):
                    scores.update(zip(asked.pop(scorer), outcome.logprobs, strict=True))
            lost |= asked.keys()
            left = [index for share in asked.values() for index in share]
            for scorer, failure in failed.items():
                if isinstance(failure, SlotLost):
                    self._note_lost(asked[scorer], num_lost, failure)
        return [scores[index] for index in range(len(samples))]

    def _note_lost(self, share: Sequence[int], num_lost: list[int], failure: SlotLost) -> None:
        """Count a scorer that was lost with its share of the samples. Raises SlotLost where that was so too often."""
        for index in share:
            num_lost[index] += 1
        if any(num_lost[index] == MOST_LOST for index in share):
            why = f"{failure}; {MOST_LOST} scorers were lost while they had the same samples"
            raise SlotLost(why) from failure

    async def _score(
        self, samples: Sequence[Sample], asked: Mapping[Instance, Sequence[int]], model: Literal["policy", "reference"]
    ) -> dict[Instance, Scores | Failure]:
        """Return one outcome a scorer, once all have replied."""
        commands = {scorer: Score(tuple(samples[index] for index in share), model) for scorer, share in asked.items()}
        names = [scorer.id for scorer in commands]
        self._num_scoring.update(names)
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        try:
            outcomes = await self.ask_all(commands)
        finally:
            self.scorer_seconds += (now_s() - began_s) * len(commands)
            self._num_scoring.subtract(names)
            self._changed.notify_all()
        return {scorer: self._scores(scorer, outcome) for scorer, outcome in outcomes.items()}

    def _scores(self, scorer: Instance, outcome: Outcome) -> Scores | Failure:
        if isinstance(outcome, Scores | Failure):
            return outcome
        return Refused(f"{self.describe(scorer)} replied to Score with {type(outcome).__name__}")

    async def dismiss(self, instance: Instance) -> None:
        """Have the instance score no more, once it has done what it is doing. Raises Late, Refused or SlotLost."""
        self.drain(instance)
        try:
            await self._changed.wait_for(lambda: not self._num_scoring[instance.id], self._deadlines.patience_s)
        except TimeoutError:
            waited = said(self._deadlines.patience_s)
            raise Late(f"{self.describe(instance)} was still scoring after {waited}") from None
        await self.release(instance)
        del self._num_scoring[instance.id]
