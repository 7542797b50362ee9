"""The scorers behind one call: `score` splits samples among the score slots and puts the log-probs back in order."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from ductile.core.batch.packing import split_by_tokens
from ductile.core.cluster.instances import Instance, InstanceId, slots_on
from ductile.records import Manifest, Sample
from ductile.roles import Late, SlotLost
from ductile.wire.change_signal import ChangeSignal
from ductile.wire.fanout import replies_of
from ductile.wire.leases import WeightLeases
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Score, Scores
from ductile.wire.worker_pool import WorkerPool, any_slot


class RemoteScorer:
    """Follows `ductile.roles.Scorer`. Each instance holds a whole model; samples are split by their tokens."""

    def __init__(
        self,
        mailbox: Mailbox,
        instances: Iterable[Instance],
        timeout_s: float,
        leases: WeightLeases | None = None,
        depends_on: Callable[[int], bool] = any_slot,
    ) -> None:
        """leases, depends_on: as `WorkerPool` has them."""
        self._timeout_s = timeout_s
        self._pool = WorkerPool(mailbox, "score", instances, timeout_s, leases, depends_on)
        self._num_scoring: Counter[InstanceId] = Counter()
        """Calls of `score` that need the instance."""
        self._changed = ChangeSignal()

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Instances that score."""
        return self._pool.instances

    @property
    def all_instances(self) -> tuple[Instance, ...]:
        """All instances, those that score not yet or no more among them."""
        return self._pool.all_instances

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that score."""
        return slots_on(self.instances)

    @property
    def num_waiting(self) -> int:
        """Calls of `score` that wait for a scorer."""
        return self._pool.num_waiting

    async def score(self, samples: Sequence[Sample], model: Literal["policy", "reference"]) -> list[tuple[float, ...]]:
        """Waits for a scorer while there is none. The scorers that it begins with stay until it has ended.

        What was under way at a scorer that is lost is scored by others, unless the run ends with it. A failure is
        raised once all scorers have replied: SlotLost, Refused or Late.
        """
        scores: dict[int, tuple[float, ...]] = {}
        left = list(range(len(samples)))
        while left:
            scorers = await self._pool.some(f"{len(left)} samples")
            shares = zip(scorers, split_by_tokens([samples[index] for index in left], len(scorers)), strict=True)
            asked = {scorer: [left[part] for part in share] for scorer, share in shares if share}
            for scorer, logprobs in (await self._score(samples, asked, model)).items():
                scores.update(zip(asked.pop(scorer), logprobs, strict=True))
            left = [index for share in asked.values() for index in share]
        return [scores[index] for index in range(len(samples))]

    async def _score(
        self, samples: Sequence[Sample], asked: Mapping[Instance, Sequence[int]], model: Literal["policy", "reference"]
    ) -> dict[Instance, tuple[tuple[float, ...], ...]]:
        """Log-probs by scorer, from all that are not lost. Raises SlotLost, Refused or Late."""
        commands = {scorer: Score(tuple(samples[index] for index in share), model) for scorer, share in asked.items()}
        names = [scorer.id for scorer in commands]
        self._num_scoring.update(names)
        try:
            outcomes = await self._pool.ask_all(commands)
        finally:
            self._num_scoring.subtract(names)
            self._changed.notify_all()
        needed = {
            scorer: outcome
            for scorer, outcome in outcomes.items()
            if not isinstance(outcome, SlotLost) or self._pool.depends_on(scorer)
        }
        replies = replies_of(self._pool.describe, commands, needed, Scores)
        return {scorer: reply.logprobs for scorer, reply in replies.items()}

    async def receive(self, manifest: Manifest) -> None:
        await self._pool.receive(manifest)

    async def admit(self, instance: Instance, settings: Mapping[str, object]) -> bool:
        """`WorkerPool.admit`: True when it scores now, False when it does so from the next version on."""
        return await self._pool.admit(instance, settings)

    def resume(self, slot: int) -> None:
        """If the scorer on this slot is draining, it stays, and gets samples again."""
        if instance := self._pool.on(slot):
            self._pool.resume(instance)

    async def dismiss(self, instance: Instance) -> None:
        """Have the instance score no more, once it has done what it is doing. Raises Late, Refused or SlotLost."""
        self._pool.drain(instance)
        try:
            await self._changed.wait_for(lambda: not self._num_scoring[instance.id], self._timeout_s)
        except TimeoutError:
            raise Late(f"{self._pool.describe(instance)} was still scoring after {self._timeout_s:g} s") from None
        await self._pool.release(instance)
        del self._num_scoring[instance.id]
