"""The scorers behind one call: `score` splits samples among the score slots and puts the log-probs back in order."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from ductile.columns import Floats
from ductile.concurrency.deadline import said
from ductile.core.batch.packing import split_by_tokens
from ductile.core.instances.instances import Instance, InstanceId
from ductile.fleet.leases import WeightLeases
from ductile.fleet.worker_pool import WorkerPool
from ductile.messages.workers import Score, Scores
from ductile.records import Sample
from ductile.roles import Late, SlotLost
from ductile.transport.deadlines import Deadlines
from ductile.transport.fanout import replies_of
from ductile.transport.mailbox import Mailbox


class RemoteScorer(WorkerPool):
    """Follows `ductile.roles.Scorer`. Each instance holds a whole model; samples are split by their tokens."""

    def __init__(
        self,
        mailbox: Mailbox,
        instances: Iterable[Instance],
        deadlines: Deadlines,
        leases: WeightLeases | None = None,
        condemn: Callable[[int, str], None] | None = None,
    ) -> None:
        """leases, condemn: as `WorkerPool` has them."""
        super().__init__(mailbox, "score", instances, deadlines, leases, condemn=condemn)
        self.scorer_seconds = 0.0
        """Seconds of all scorers together that they have been asked to score."""
        self._num_scoring: Counter[InstanceId] = Counter()
        """Calls of `score` that need the instance."""

    async def score(self, samples: Sequence[Sample], model: Literal["policy", "reference"]) -> list[Floats]:
        """Waits for a scorer while there is none. The scorers that it begins with stay until it has ended.

        What was under way at a scorer that is lost is scored by others. A failure is raised once all scorers have
        replied: Refused or Late.
        """
        scores: dict[int, Floats] = {}
        left, lost = list(range(len(samples))), set[Instance]()
        while left:
            scorers = await self.some(f"{len(left)} samples", lost)
            shares = zip(scorers, split_by_tokens([samples[index] for index in left], len(scorers)), strict=True)
            asked = {scorer: [left[part] for part in share] for scorer, share in shares if share}
            for scorer, logprobs in (await self._score(samples, asked, model)).items():
                scores.update(zip(asked.pop(scorer), logprobs, strict=True))
            lost |= asked.keys()
            left = [index for share in asked.values() for index in share]
        return [scores[index] for index in range(len(samples))]

    async def _score(
        self, samples: Sequence[Sample], asked: Mapping[Instance, Sequence[int]], model: Literal["policy", "reference"]
    ) -> dict[Instance, tuple[Floats, ...]]:
        """Log-probs by scorer, from all that are not lost. Raises Refused or Late."""
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
        there = {scorer: outcome for scorer, outcome in outcomes.items() if not isinstance(outcome, SlotLost)}
        replies = replies_of(self.describe, commands, there, Scores)
        return {scorer: reply.logprobs for scorer, reply in replies.items()}

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
