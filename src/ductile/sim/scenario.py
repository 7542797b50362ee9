"""What is simulated: the work, the slots and how fast they are."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import exp

from ductile.core.instances.instances import Instance
from ductile.core.instances.placement import Placement
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules
from ductile.core.layout.geometry.topology import Topology
from ductile.core.rollouts.staleness import OnStale
from ductile.core.scheduling.costs.cost import Speeds, SwitchCosts
from ductile.core.scheduling.facts.cluster_state import Limits

DrawLength = Callable[[random.Random], float]
"""Draws the tokens of one completion, before the limit cuts it."""


@dataclass(frozen=True, slots=True)
class WorkLoad:
    """What the run has to do; the same rollouts with the same lengths whatever the slots do."""

    num_steps: int
    groups_per_step: int
    group_size: int
    prompt_tokens: int
    max_tokens: int
    draw: DrawLength
    alike: float = 0.0
    """Share of siblings that have their group's length, give or take a tenth: hard prompts are long for all."""
    n_minibatches: int = 1
    max_async_level: int = 0
    max_off_policy_steps: int = 8
    on_stale: OnStale = "drop"
    seq_len: int = 2048
    seed: int = 0
    given: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Tokens of each member's completion, by group, where they are known; others are drawn."""

    @property
    def rollouts_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    def length(self, group: str, member: str) -> int:
        """Tokens of one completion, between 1 and the limit. member: the request's name, group/member/turn."""
        if group in self.given:
            return max(1, min(self.max_tokens, self.given[group][int(member.split("/")[-2])]))
        draw = _random(self.seed, group, member)
        if self.alike and draw.random() < self.alike:
            tokens = self.draw(_random(self.seed, group)) * draw.uniform(0.9, 1.1)
        else:
            tokens = self.draw(draw)
        return max(1, min(self.max_tokens, round(tokens)))


@dataclass(frozen=True, slots=True)
class Scenario:
    placement: Placement
    work: WorkLoad
    speeds: Speeds
    costs: SwitchCosts
    limits: Limits
    coalesce_s: float = 0.0
    """A policy is not asked again sooner than this after it was asked: events in between are looked at together."""
    cache_block: int = 1
    """Tokens of a cache block: siblings share the full blocks of their prompt. 0 where they share nothing."""
    score: bool = False
    """There is a scorer, and every sample passes through it."""
    servers: tuple[Instance, ...] = ()
    """Generators that are on no slot, and are there from the beginning to the end."""
    rules: LayoutRules = NO_RULES
    """Which layout the trainer has on any number of slots."""
    on_gpu: bool = False
    """The slots are GPUs, which have memory for two roles only where the placement says so."""
    share_devices: bool | None = None
    """A slot has memory for two roles; None where that is not said."""
    offloads: bool = False
    """Train slots without that memory may lend their devices."""

    def at(self, placement: Placement) -> "Scenario":
        """The same scenario begun with another placement, with what a run may do there."""
        limits = self.limits.at(placement, on_gpu=self.on_gpu, share_devices=self.share_devices, offloads=self.offloads)
        return replace(self, placement=placement, limits=limits)

    @property
    def topology(self) -> Topology:
        """The nodes that the slots are on."""
        return self.rules.topology

    @property
    def block_tokens(self) -> int:
        """Tokens that the loop carries as one: the lists that it copies stay short, and nothing else depends on it."""
        return max(1, self.work.max_tokens // 128)

    def blocks(self, tokens: int) -> int:
        return max(1, round(tokens / self.block_tokens))


def lognormal(median: float, sigma: float) -> DrawLength:
    return lambda draw: median * exp(sigma * draw.gauss(0, 1))


def recorded(lengths: Sequence[int]) -> DrawLength:
    """Draws one of the lengths that were seen in a run, at random."""
    return lambda draw: float(draw.choice(lengths))


def _random(seed: int, *names: str) -> random.Random:
    digest = blake2b("/".join((str(seed), *names)).encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest))
