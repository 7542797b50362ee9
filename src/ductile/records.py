"""What flows round the circle.

    Prompt -> GenerateRequest -> Generation -> Rollout -> RolloutGroup -> Sample -> MicroBatch -> (gradient) -> Manifest

All of them are plain, immutable values without tensors. They cross process borders as msgpack (`ductile.wire.codec`);
they become tensors in `ductile.trainer.collate` and `ductile.generator.engine`, and only there.

Per-token lists of one value always have the same length; `__post_init__` says so where it would hurt most.
"""

from dataclasses import dataclass, field
from itertools import compress
from typing import Literal, get_args

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Field names and meanings are those of the OpenAI API and its vLLM extensions."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all tokens."""
    min_p: float = 0.0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these; the token is part of the output, so that it can be trained on."""
    stop: tuple[str, ...] = ()
    """Generation ends when the decoded text contains one of these, with special tokens spelled out or without them."""
    seed: int | None = None
    """With a seed, the same request gives the same tokens, whatever else runs in the batch and across a hand-over."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Whether the text that is shown leaves out special tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, before anybody answers it."""

    id: str
    """Unique in a run, and the same after a resume: `"train/0/17"` is epoch 0, example 17."""
    task: str
    example: int
    """Index into the task's data set; with it the task can score an answer."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Ask a generator for one sequence. `generated` is what another generator (or an earlier life) produced already."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    group: str = ""
    """Members of a group share their prompt's cache blocks."""
    generated: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    priority: int = 0
    """Higher runs first."""
    num_turns: int = 0
    """Turns of its rollout that are finished; they are part of `prompt`."""

    def __post_init__(self) -> None:
        if not len(self.generated) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"request {self.id}: {len(self.generated)} generated tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; the three must be equally long"
            )


@dataclass(frozen=True, slots=True)
class Generation:
    """What a generator answers: all tokens after the prompt, those of `GenerateRequest.generated` included."""

    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log, at the request's temperature, over the whole vocabulary: top-k, top-p and min-p say which tokens are
    drawn, not what is reported."""
    versions: tuple[int, ...]
    """The weight version each token was sampled from."""
    finish_reason: FinishReason


RewardFailure = Literal["timeout", "lost", "raised", "wrong"]
"""How there came to be no reward: it took too long, its process ended, it raised, it returned something else."""
REWARD_FAILURES: tuple[RewardFailure, ...] = get_args(RewardFailure)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer to a prompt, scored. In a task of several turns it holds all turns, the environment's words too."""

    token_ids: tuple[int, ...]
    """After the prompt."""
    mask: tuple[bool, ...]
    """True where the policy sampled the token: these are trained on."""
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """-1 where the policy did not sample."""
    finish_reason: FinishReason
    reward: float | None
    """None: it could not be scored. Such a rollout is not trained on, and its siblings are compared without it."""
    metrics: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """What the reward reports besides. None: it was no finite number."""
    num_turns: int = 1
    error: str = ""
    """Why there is no reward."""
    failure: RewardFailure | None = None
    """Set where `error` is."""

    @property
    def oldest_version(self) -> int:
        return min(compress(self.versions, self.mask), default=-1)


@dataclass(frozen=True, slots=True)
class Completion:
    """What a reward is told of the policy's last words."""

    text: str
    """Without the stop string that ended it."""
    num_tokens: int = 0
    """Sampled in the whole rollout, over all its turns."""
    finish_reason: FinishReason = "stop"
    num_turns: int = 1
    token_ids: tuple[int, ...] = ()
    """Of the last turn; empty when no reward asks for them."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All answers to one prompt; advantages are computed inside it."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> int:
        return min((rollout.oldest_version for rollout in self.rollouts), default=-1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable token sequence.

    Position `i` of every list speaks about `token_ids[i]`: its log-prob is that of predicting it from what precedes
    it. `mask[0]` is always False, as nothing precedes the first token.

    Example, prompt [5, 6], answer [7, 2], advantage 0.5:
        token_ids   5     6     7     2
        mask        F     F     T     T
        logprobs    0     0    -.7   -.1
        advantages  0     0    .5    .5
        weights     0     0     1     1
    """

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...] = ()
    """As the generator sampled them. Empty in SFT."""
    advantages: tuple[float, ...] = ()
    """Empty in SFT."""
    weights: tuple[float, ...] = ()
    """Each token's share in the un-normalised loss: 1 for token-mean, 1/length for seq-mean. Empty means 1."""
    old_logprobs: tuple[float, ...] = ()
    """Under trainer numerics, from the scorer. Empty: the generator's are used."""
    ref_logprobs: tuple[float, ...] = ()
    """Of the reference model, from the scorer. Empty: no KL term."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("mask", "logprobs", "advantages", "weights", "old_logprobs", "ref_logprobs"):
            values = getattr(self, name)
            if values and len(values) != n:
                raise ValueError(f"sample of {n} tokens has {len(values)} {name}")
        if len(self.mask) != n:
            raise ValueError(f"sample of {n} tokens has {len(self.mask)} mask entries")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that one rank runs forward and backward together, packed one after the other.

    An empty one is a rank's turn in the collectives without work of its own.
    """

    samples: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in a published segment. `dtype` is torch's name without the prefix: "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published weight version: what is in it, where it lies, and how to know that it arrived whole."""

    version: int
    carrier: Literal["shared_memory", "disk"]
    location: str
    """`shared_memory`: a path that the receiver opens; `disk`: an HF folder."""
    num_bytes: int
    fingerprint: int
    """64-bit, over all bytes in order (`ductile.fabric.segment`)."""
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class CacheNote:
    """Where a generator keeps the keys and values of a request that it has handed off."""

    location: str
    """A path that the receiver opens."""
    num_tokens: int
    """Leading tokens of prompt and answer that are in it."""
    num_bytes: int
    version: int
    """The weights it was computed under."""
    fingerprint: int
    """64-bit, over all bytes."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the trainer says of one optimizer step. All ranks compute the same one."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    """Trained tokens (mask true), all ranks together."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    flops: float = 0.0
    """Floating-point operations since the last step, all ranks together, as `ductile.core.layout.flops` counts them."""
    peak_flops_per_s: float | None = None
    """At best, of all ranks' devices together, each counted once; None where one is not known."""


@dataclass(frozen=True, slots=True)
class Formation:
    """The slots that train together, in rank order, and how the state lies on them.

    `replicas` whole copies of the state, each sharded over `len(members) / replicas` slots (HSDP); 1 is FSDP. The
    members of one copy are neighbours.
    """

    members: tuple[int, ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"a formation needs each of its slots once, got {self.members}")
        if self.replicas < 1 or len(self.members) % self.replicas:
            raise ValueError(f"{len(self.members)} slots cannot hold {self.replicas} equal copies of the state")


@dataclass(frozen=True, slots=True)
class Change:
    """A resize of the trainer, as the orchestrator decided it. Every slot of both formations gets the same one."""

    epoch: int
    """Of the new membership. A failed change's number is not used again."""
    before: Formation
    after: Formation

    @property
    def slots(self) -> tuple[int, ...]:
        """All that take part, in ascending order."""
        return tuple(sorted({*self.before.members, *self.after.members}))

    @property
    def joiners(self) -> tuple[int, ...]:
        return tuple(slot for slot in self.after.members if slot not in self.before.members)

    @property
    def leavers(self) -> tuple[int, ...]:
        return tuple(slot for slot in self.before.members if slot not in self.after.members)


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """What a trainer's state has besides tensors. All but `sums` is the same on every rank."""

    step: int
    num_updates: int
    with_gradient: bool
    """There is an accumulated gradient: the freeze is in the middle of a global batch."""
    sums: dict[str, float] = field(default_factory=dict[str, float])
    """This rank's part of the loss and metrics since the last optimizer step; they add up over ranks."""
