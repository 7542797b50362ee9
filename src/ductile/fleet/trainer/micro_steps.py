"""The trainer's micro-steps, sent one at a time: a micro-batch or a few of each data-parallel rank, and how it went."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ductile.concurrency.listeners import Listeners
from ductile.messages.workers import ForwardBackwardDone
from ductile.records import MicroBatch

IN_FLIGHT = 2
"""Micro-steps that the trainer's slots have at once: one that runs and one that waits; while a change is under way only
the first."""
AHEAD_S = 0.25
"""Seconds before the expected end of a micro-step at which the next one is sent: many times what a message takes, and
little beside the micro-steps of a model that is worth a change."""

MicroStep = Sequence[tuple[MicroBatch, ...]]
"""Micro-step, which is sent at a time: the micro-batches of each data-parallel rank, equally many."""


@dataclass(frozen=True, slots=True)
class MicroStepDone:
    """A micro-step, and how long it took."""

    num_ranks: int
    """Data-parallel ranks."""
    per_rank: int
    """Micro-batches of each."""
    tokens_fullest: int
    """Tokens of the rank that has most."""
    tokens_all: int
    busy_s: float
    """Seconds that the slowest slot worked; how long the command waited in the slot is not counted."""

    @classmethod
    def of(cls, step: MicroStep, busy_s: float) -> "MicroStepDone":
        tokens = _tokens_of(step)
        return cls(len(step), len(step[0]), max(tokens), sum(tokens), busy_s)

    def expected_s(self, step: MicroStep) -> float:
        """Return the seconds that another one takes, by the tokens of its fullest rank."""
        return self.busy_s * max(_tokens_of(step)) / max(1, self.tokens_fullest)


@dataclass(slots=True)
class PendingSamples:
    """Rest that one `forward_backward` has yet to do."""

    num_samples: int
    num_tokens: int

    def did(self, step: MicroStep) -> None:
        self.num_samples -= sum(len(micro_batch.samples) for of_rank in step for micro_batch in of_rank)
        self.num_tokens -= sum(micro_batch.num_tokens for of_rank in step for micro_batch in of_rank)


Send = Callable[[MicroStep, float], Coroutine[Any, Any, Mapping[int, ForwardBackwardDone]]]
"""Function of a micro-step and a deadline in seconds that has the trainer's slots run it, and returns their replies."""


class MicroSteps:
    """Micro-steps on their way through the trainer's slots: the next one is sent shortly before the one that runs is
    expected to end."""

    def __init__(self, send: Send, most_in_flight: Callable[[], int], command_s: float) -> None:
        """most_in_flight: says how many the slots may have now. command_s: deadline of one."""
        self._send, self._most_in_flight, self._command_s = send, most_in_flight, command_s
        self._latest: MicroStepDone | None = None
        """The latest micro-step in this layout, which says how long the next one takes."""
        self.on_done = Listeners[[MicroStepDone]]()

    def forget(self) -> None:
        """Expect nothing of the next one: the layout is another."""
        self._latest = None

    async def run(self, steps: deque[MicroStep], given: PendingSamples) -> None:
        """Run `steps` from the left, and take them out, until none is left, or none may be in flight."""
        in_flight: deque[tuple[MicroStep, asyncio.Task[Mapping[int, ForwardBackwardDone]]]] = deque()
        now_s = asyncio.get_running_loop().time
        began_s = now_s()  # of the one that runs
        try:
            while True:
                limit = self._most_in_flight()
                if steps and 0 < len(in_flight) < limit:
                    ahead_s = began_s + self._expected_s(in_flight[0][0]) - AHEAD_S - now_s()
                    if ahead_s > 0 and not in_flight[0][1].done():
                        await asyncio.wait({in_flight[0][1]}, timeout=ahead_s)
                        continue
                while steps and len(in_flight) < limit:
                    step = steps.popleft()
                    deadline_s = (1 + len(in_flight)) * self._command_s
                    in_flight.append((step, asyncio.create_task(self._send(step, deadline_s))))
                if not in_flight:
                    return
                step, task = in_flight[0]
                done = await task
                in_flight.popleft()
                began_s = now_s()
                given.did(step)
                self._latest = MicroStepDone.of(step, max(reply.busy_s for reply in done.values()))
                self.on_done(self._latest)
        finally:
            for _, task in in_flight:
                task.cancel()
            await asyncio.gather(*(task for _, task in in_flight), return_exceptions=True)

    def _expected_s(self, step: MicroStep) -> float:
        """Return the seconds that a micro-step takes, by the latest one; 0 where there was none in this layout."""
        return self._latest.expected_s(step) if self._latest else 0.0


def in_steps(packed: Sequence[Sequence[MicroBatch]], sizes: Iterable[int]) -> Iterator[MicroStep]:
    """Return the micro-batches of every rank, so many of each at a time."""
    micro_batches = [iter(of_rank) for of_rank in packed]
    for size in sizes:
        yield [tuple(islice(of_rank, size)) for of_rank in micro_batches]


def _tokens_of(step: MicroStep) -> list[int]:
    """Return the number of tokens of each data-parallel rank."""
    return [sum(micro_batch.num_tokens for micro_batch in of_rank) for of_rank in step]
