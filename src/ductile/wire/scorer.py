"""The scorers behind one call: `score` splits samples among the score slots and puts the log-probs back in order."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ductile.core.batch.packing import split_by_tokens
from ductile.records import Manifest, Sample
from ductile.roles import Late, SlotLost
from ductile.wire.change_signal import ChangeSignal
from ductile.wire.fanout import replies_of
from ductile.wire.leases import WeightLeases
from ductile.wire.mailbox import Mailbox
from ductile.wire.messages import Score, Scores
from ductile.wire.worker_pool import WorkerPool, any_slot


class RemoteScorer:
    """Follows `ductile.roles.Scorer`. Each score slot holds a whole model; samples are split by their tokens."""

    def __init__(
        self,
        mailbox: Mailbox,
        slots: Sequence[int],
        timeout_s: float,
        leases: WeightLeases | None = None,
        depends_on: Callable[[int], bool] = any_slot,
    ) -> None:
        """leases: None where no slot ever joins. depends_on: whether the run ends when this slot is lost."""
        self._mailbox, self._timeout_s = mailbox, timeout_s
        self._pool = WorkerPool(mailbox, "score", slots, timeout_s, leases, depends_on)
        self._num_scoring: Counter[int] = Counter()
        """Calls of `score` that need the slot."""
        self._changed = ChangeSignal()

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that score."""
        return self._pool.slots

    @property
    def num_waiting(self) -> int:
        """Calls of `score` that wait for a scorer."""
        return self._pool.num_waiting

    async def score(self, samples: Sequence[Sample], model: Literal["policy", "reference"]) -> list[tuple[float, ...]]:
        """Waits for a scorer while there is none. The scorers that it begins with stay until it has ended.

        What was under way at a slot that is lost is scored by others, unless the run ends with that slot. A failure is
        raised once all slots have replied: SlotLost, Refused or Late.
        """
        scores: dict[int, tuple[float, ...]] = {}
        left = list(range(len(samples)))
        while left:
            slots = await self._pool.some(f"{len(left)} samples")
            shares = zip(slots, split_by_tokens([samples[index] for index in left], len(slots)), strict=True)
            asked = {slot: [left[part] for part in share] for slot, share in shares if share}
            for slot, logprobs in (await self._score(samples, asked, model)).items():
                scores.update(zip(asked.pop(slot), logprobs, strict=True))
            left = [index for share in asked.values() for index in share]
        return [scores[index] for index in range(len(samples))]

    async def _score(
        self, samples: Sequence[Sample], asked: Mapping[int, Sequence[int]], model: Literal["policy", "reference"]
    ) -> dict[int, tuple[tuple[float, ...], ...]]:
        """Log-probs by slot, from all slots that are not lost. Raises SlotLost, Refused or Late."""
        commands = {slot: Score(tuple(samples[index] for index in share), model) for slot, share in asked.items()}
        self._num_scoring.update(commands.keys())
        try:
            outcomes = await self._mailbox.ask_all(commands, self._timeout_s)
        finally:
            self._num_scoring.subtract(commands.keys())
            self._changed.notify_all()
        needed = {
            slot: outcome
            for slot, outcome in outcomes.items()
            if not isinstance(outcome, SlotLost) or self._pool.depends_on(slot)
        }
        return {slot: reply.logprobs for slot, reply in replies_of(self._mailbox, commands, needed, Scores).items()}

    async def receive(self, manifest: Manifest) -> None:
        await self._pool.receive(manifest)

    async def admit(self, slot: int, settings: Mapping[str, object]) -> bool:
        """`WorkerPool.admit`: True when it scores now, False when it does so from the next version on."""
        return await self._pool.admit(slot, settings)

    async def dismiss(self, slot: int) -> None:
        """Have the slot score no more, once it has done what it is doing. Raises Late, Refused or SlotLost."""
        self._pool.drain(slot)
        try:
            await self._changed.wait_for(lambda: not self._num_scoring[slot], self._timeout_s)
        except TimeoutError:
            raise Late(f"{self._mailbox.describe(slot)} was still scoring after {self._timeout_s:g} s") from None
        await self._pool.release(slot)
