"""What a policy sees: which slot has which roles, what is under way, what is left to do, and how fast things go.

All are plain values of one instant; the time is among them. `elastic.actuator` and `sim` fill them in, `policies/`
decide on them, tests write them down by hand.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ductile.core.instances.instances import (
    NOUNS,
    Instance,
    InstanceGroups,
    InstanceId,
    Serving,
    regrouped,
    slot_groups,
    slots_on,
)
from ductile.core.instances.placement import Placement, Role
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.layout.geometry.topology import Topology
from ductile.core.scheduling.costs.cost import Speeds, SwitchCosts


@dataclass(frozen=True, slots=True)
class SlotState:
    slot: int
    roles: tuple[Role, ...]
    """Roles that the slot holds, in the order train, generate, score. A slot that both trains and generates decodes
    between micro-steps."""
    since_s: float = 0.0
    """Time at which the slot got these roles, on the clock of `ClusterState.now_s`."""
    ready: bool = True
    """False while the slot changes roles, or warms up: no order may name it then."""


class Unfinished(NamedTuple):
    """A rollout that some generator is working on, or has in its queue.

    A tuple, because it is made three times as fast as a frozen dataclass: a state of 1,024 slots has 50,000 of them."""

    id: str
    instance: InstanceId
    """The generator that has it."""
    prompt_tokens: int
    """Tokens before this turn's first one."""
    generated: int
    """Tokens that this turn has so far."""
    limit: int
    """Most tokens that this turn may have."""
    group: str = ""
    num_turns: int = 0
    """Finished turns of the rollout."""

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Progress of the step that is being trained. Everything is counted in rollouts, unless it says tokens."""

    step: int
    num_rollouts: int
    """Rollouts that the step trains on."""
    group_size: int = 1
    trained: int = 0
    ready: int = 0
    """Rollouts that the trainer can have: finished, in whole groups, scored where there is a scorer. Those of later
    steps count too, when generation runs ahead."""
    ready_tokens: int = 0
    """Tokens of the `ready` rollouts, prompts included."""
    partial: int = 0
    """Rollouts that are finished while siblings of their groups are not, or older groups that are taken first."""
    partial_tokens: int = 0
    to_score: int = 0
    to_score_tokens: int = 0
    to_start: int = 0
    """Rollouts that the staleness bound admits and no generator has yet."""
    update: int = 0
    num_updates: int = 1
    """Optimizer steps of the batch; `update` of them are done."""
    steps_left: int = 1
    """Steps that are left, this one included; 0 after the last."""
    steps_ahead: int = 0
    """Steps that generation may run ahead of this one."""

    @property
    def left(self) -> int:
        return self.num_rollouts - self.trained

    @property
    def missing(self) -> int:
        """Rollouts of this step that are not yet generated, or wait for siblings. Those that only have to be scored are
        `unscored`, and not missing."""
        return max(0, self.left - self.ready - self.to_score)

    @property
    def unscored(self) -> int:
        """Rollouts of this step that are generated and still to be scored. A trainer that is held may wait for them:
        all that the optimizer step wants is scored meanwhile, and not only the next chunk."""
        return max(0, self.left - self.ready - self.missing)

    @property
    def all_scored(self) -> bool:
        """Whether nothing is left to score, now or later in this step; what only waits for its reward may still have to
        be."""
        return not self.to_score and not self.missing

    @property
    def last_update(self) -> bool:
        """Whether only the last optimizer step's share is left, which is no larger than the others'; of a batch with
        one optimizer step, the last quarter."""
        if self.num_updates == 1:
            return self.left <= self.num_rollouts / 4
        return self.left <= self.num_rollouts // self.group_size // self.num_updates * self.group_size


@dataclass(frozen=True, slots=True)
class TrainerState:
    layout: ParallelLayout
    at_boundary: bool = True
    """Whether the trainer's slots may change now: no resize is under way. A resize waits for the end of the micro-step
    itself."""
    held: bool = False
    """Whether a decision makes the trainer wait."""
    seq_len: int = 2048
    """Most tokens of one micro-batch, which is a data-parallel rank's."""
    rules: LayoutRules = NO_RULES
    """Which layout the trainer has on any number of slots."""
    wanted: bool = False
    """A command waits for the trainer's state, which is parked: a checkpoint, or an optimizer step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What no decision may break."""

    min_train: int = 1
    """Fewest slots that hold the trainer's state, at any time. At least 1: it has to be somewhere."""
    min_generate: int = 1
    """Fewest generators, while there is anything to generate."""
    min_score: int = 0
    """Fewest scorers, while there is anything to score; 0 for a run without."""
    max_num_seqs: int = 64
    """Most sequences that one generator decodes at once."""
    may_share: bool = True
    """Whether a train slot may hold a generator besides: there is memory for both."""
    offloads: bool = False
    """A train slot without memory for both may lend its device to a generator: the state of the whole trainer
    is parked in host memory meanwhile, and training waits."""
    slots_per_generator: int = 1
    """Slots that one generator takes."""
    slots_per_scorer: int = 1

    def at(
        self, placement: Placement, *, on_gpu: bool, share_devices: bool | None = None, offloads: bool = False
    ) -> "Limits":
        """The same with what depends on the placement that a run begins with. share_devices: as of `may_share`.
        offloads: train slots may lend their devices where there is no memory for two roles."""
        shares = may_share(placement, on_gpu=on_gpu, share_devices=share_devices)
        return replace(self, min_score=1 if placement.score else 0, may_share=shares, offloads=offloads and not shares)

    def slots_per(self, role: Serving) -> int:
        """Slots that one instance of the role takes."""
        return self.slots_per_generator if role == "generate" else self.slots_per_scorer


def may_share(placement: Placement, *, on_gpu: bool, share_devices: bool | None = None) -> bool:
    """Return whether a train slot has memory for a generator besides, in a run with this placement.

    share_devices: what the configuration says of it (`cluster.share_devices`). None: a slot on a CPU has; a GPU has
    where the placement has the two roles share slots, as nothing else says that both fit.
    """
    return share_devices if share_devices is not None else not on_gpu or placement.shares


def groups_of(role: Serving, home: Placement, slots: Iterable[int], limits: Limits) -> tuple[tuple[int, ...], ...]:
    """The groups of slots that an instance of the role may be on, in a run that began with the placement `home` and has
    these slots now."""
    return slot_groups(home.of(role), {*home.slots, *slots}, limits.slots_per(role))


def first_instances(placement: Placement, limits: Limits) -> tuple[Instance, ...]:
    """The instances that a run with this placement begins with."""
    held = {slot: placement.roles(slot) for slot in placement.slots}
    groups: InstanceGroups = {role: slot_groups(placement.of(role), (), limits.slots_per(role)) for role in NOUNS}
    return regrouped((), {}, held, groups, birth=0)


def weights_are_near(
    topology: Topology, instances: Iterable[Instance], layout: ParallelLayout, slots: Collection[int]
) -> bool:
    """Return whether each node that these slots are on has the live weights: another instance is there, or the slot of
    the trainer that publishes them."""
    if not topology.nodes:
        return True
    having = {layout.first, *slots_on(instances)}
    return {topology.node(slot) for slot in having}.issuperset(topology.node(slot) for slot in slots)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Completions' lengths in tokens, as far as seen."""

    ended: tuple[int, ...] = ()
    """Lengths of recent completions that the model ended."""
    cut: tuple[int, ...] = ()
    """Lengths of completions that hit their limit: they would have been longer."""
    prompt_mean: float = 0.0
    """Mean tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    now_s: float
    slots: tuple[SlotState, ...]
    """Slots of the current membership, in ascending order."""
    batch: BatchProgress
    trainer: TrainerState
    speeds: Speeds
    costs: SwitchCosts
    home: Placement
    """Slots that the configuration gave each role: `rules` returns to them after each step."""
    limits: Limits = Limits()
    instances: tuple[Instance, ...] = ()
    """Generators and scorers, in the order of their slots; external servers come last."""
    change: int = 1
    """Number that a change decided on now has: instances that it begins are named after it."""
    unfinished: tuple[Unfinished, ...] = ()
    lengths: Lengths = Lengths()
    max_tokens: int = 1024
    """Most tokens of one completion."""
    asked: bool = True
    """Whether the policy has been asked in this step before."""
    knows_generation: bool = True
    """Whether a generator has told how fast it decodes. Until then `speeds` has a guess."""

    @property
    def step_begins(self) -> bool:
        """Whether slots may go where a new step wants them: nothing of it is trained yet, or the policy has not been
        asked in it yet, as a change of the step before was still under way."""
        return not (self.asked and self.batch.trained)

    def of(self, role: Role) -> tuple[int, ...]:
        """The slots that hold the role, ready or not."""
        return tuple(slot.slot for slot in self.slots if role in slot.roles)

    def instances_of(self, role: Serving) -> tuple[Instance, ...]:
        return tuple(each for each in self.instances if each.role == role)

    @property
    def num_external(self) -> int:
        """Generators that are on no slot: external servers."""
        return sum(not each.slots for each in self.instances_of("generate"))

    def groups(self, role: Serving) -> tuple[tuple[int, ...], ...]:
        """Groups of slots that an instance of the role may be on."""
        return groups_of(role, self.home, (slot.slot for slot in self.slots), self.limits)

    @property
    def scorer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of slots that score by configuration, and are all there."""
        there = {slot.slot for slot in self.slots}
        groups = slot_groups(self.home.score, (), self.limits.slots_per_scorer)
        return tuple(group for group in groups if there.issuperset(group))

    def roles(self, slot: int) -> tuple[Role, ...]:
        return next(known.roles for known in self.slots if known.slot == slot)

    @property
    def lending(self) -> tuple[int, ...]:
        """The slots that lend their devices: those of the trainer that generate, where there is no memory for both."""
        if not self.limits.offloads:
            return ()
        return tuple(slot.slot for slot in self.slots if {"train", "generate"} <= {*slot.roles})

    @property
    def topology(self) -> Topology:
        """The nodes that the slots are on."""
        return self.trainer.rules.topology

    @property
    def usual_costs(self) -> SwitchCosts:
        """Costs of changes where it is not known which nodes they are between."""
        return self.costs.between(nodes=bool(self.topology.nodes))

    def has_weights_near(self, slots: Collection[int]) -> bool:
        """Return whether an instance that begins on these slots gets the weights from its own node."""
        return weights_are_near(self.topology, self.instances, self.trainer.layout, slots)

    def resize_s(self, slots: Iterable[int]) -> float:
        """Seconds that a resize of the trainer onto these slots takes from the work of its slots."""
        if not self.topology.nodes:
            return self.costs.resize_s
        spans = self.topology.spans((*self.trainer.layout.slots, *slots))
        return self.costs.between(nodes=spans).resize_s

    @property
    def return_s(self) -> float:
        """Seconds from the decision until a trainer whose slots lend their devices has its state back: the generators
        end first."""
        return self.costs.release_s + self.costs.unpark_s if self.limits.offloads else 0.0

    @property
    def ready(self) -> frozenset[int]:
        """The slots that orders may name."""
        return frozenset(slot.slot for slot in self.slots if slot.ready)

    @property
    def num_running(self) -> "Counter[InstanceId]":
        """Unfinished rollouts by generator."""
        return Counter(rollout.instance for rollout in self.unfinished)

    @property
    def micro_step_s(self) -> float:
        """Seconds of a full micro-step."""
        dims = self.trainer.layout.dims
        return self.speeds.train.seconds(self._micro_step_tokens, dims.num_data_parallel, dims.rank_shape)

    @property
    def _micro_step_tokens(self) -> int:
        """Tokens of a data-parallel rank in a full micro-step."""
        return self.trainer.seq_len * PipelineShape.of(self.trainer.layout).full_message

    @property
    def patience_s(self) -> float:
        """Seconds that new weights wait for slots which are about to generate or score: with what else a change costs
        the others, less than a micro-step."""
        return self.micro_step_s / 2

    @property
    def resize_wait_s(self) -> float:
        """Seconds from the decision until the trainer's slots can change: they prepare beside what they do, and half of
        the micro-step that then runs is left on average."""
        tokens = self.trainer.layout.num_data_parallel * self._micro_step_tokens
        micro_steps = 0.0 if self.trainer.held else min(0.5, self.batch.ready_tokens / tokens)
        return micro_steps * self.micro_step_s + self.costs.prepare_s

    @property
    def num_to_generate(self) -> int:
        """Rollouts that still need a generator: under way, or admitted."""
        return len(self.unfinished) + self.batch.to_start
