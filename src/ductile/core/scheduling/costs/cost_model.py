"""Turns what a run has measured into the speeds and costs that policies reckon with.

Only the latest measurements count, of each kind as many as `WINDOW`. Single numbers are medians, and lines are fitted
without what is far off them: the first of a kind is often the slowest, and one stop of the machine is not how things
are. What has not been measured yet is a prior, and of changes that is one measurement among the others: a run may make
only one resize, its first.

    decoding        50 ms a step, whatever the batch; a policy that reckons should not be asked before this is measured
    prefill         as fast as 32 decoding sequences
    training        a third of the prefill speed: forward and backward are three times the work of forward alone
    a resize        as long as the weights took to be published, for each of parameters, two moments and the gradient;
                    0.5 s before any were. Preparing it takes as long again, and so do parking the state and taking
                    it back
    an assignment   as long as the weights took to be published and received; 1 s before any were
    release, optimizer step, publish, receive     0.05 s, nothing
    a migration     50 ms, and a cache that can travel does so at 1 GB/s
    over several nodes      a resize, and an assignment whose weights come from another node, take as much longer than
                    inside one as links between nodes are slower (`Topology`); so do caches, which are not measured
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import replace
from math import fsum
from statistics import median
from typing import Literal, TypeVar

from ductile.core.layout.geometry.parallel_layout import ONE_SLOT_RANK, RankShape
from ductile.core.layout.geometry.topology import ONE_NODE, Topology
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed, assumed_rank_speed
from ductile.core.scheduling.costs.fits import by_slots, line, migration_cost, trim_outliers

FixedCost = Literal[
    "optim", "publish", "receive", "resize", "warm_up", "prepare", "assign", "release", "park", "unpark",
    "resize_across", "assign_across",
]  # fmt: skip
"""Kind of cost that is about the same each time. `warm_up` is what the first micro-step after a resize takes longer
than others. `..._across`: over several nodes."""

PRIOR_DECODE = DecodeSpeed(step_s=0.05)
PRIOR_PREFILL_SEQUENCES = 32
PRIOR_MIGRATION = (0.05, 1e-9)
"""Prior of a migration: (seconds at the start, seconds for each byte of a cache)."""
TRAIN_WORK = 3.0
PRIORS: dict[FixedCost, float] = {
    "optim": 0.0, "publish": 0.0, "receive": 0.0,
    "resize": 0.5, "warm_up": 0.0, "prepare": 0.5, "assign": 1.0, "release": 0.05,
    "park": 0.5, "unpark": 0.5, "resize_across": 0.5, "assign_across": 1.0,
}  # fmt: skip
RARE: frozenset[FixedCost] = frozenset(
    {"resize", "prepare", "assign", "park", "unpark", "resize_across", "assign_across"}
)
STATE = 4
"""A resize moves so many times the bytes of a published version: parameters, two moments and the gradient."""
WINDOW = 64

_Layouts = tuple[int, RankShape]
"""Number of data-parallel ranks, and the slots of each."""
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class CostModel:
    """Tell it what was measured, ask it for `speeds` and `costs`. It has no clock."""

    def __init__(self, cache_bytes_per_token: float = 0.0, topology: Topology = ONE_NODE) -> None:
        """cache_bytes_per_token: 0 where a cache cannot travel. topology: the nodes of the run, and their links."""
        self._topology = topology
        self._cache_bytes_per_token = cache_bytes_per_token
        self._decoded: dict[int, deque[tuple[float, float, float]]] = {}
        self._micro_steps: dict[_Layouts, deque[tuple[float, float]]] = {}
        self._first_micro_steps: dict[_Layouts, deque[tuple[float, float]]] = {}
        self._rates: dict[str, deque[tuple[float, float]]] = {}
        self._fixed_costs: dict[FixedCost, deque[float]] = {}
        self._migrations: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._migration_cost = PRIOR_MIGRATION
        self._cached: Speeds | None = None

    @property
    def knows_generation(self) -> bool:
        return bool(self._decoded)

    # -- measurements

    def decoded(self, points: Iterable[tuple[float, float, float]]) -> None:
        """Decode steps of one generator were measured: (sequences, tokens in their contexts, seconds a step)."""
        for sequences, context, seconds in points:
            # Kept by size of the batch: a long tail of single sequences must not push out what full batches were like.
            self._keep(self._decoded, int(sequences).bit_length(), (sequences, context, seconds))

    def prefilled(self, tokens: float, seconds: float) -> None:
        self._rate("prefill", tokens, seconds)

    def scored(self, tokens: float, slot_seconds: float) -> None:
        """slot_seconds: seconds of all scorers that worked on these tokens, added up."""
        self._rate("score", tokens, slot_seconds)

    def migrated(self, tokens: float, seconds: float) -> None:
        """Rollouts have migrated, all at once. tokens: context tokens whose cache went along, to the slot that took
        in the most."""
        self._migrations.append((tokens * self._cache_bytes_per_token, seconds))
        self._migration_cost = migration_cost(self._migrations, PRIOR_MIGRATION)

    def micro_step(
        self, tokens_fullest: float, num_ranks: int, seconds: float, shape: RankShape = ONE_SLOT_RANK
    ) -> None:
        """shape: slots of each rank."""
        self._keep(self._micro_steps, (num_ranks, shape), (tokens_fullest, seconds))

    def first_micro_step(
        self, tokens_fullest: float, num_ranks: int, seconds: float, shape: RankShape = ONE_SLOT_RANK
    ) -> None:
        """These slots have run their first micro-step together, in new memory and groups. It says nothing of their
        speed, as long as others do."""
        if self._micro_steps:
            usual_s = self.speeds().train.seconds(tokens_fullest, num_ranks, shape)
            self.took("warm_up", max(0.0, seconds - usual_s))
        else:
            self._keep(self._first_micro_steps, (num_ranks, shape), (tokens_fullest, seconds))

    def took(self, what: FixedCost, seconds: float) -> None:
        self._keep(self._fixed_costs, what, seconds)

    # -- speeds and costs

    def speeds(self) -> Speeds:
        if self._cached is None:
            self._cached = self._speeds()
        return self._cached

    def costs(self) -> SwitchCosts:
        migration_s, per_byte_s = self._migration_cost
        return SwitchCosts(
            resize_s=self._usual("resize") + self._usual("warm_up"),
            prepare_s=self._usual("prepare"),
            assign_s=self._usual("assign"),
            release_s=self._usual("release"),
            park_s=self._usual("park"),
            unpark_s=self._usual("unpark"),
            migration_s=migration_s,
            cache_bytes_per_token=self._cache_bytes_per_token,
            cache_bytes_per_s=1 / per_byte_s if self._cache_bytes_per_token else 0.0,
            resize_network_s=self._longer_across("resize", "resize_across"),
            assign_network_s=self._longer_across("assign", "assign_across"),
            cache_network_bytes_per_s=1 / per_byte_s / self._slower if self._cache_bytes_per_token else 0.0,
        )

    @property
    def _slower(self) -> float:
        """How many times as long bytes take between nodes as inside one."""
        topology = self._topology
        return max(1.0, topology.node_bytes_s / topology.network_bytes_s) if topology.nodes else 1.0

    def _longer_across(self, inside: FixedCost, across: FixedCost) -> float:
        return max(0.0, self._usual(across) - self._usual(inside)) if self._topology.nodes else 0.0

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
        """A micro-step takes `micro_step_s + tokens (1 + overhead (ranks - 1)) / (tokens_per_s rank_speed)`.

        One shape of ranks tells the first three: one slot a rank, if there are such, else the shape that was seen most
        often, whose speed is taken to be the assumed one. The others tell their own speeds beside it."""
        by_shape: dict[RankShape, list[tuple[float, float, int]]] = {}
        for (num_ranks, shape), window in (self._micro_steps or self._first_micro_steps).items():
            by_shape.setdefault(shape, []).extend((tokens, seconds, num_ranks) for tokens, seconds in window if tokens)
        by_shape = {shape: trim_outliers(rows, line) for shape, rows in by_shape.items() if rows}
        if not by_shape:
            return None
        first = max(by_shape, key=lambda shape: (shape == ONE_SLOT_RANK, len(by_shape[shape]), shape))
        base = assumed_rank_speed(first)
        train = _fitted([(tokens / base, seconds, num_ranks) for tokens, seconds, num_ranks in by_shape.pop(first)])
        if train is None:
            return None
        measured = {shape: _rank_speed(train, rows) for shape, rows in sorted(by_shape.items())}
        return replace(train, rank_speeds=tuple((shape, speed) for shape, speed in measured.items() if speed))

    def _usual(self, what: FixedCost) -> float:
        seen = self._fixed_costs.get(what)
        if not seen:
            return self._prior(what)
        return median([*seen, self._prior(what)] if what in RARE else seen)

    def _prior(self, what: FixedCost) -> float:
        if what == "resize_across":
            return self._slower * self._usual("resize")
        if what == "assign_across":
            return self._slower * self._usual("assign")
        if "publish" in self._fixed_costs:
            if what in ("resize", "prepare", "park", "unpark"):
                return STATE * self._usual("publish")
            if what == "assign":
                return self._usual("publish") + self._usual("receive")
        return PRIORS[what]

    def _rate(self, what: str, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._keep(self._rates, what, (amount, seconds))

    def _per(self, what: str, otherwise: float) -> float:
        """Amount per second. Amounts and seconds are added up: small ones are mostly what every one costs."""
        seen = self._rates.get(what)
        return fsum(amount for amount, _ in seen) / fsum(seconds for _, seconds in seen) if seen else otherwise

    def _keep(self, windows: dict[K, deque[T]], key: K, value: T) -> None:
        windows.setdefault(key, deque(maxlen=WINDOW)).append(value)
        self._cached = None


def _fitted(rows: list[tuple[float, float, int]]) -> TrainSpeed | None:
    """The speed that rows (tokens of the fullest rank, seconds, num_ranks) tell of; None where they tell of none."""
    start_s, per_token_s = line(rows)
    if per_token_s <= 0:
        return None
    # A ratio to the line is taken: a short micro-step may be shorter than its start, and leave less than nothing.
    per_ranks = {
        number: per_token_s
        * fsum(seconds for _, seconds, num_ranks in rows if num_ranks == number)
        / fsum(start_s + per_token_s * tokens for tokens, _, num_ranks in rows if num_ranks == number)
        for number in {row[2] for row in rows}
    }
    alone_s, overhead = by_slots(per_ranks)
    return TrainSpeed(1 / alone_s, overhead, start_s)


def _rank_speed(train: TrainSpeed, rows: list[tuple[float, float, int]]) -> float:
    """How many times as fast as one slot the ranks of these rows are; 0 where the rows do not tell."""
    expected_s = fsum(train.seconds(tokens, num_ranks) - train.micro_step_s for tokens, _, num_ranks in rows)
    took_s = fsum(seconds for _, seconds, _ in rows) - train.micro_step_s * len(rows)
    return expected_s / took_s if took_s > 0 else 0.0
