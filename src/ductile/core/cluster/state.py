"""What a policy sees: who has which slot, what is under way, what is left to do, and how fast things go.

Plain values of one instant; the time is among them. `loop` and `sim` fill them in, `policies/` decide on them, tests
write them down by hand.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from ductile.core.cluster.cost import Speeds, SwitchCosts
from ductile.core.cluster.placement import Placement, Role
from ductile.records import Formation

IN_FLIGHT = 2
"""Micro-steps: one that runs and one that waits in the slots. More would only make a change wait for longer."""


@dataclass(frozen=True, slots=True)
class SlotState:
    slot: int
    roles: tuple[Role, ...]
    """What it holds, in the order train, generate, score. Both train and generate: it decodes between micro-steps."""
    since_s: float = 0.0
    """When it got these roles."""
    ready: bool = True
    """False while it changes roles, warms up or is suspect: no order may name it."""


class Unfinished(NamedTuple):
    """A rollout that some generator is working on, or has in its queue.

    A tuple, because it is made three times as fast as a frozen dataclass: a state of 1,024 slots has 50,000 of them."""

    id: str
    slot: int
    prompt_tokens: int
    """Everything before this turn's first token."""
    generated: int
    """Tokens of this turn so far."""
    limit: int
    """The most tokens that this turn may have."""
    group: str = ""
    num_turns: int = 0
    """Finished ones."""

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class Batch:
    """Where the step that is being trained stands. Everything is counted in rollouts, unless it says tokens."""

    step: int
    num_rollouts: int
    """That the step trains on."""
    group_size: int = 1
    trained: int = 0
    ready: int = 0
    """Finished, in whole groups, scored where there is a scorer: the trainer can have them. Those of later steps too,
    when generation runs ahead."""
    ready_tokens: int = 0
    """Prompts and answers of `ready`."""
    partial: int = 0
    """Finished, while siblings of their groups are not."""
    partial_tokens: int = 0
    to_score: int = 0
    to_score_tokens: int = 0
    to_start: int = 0
    """The staleness bound admits them, and no generator has them yet."""
    update: int = 0
    num_updates: int = 1
    """Optimizer steps of the batch; `update` are done."""
    steps_left: int = 1
    """This one included; 0 after the last."""
    steps_ahead: int = 0
    """Steps that generation may run ahead of this one."""

    @property
    def left(self) -> int:
        return self.num_rollouts - self.trained

    @property
    def missing(self) -> int:
        """Of what the step trains on: not yet generated, or waiting for siblings. What only has to be scored is
        `unscored`, and not missing."""
        return max(0, self.left - self.ready - self.to_score)

    @property
    def unscored(self) -> int:
        """Of what the step trains on: generated, and still to be scored. A trainer that is held may wait for it: all
        that the optimizer step wants is scored meanwhile, and not only the next chunk."""
        return max(0, self.left - self.ready - self.missing)

    @property
    def all_scored(self) -> bool:
        """Nothing is left to score, and nothing will be: what waits for its rewards only is still to come."""
        return not self.to_score and not self.missing

    @property
    def last_update(self) -> bool:
        """What is left is the last optimizer step's share, which is none larger than the others'; of a batch with one
        optimizer step, the last quarter."""
        if self.num_updates == 1:
            return self.left <= self.num_rollouts / 4
        return self.left <= self.num_rollouts // self.group_size // self.num_updates * self.group_size


@dataclass(frozen=True, slots=True)
class TrainerState:
    formation: Formation
    at_boundary: bool = True
    """Between two micro-steps: only now may its slots change."""
    held: bool = False
    """A decision lets it wait."""
    seq_len: int = 2048
    """Tokens of a slot's micro-step."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What no decision may break."""

    min_train: int = 1
    """Slots that hold the trainer's state, at any time. At least 1: it has to be somewhere."""
    min_generate: int = 1
    """Generators, while there is anything to generate."""
    min_score: int = 0
    """Scorers, while there is anything to score; 0 for a run without."""
    max_num_seqs: int = 64
    """Of one generator."""
    may_share: bool = True
    """A train slot may hold a generator besides: there is memory for both."""


def may_share(placement: Placement, *, on_gpu: bool) -> bool:
    """Whether a train slot has memory for a generator besides, in a run with this placement.

    A slot on a CPU has. A GPU has where the configuration has the two roles share slots: elsewhere nobody has said that
    both fit, and nothing is offloaded.
    """
    return not on_gpu or placement.shares


@dataclass(frozen=True, slots=True)
class Lengths:
    """Answers' lengths in tokens, as far as seen."""

    ended: tuple[int, ...] = ()
    """Those that the model ended, of late."""
    cut: tuple[int, ...] = ()
    """Those that hit their limit: they would have been longer."""
    prompt_mean: float = 0.0
    """Tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    now_s: float
    slots: tuple[SlotState, ...]
    """Of the current members, in ascending order."""
    batch: Batch
    trainer: TrainerState
    speeds: Speeds
    costs: SwitchCosts
    home: Placement
    """What the configuration gave each role: where `rules` returns to after each step."""
    limits: Limits = Limits()
    unfinished: tuple[Unfinished, ...] = ()
    lengths: Lengths = Lengths()
    max_tokens: int = 1024
    """The most tokens of one answer."""
    asked: bool = True
    """The policy has been asked in this step before."""

    @property
    def step_begins(self) -> bool:
        """Slots may go where a new step wants them: nothing of it is trained yet; or it is, as a change of the step
        before was still under way, and nobody has been asked in this one."""
        return not (self.asked and self.batch.trained)

    def of(self, role: Role) -> tuple[int, ...]:
        """The slots that hold the role, ready or not."""
        return tuple(slot.slot for slot in self.slots if role in slot.roles)

    def roles(self, slot: int) -> tuple[Role, ...]:
        return next(known.roles for known in self.slots if known.slot == slot)

    @property
    def ready(self) -> frozenset[int]:
        """The slots that orders may name."""
        return frozenset(slot.slot for slot in self.slots if slot.ready)

    @property
    def num_running(self) -> "Counter[int]":
        """Unfinished rollouts by slot."""
        return Counter(rollout.slot for rollout in self.unfinished)

    @property
    def micro_step_s(self) -> float:
        """Of a full one."""
        return self.speeds.train.seconds(self.trainer.seq_len, len(self.trainer.formation.members))

    @property
    def patience_s(self) -> float:
        """That new weights wait for slots which are about to generate or score: with what else a change costs the
        others, less than a micro-step."""
        return self.micro_step_s / 2

    @property
    def resize_wait_s(self) -> float:
        """From the decision until the trainer's slots can change: messages wait for the micro-steps that were sent
        before, on average for half of the one that runs, and the slots say once more that they are ready."""
        slots, seq_len = len(self.trainer.formation.members), self.trainer.seq_len
        micro_steps = 0.0 if self.trainer.held else min(IN_FLIGHT + 0.5, self.batch.ready_tokens / (slots * seq_len))
        return micro_steps * self.micro_step_s + self.costs.prepare_s

    @property
    def num_to_generate(self) -> int:
        """Rollouts that still need a generator: under way, or admitted."""
        return len(self.unfinished) + self.batch.to_start
