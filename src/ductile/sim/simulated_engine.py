"""One simulated generator: continuous batching without tokens.

All running sequences advance together. `_progress` counts the tokens that each has got since the engine began, so a
sequence that joined at `p` and has `n` tokens to go ends at `p + n`, and one timer for the first to end is enough. How
long a step takes depends on how many there are and on their context, which grows as they do: that makes the seconds of
some progress a quadratic, solved exactly.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt

from ductile.core.instances.instances import Instance
from ductile.core.scheduling.costs.cost import DecodeSpeed
from ductile.records import GenerateRequest

HAIR = 1e-6
"""Tokens by which sums of floats may miss a whole one."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One simulated request in flight, wherever it is."""

    request: GenerateRequest
    prompt_tokens: int
    num_tokens: int
    """Tokens that the completion will have in the end."""
    predicted_tokens: float
    completion: "asyncio.Future[None]"
    generated: float = 0.0
    joined_at: float | None = None
    """Progress of the engine when the request joined, less the tokens it had then; None while it waits or migrates."""
    prefill_s: float = 0.0
    """Seconds that joining takes: no request of the engine decodes meanwhile."""
    flips: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(tokens so far, version) for each weight version that the completion was sampled from."""


class SimulatedEngine:
    def __init__(
        self,
        instance: Instance,
        decode: DecodeSpeed,
        max_num_seqs: int,
        on_done: Callable[[Instance, list[SimulatedRequest]], None],
        paused_until_s: float = 0.0,
    ) -> None:
        """on_done(instance, requests): these are finished. paused_until_s: when its slots have done what else they
        do."""
        self.instance = instance
        self.requests: dict[str, SimulatedRequest] = {}
        self._decode, self._max_num_seqs, self._on_done = decode, max_num_seqs, on_done
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[SimulatedRequest] = deque()
        self._ends: list[tuple[float, int, SimulatedRequest]] = []
        self._count = 0
        self._progress = self._context = 0.0
        self._at_s = self._loop.time()
        self._paused_until_s = max(self._at_s, paused_until_s)
        self._timer: asyncio.TimerHandle | None = None
        self._touched = False

    def add(self, simulated: SimulatedRequest, prefill_s: float = 0.0) -> None:
        simulated.prefill_s = prefill_s
        self.requests[simulated.request.id] = simulated
        self.catch_up()
        if len(self._ends) < self._max_num_seqs:
            self._join(simulated)
        else:
            self._waiting.append(simulated)
        self._touch()

    def remove(self, name: str) -> SimulatedRequest:
        """Take a request away, with the tokens that it has so far."""
        simulated = self.requests.pop(name)
        self.catch_up()
        if simulated.joined_at is None:
            self._waiting.remove(simulated)
        else:
            simulated.generated, simulated.joined_at = self.generated(simulated), None
            self._context -= simulated.prompt_tokens + simulated.generated
            self._ends = [entry for entry in self._ends if entry[2] is not simulated]
            heapq.heapify(self._ends)
            self._fill()
        self._touch()
        return simulated

    def stall(self, seconds: float) -> None:
        """No request decodes for so long: new weights come, or the slot trains."""
        self.catch_up()
        self._paused_until_s = max(self._loop.time(), self._paused_until_s) + seconds
        self._touch()

    def generated(self, simulated: SimulatedRequest) -> float:
        """Tokens so far, as of `catch_up`."""
        return simulated.generated if simulated.joined_at is None else self._progress - simulated.joined_at

    def tokens(self, simulated: SimulatedRequest) -> int:
        """Whole tokens so far; one that rounding has left a hair before its end is there."""
        return int(self.generated(simulated) + HAIR)

    def flip(self, version: int) -> None:
        """Sample tokens from this weight version from now on."""
        self.catch_up()
        for _, _, simulated in self._ends:
            simulated.flips.append((round(self.generated(simulated)), version))

    def _join(self, simulated: SimulatedRequest) -> None:
        self._paused_until_s = max(self._loop.time(), self._paused_until_s) + simulated.prefill_s
        simulated.joined_at = self._progress - simulated.generated
        self._context += simulated.prompt_tokens + simulated.generated
        self._count += 1
        heapq.heappush(self._ends, (simulated.joined_at + simulated.num_tokens, self._count, simulated))

    def _fill(self) -> None:
        while self._waiting and len(self._ends) < self._max_num_seqs:
            self._join(self._waiting.popleft())

    def catch_up(self) -> None:
        """Bring the books up to now."""
        now_s = self._loop.time()
        elapsed_s = now_s - max(self._at_s, min(self._paused_until_s, now_s))
        self._at_s = now_s
        if elapsed_s > 0 and self._ends:
            self._advance(min(self._tokens_in(elapsed_s), self._ends[0][0] - self._progress))

    def _advance(self, tokens: float) -> None:
        self._progress += tokens
        self._context += tokens * len(self._ends)

    def _step_s(self) -> tuple[float, float]:
        """Seconds of the next token, and how much longer each further one takes."""
        count = len(self._ends)
        return self._decode.seconds(count, self._context), self._decode.per_context_s * count

    def _tokens_in(self, seconds: float) -> float:
        step_s, growth_s = self._step_s()
        if growth_s * seconds < 1e-12 * step_s * step_s:
            return seconds / step_s
        return (sqrt(step_s * step_s + 2 * growth_s * seconds) - step_s) / growth_s

    def _touch(self) -> None:
        if not self._touched:
            self._touched = True
            self._loop.call_soon(self._arm)

    def _arm(self) -> None:
        self._touched = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            self.catch_up()
            tokens = self._ends[0][0] - self._progress
            step_s, growth_s = self._step_s()
            begins_s = max(self._loop.time(), self._paused_until_s)
            self._timer = self._loop.call_at(begins_s + tokens * step_s + growth_s * tokens * tokens / 2, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._touched:
            return  # something changed at this very instant: `_arm` reckons anew
        self._at_s = self._loop.time()
        self._advance(self._ends[0][0] - self._progress)
        done: list[SimulatedRequest] = []
        while self._ends and self._ends[0][0] <= self._progress + HAIR:
            simulated = heapq.heappop(self._ends)[2]
            simulated.generated, simulated.joined_at = simulated.num_tokens, None
            self._context -= simulated.prompt_tokens + simulated.num_tokens
            del self.requests[simulated.request.id]
            done.append(simulated)
        self._fill()
        self._touch()
        self._on_done(self.instance, done)
