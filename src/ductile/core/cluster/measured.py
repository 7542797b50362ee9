"""From what a run has measured to the speeds and costs that policies reckon with.

Only the latest measurements count, of each kind as many as `WINDOW`. Single numbers are medians: the first of a kind is
often the slowest, and one stop of the machine is not how things are. What nobody has measured yet is a prior:

    decoding        50 ms a step, whatever the batch; a policy that reckons should not be asked before this is measured
    prefill         as fast as 32 decoding sequences
    training        a third of the prefill speed: forward and backward are three times the work of forward alone
    a resize        0.5 s of pause, 1 s of preparation
    grant, release, handoff, optimizer step, publish, receive      1 s, 0.05 s, 0.01 s, nothing
    the cache       travels at 1 GB/s, if it can
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import Literal, TypeVar

import numpy as np

from ductile.core.cluster.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed

Once = Literal["optim", "publish", "receive", "resize", "prepare", "grant", "release", "handoff"]
"""What takes about as long each time."""

PRIOR_DECODE = DecodeSpeed(step_s=0.05)
PRIOR_PREFILL_SEQUENCES = 32
PRIOR_CACHE_BYTES_PER_S = 1e9
TRAIN_WORK = 3.0
PRIORS: dict[Once, float] = {
    "optim": 0.0, "publish": 0.0, "receive": 0.0,
    "resize": 0.5, "prepare": 1.0, "grant": 1.0, "release": 0.05, "handoff": 0.01,
}  # fmt: skip
WINDOW = 64

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Measured:
    """Tell it what was measured, ask it for `speeds` and `costs`. It has no clock."""

    def __init__(self, cache_bytes_per_token: float = 0.0) -> None:
        """cache_bytes_per_token: 0 where a cache cannot travel."""
        self._cache_bytes_per_token = cache_bytes_per_token
        self._decoded: dict[int, deque[tuple[float, float, float]]] = {}
        self._micro_steps: dict[int, deque[tuple[float, float]]] = {}
        self._rates: dict[str, deque[tuple[float, float]]] = {}
        self._once: dict[Once, deque[float]] = {}
        self._cached: Speeds | None = None

    @property
    def knows_generation(self) -> bool:
        return bool(self._decoded)

    # -- measurements

    def decoded(self, points: Iterable[tuple[float, float, float]]) -> None:
        """Decode steps of one generator: (sequences, tokens in their contexts, seconds a step)."""
        for sequences, context, seconds in points:
            # By size of the batch: a long tail of single sequences must not push out what full batches were like.
            self._keep(self._decoded, int(sequences).bit_length(), (sequences, context, seconds))

    def prefilled(self, tokens: float, seconds: float) -> None:
        self._rate("prefill", tokens, seconds)

    def scored(self, tokens: float, slot_seconds: float) -> None:
        """slot_seconds: of all scorers that worked on it, added up."""
        self._rate("score", tokens, slot_seconds)

    def cache_travelled(self, tokens: float, seconds: float) -> None:
        """Of rollouts that were handed off with their cache, from one slot to another."""
        self._rate("cache", tokens * self._cache_bytes_per_token, seconds)

    def micro_step(self, tokens_busiest: float, num_slots: int, seconds: float) -> None:
        self._keep(self._micro_steps, num_slots, (tokens_busiest, seconds))

    def took(self, what: Once, seconds: float) -> None:
        self._keep(self._once, what, seconds)

    # -- what they say

    def speeds(self) -> Speeds:
        if self._cached is None:
            self._cached = self._speeds()
        return self._cached

    def costs(self) -> SwitchCosts:
        return SwitchCosts(
            resize_s=self._usual("resize"),
            prepare_s=self._usual("prepare"),
            grant_s=self._usual("grant"),
            release_s=self._usual("release"),
            handoff_s=self._usual("handoff"),
            cache_bytes_per_token=self._cache_bytes_per_token,
            cache_bytes_per_s=self._per("cache", PRIOR_CACHE_BYTES_PER_S if self._cache_bytes_per_token else 0.0),
        )

    def _speeds(self) -> Speeds:
        points = [point for window in self._decoded.values() for point in window]
        decode = DecodeSpeed.fit(points) if points else PRIOR_DECODE
        slowest_s = max(decode.seconds(PRIOR_PREFILL_SEQUENCES), 1e-6)
        prefill_tokens_per_s = self._per("prefill", PRIOR_PREFILL_SEQUENCES / slowest_s)
        return Speeds(
            decode=decode,
            prefill_tokens_per_s=prefill_tokens_per_s,
            train=self._train() or TrainSpeed(prefill_tokens_per_s / TRAIN_WORK),
            score_tokens_per_s=self._per("score", float("inf")),
            optim_s=self._usual("optim"),
            publish_s=self._usual("publish"),
            receive_s=self._usual("receive"),
        )

    def _train(self) -> TrainSpeed | None:
        """A micro-step takes `micro_step_s + tokens (1 + overhead (slots - 1)) / tokens_per_s`."""
        rows = [
            (tokens, tokens * (slots - 1), seconds)
            for slots, window in self._micro_steps.items()
            for tokens, seconds in window
            if tokens
        ]
        if not rows:
            return None
        start_s, per_token_s, per_other_s = fit_linear(
            rows, with_start=len({row[0] for row in rows}) > 1, second=len(self._micro_steps) > 1
        )
        if per_token_s <= 0:
            return None
        return TrainSpeed(1 / per_token_s, per_other_s / per_token_s, start_s)

    def _usual(self, what: Once) -> float:
        seen = self._once.get(what)
        return median(seen) if seen else PRIORS[what]

    def _rate(self, what: str, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._keep(self._rates, what, (amount, seconds))

    def _per(self, what: str, otherwise: float) -> float:
        """Amounts and seconds are added up: small ones are mostly what every one costs."""
        seen = self._rates.get(what)
        return sum(amount for amount, _ in seen) / sum(seconds for _, seconds in seen) if seen else otherwise

    def _keep(self, windows: dict[K, deque[T]], key: K, value: T) -> None:
        windows.setdefault(key, deque(maxlen=WINDOW)).append(value)
        self._cached = None


def fit_linear(
    rows: Sequence[tuple[float, float, float]], *, with_start: bool, second: bool
) -> tuple[float, float, float]:
    """(start, first, second) of `seconds = start + first x + second y` through the rows (x, y, seconds), none negative.

    with_start, second: whether the rows can tell these apart from `first`; they are 0 otherwise.
    """
    data = np.array(rows, float)
    columns = np.stack([np.ones(len(data)), data[:, 0], data[:, 1]], 1)
    used = [column for column, use in enumerate((with_start, True, second)) if use]
    while True:
        found = np.linalg.lstsq(columns[:, used], data[:, 2], rcond=None)[0]
        negative = [column for column, value in zip(used, found, strict=True) if value < 0 and column != 1]
        if not negative:
            break
        used.remove(max(negative))
    parts = dict(zip(used, (float(value) for value in found), strict=True))
    return parts.get(0, 0.0), parts[1], parts.get(2, 0.0)
