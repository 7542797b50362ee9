"""How long will the unfinished completions be?

What finished early says little about what has not finished: while the first completions of a run come in, all of them
are short. So the estimate counts the unfinished ones as well: "longer than this, we do not know how much" (the
product-limit estimate of Kaplan and Meier). Where nothing has been seen, at the start and beyond the longest
completion, a prior speaks: a heavy tail, whose expected rest grows with what a rollout has outlived. It weighs as much
as `PRIOR_WEIGHT` completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ductile.core.scheduling.costs.arithmetic import FloatArray, interpolate

PRIOR_WEIGHT = 2.0
NUM_CELLS = 96
"""Cells of the token axis; they are narrower where completions are short."""


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """`alive[k]` is the chance that a completion has more than `edges[k]` tokens; it falls from 1 to 0 at the limit."""

    edges: FloatArray
    alive: FloatArray
    rest: FloatArray
    """Expected tokens that a completion still takes when it has `edges[k]` and goes on."""

    def more_than(self, tokens: Sequence[int] | FloatArray) -> FloatArray:
        """P(length > tokens) of a completion."""
        return interpolate(np.asarray(tokens, float), self.edges, self.alive)

    def remaining(self, generated: Sequence[int] | FloatArray) -> FloatArray:
        """Expected tokens still to come, of completions that have so many and go on."""
        return interpolate(np.asarray(generated, float), self.edges, self.rest)

    def mean(self) -> float:
        return float(self.rest[0])


def survival(
    max_tokens: int, ended: Sequence[int] = (), cut: Sequence[int] = (), unfinished: Sequence[int] = ()
) -> Survival:
    """The distribution of completions' lengths up to `max_tokens`.

    ended: lengths of completions that the model ended. cut: lengths of those that hit a limit. unfinished: tokens so
    far of those that go on.
    """
    shares = np.arange(NUM_CELLS + 1) / NUM_CELLS
    edges = max_tokens * shares * np.sqrt(shares)
    deaths, censored = histogram(ended, edges), histogram([*cut, *unfinished], edges)
    # For each cell: how many got as far as its start, and how many ended in it. One censored inside counts half.
    at_risk = _from_here(deaths + censored) - censored / 2
    prior = _prior(edges)
    ended_here = deaths + PRIOR_WEIGHT * -np.diff(prior)
    hazard = np.clip(ended_here / (at_risk + PRIOR_WEIGHT * prior[:-1]), 0.0, 1.0)
    alive = np.concatenate([[1.0], np.cumprod(1 - hazard)])
    alive[-1] = 0.0  # the limit ends every completion
    widths = np.diff(edges)
    areas = widths * (alive[:-1] + alive[1:]) / 2
    ahead = np.concatenate([_from_here(areas), [0.0]])
    rest = np.where(alive > 1e-12, ahead / np.maximum(alive, 1e-12), (max_tokens - edges) / 2)
    return Survival(edges, alive, np.minimum(rest, max_tokens - edges))


def histogram(lengths: Sequence[int] | FloatArray, edges: FloatArray) -> FloatArray:
    """How many lengths are in each cell; those beyond the last edge count for the last cell."""
    return np.histogram(np.minimum(np.asarray(lengths, float), edges[-1]), edges)[0].astype(float)


def _from_here(values: FloatArray) -> FloatArray:
    """Sums of each value and all after it."""
    return np.cumsum(values[::-1])[::-1]


def _prior(edges: FloatArray) -> FloatArray:
    """P(length > edge) = a / (a + edge): half of the completions end within an eighth of the limit."""
    typical = edges[-1] / 8
    return typical / (typical + edges)
