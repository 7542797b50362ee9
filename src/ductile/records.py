"""What flows round the RL loop.

    Prompt -> GenerateRequest -> Generation -> Rollout -> RolloutGroup -> Sample -> MicroBatch -> (gradient) -> Manifest

All of them are plain, immutable values without tensors. They cross process borders as msgpack
(`ductile.transport.codec`); they become tensors in `model.packed`, `trainer.collate` and `generator.engine`, and only
there.

What they keep of each token is a column (`ductile.columns`). A record may be made with any sequence in a column's
place, and makes a column of it. The columns of one record always have the same length; the record checks it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ductile.columns import Column, Floats, Mask, TokenIds, Versions
from ductile.sampling import Sampling

NO_TOKENS, NO_FLOATS, NO_VERSIONS, NO_MASK = TokenIds(), Floats(), Versions(), Mask()

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One example of a task, as the tokens that completions continue."""

    id: str
    """Unique in a run, and the same after a resume: `"train/0/17"` is epoch 0, example 17."""
    task: str
    example: int
    """Index into the task's data set; with it the task can score a completion."""
    token_ids: TokenIds

    def __post_init__(self) -> None:
        _keep_columns(self, token_ids=TokenIds)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to a generator for one sequence. `generated` holds the tokens that another generator, or this one
    earlier, has sampled for it already."""

    id: str
    prompt: TokenIds
    sampling: Sampling
    group: str = ""
    """Name of the request's rollout group; "" for none. Requests of one group share their prompt's cache blocks."""
    generated: TokenIds = NO_TOKENS
    logprobs: Floats = NO_FLOATS
    versions: Versions = NO_VERSIONS
    digests: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of each version in `versions`, as far as it is known."""
    priority: int = 0
    """Requests of higher priority run first."""
    num_turns: int = 0
    """Finished turns of the request's rollout; their tokens are part of `prompt`."""
    cache_salt: str = ""
    """Requests of different salts share no keys and values, whatever they have in common."""

    def __post_init__(self) -> None:
        _keep_columns(self, prompt=TokenIds, generated=TokenIds, logprobs=Floats, versions=Versions)
        if not len(self.generated) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"request {self.id}: {len(self.generated)} generated tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; the three must be equally long"
            )


@dataclass(frozen=True, slots=True)
class Generation:
    """What a generator returns: all tokens after the prompt, those of `GenerateRequest.generated` included."""

    id: str
    token_ids: TokenIds
    logprobs: Floats
    """Natural log, at the request's temperature, over the whole vocabulary: top-k, top-p and min-p say which tokens are
    drawn, not what is reported."""
    versions: Versions
    """The weight version each token was sampled from."""
    finish_reason: FinishReason
    digests: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of each version in `versions`, as far as the generator knows it (`ductile.messages.updates.Digest`)."""

    def __post_init__(self) -> None:
        _keep_columns(self, token_ids=TokenIds, logprobs=Floats, versions=Versions)
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"completion {self.id}: {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; the three must be equally long"
            )


RewardFailure = Literal["timeout", "lost", "raised", "wrong"]
"""Why a rollout has no reward: computing it took too long, its process ended, it raised, or it returned something
else."""
REWARD_FAILURES: tuple[RewardFailure, ...] = get_args(RewardFailure)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a prompt, with its reward. In a task of several turns it holds all turns, the environment's
    words too."""

    token_ids: TokenIds
    """All tokens after the prompt."""
    mask: Mask
    """True where the policy sampled the token: these are trained on."""
    logprobs: Floats
    versions: Versions
    """Weight version that each token was sampled from; -1 where the policy did not sample it."""
    finish_reason: FinishReason
    reward: float | None
    """Reward of the rollout; None when it could not be scored: it is not trained on then, and its siblings are compared
    without it."""
    metrics: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """Further numbers that the reward function reports; None for one that is not finite."""
    num_turns: int = 1
    error: str = ""
    """Why the rollout has no reward; "" when it has one."""
    failure: RewardFailure | None = None
    """What kind of failure `error` describes; None when `error` is ""."""
    digests: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of each version that a token was sampled from, as far as it is known."""

    def __post_init__(self) -> None:
        _keep_columns(self, token_ids=TokenIds, mask=Mask, logprobs=Floats, versions=Versions)
        if not len(self.token_ids) == len(self.mask) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"rollout of {len(self.token_ids)} tokens has {len(self.mask)} in its mask, {len(self.logprobs)} "
                f"log-probs and {len(self.versions)} versions"
            )

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return self.mask.count(True)

    @property
    def oldest_version(self) -> int:
        sampled = self.versions.array[self.mask.array]
        return int(sampled.min()) if len(sampled) else -1


@dataclass(frozen=True, slots=True)
class Completion:
    """What a reward function is given of a rollout: its last turn, and a few numbers of all turns."""

    text: str
    """The last turn, special tokens included, without the token or the stop string that ended it."""
    num_tokens: int = 0
    """Tokens that the policy sampled in the whole rollout, over all its turns."""
    finish_reason: FinishReason = "stop"
    num_turns: int = 1
    token_ids: Sequence[int] = ()
    """Tokens that were sampled in the last turn; empty when no reward function asks for them."""
    opened: str = ""
    """Beginning of `text` that the chat template has written, and the policy has not sampled: "<think>", for some."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of one prompt; advantages are computed inside it."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> int:
        return min((rollout.oldest_version for rollout in self.rollouts), default=-1)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, summed over the rollouts."""
        return sum(len(self.prompt.token_ids) + len(rollout.token_ids) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable token sequence.

    Position `i` of every list speaks about `token_ids[i]`: its log-prob is that of predicting it from what precedes
    it. `loss_mask[0]` is always False, as nothing precedes the first token.

    Example, prompt [5, 6], completion [7, 2], advantage 0.5:
        token_ids         5     6     7     2
        loss_mask         F     F     T     T
        rollout_logprobs  0     0    -.7   -.1
        advantages        0     0    .5    .5
        weights           0     0     1     1
    """

    token_ids: TokenIds
    loss_mask: Mask
    """True for the tokens that are trained on."""
    rollout_logprobs: Floats = NO_FLOATS
    """Log-probs at which the generator sampled the tokens. Empty in SFT."""
    advantages: Floats = NO_FLOATS
    """Advantage of each token, 0 where `loss_mask` is false. Empty in SFT."""
    weights: Floats = NO_FLOATS
    """Each token's share in the un-normalised loss: 1 for token-mean, 1/length for seq-mean. Empty means 1."""
    old_logprobs: Floats = NO_FLOATS
    """Log-probs under the trainer's numerics, which a scorer computed. Empty: the trainer takes `rollout_logprobs`."""
    ref_logprobs: Floats = NO_FLOATS
    """Log-probs of the reference model, which a scorer computed. Empty: the loss has no KL term."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        floats = ("rollout_logprobs", "advantages", "weights", "old_logprobs", "ref_logprobs")
        _keep_columns(self, token_ids=TokenIds, loss_mask=Mask, **dict.fromkeys(floats, Floats))
        n = len(self.token_ids)
        for name in floats:
            values = getattr(self, name)
            if values and len(values) != n:
                raise ValueError(f"sample of {n} tokens has {len(values)} {name}")
        if len(self.loss_mask) != n:
            raise ValueError(f"sample of {n} tokens has {len(self.loss_mask)} loss_mask")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Tokens that are trained on."""
        return self.loss_mask.count(True)

    @property
    def prompt(self) -> TokenIds | None:
        """The tokens before the first one that is trained on; None when none is."""
        return self.token_ids[: self.loss_mask.index(True)] if self.num_trained else None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that one rank runs forward and backward together, packed one after the other.

    With an empty micro-batch a rank takes part in the collectives without work of its own.
    """

    samples: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of one tensor in a published segment. `dtype` is torch's name without the prefix: "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    digest: str = ""
    """The tensor's part of the version's digest; "" where the transport has made none."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published weight version: what is in it, where it lies, and how to know that it arrived whole."""

    version: int
    carrier: Literal["shared_memory", "none"]
    location: str
    """`shared_memory`: a path that the receiver opens; `none`: nobody fetches it, as the trainer sends it
    (`ductile.messages.updates`)."""
    num_bytes: int
    fingerprint: int
    """64-bit fingerprint of all bytes in order (`ductile.fabric.segment`)."""
    tensors: tuple[TensorEntry, ...]
    digest: str = ""
    """Digest of the version (`ductile.messages.updates.Digest`); "" where the transport has made none."""
    is_whole: bool = True
    """All tensors are there. Else those that training does not change are missing: they are those that a
    receiver has already, and count in `digest`."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The form of conversations that a model is trained on, as the folder says it that the model is saved in."""

    templates: dict[str, str] = field(default_factory=dict[str, str])
    """Chat templates by name, "default" among them, in the place of all that the source has; empty where these are the
    ones."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the model's turn."""


AS_IN_SOURCE = ChatFormat()
"""The form that the model's own folder says."""


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Place where a generator keeps the keys and values of a request that has migrated."""

    location: str
    """Path of the segment, which the receiving generator opens."""
    num_tokens: int
    """Leading tokens of prompt and completion whose keys and values are in the segment."""
    num_bytes: int
    version: int
    """Weight version that the keys and values were computed with."""
    fingerprint: int
    """64-bit fingerprint of all bytes."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the trainer reports of one optimizer step. All ranks compute the same report."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    """Trained tokens (`loss_mask` 1) of all ranks together."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    flops: float = 0.0
    """Floating-point operations since the last step, all ranks together, as `ductile.core.layout.model.flops` counts
    them."""
    peak_flops_per_s: float | None = None
    """Peak speed of all ranks' devices together, each device counted once; None when the peak of one is not known."""


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """What a trainer's state has besides tensors. All but `sums` is the same on every rank."""

    step: int
    num_updates: int
    with_gradient: bool
    """Whether there is an accumulated gradient: the trainer was frozen in the middle of a global batch."""
    sums: dict[str, float] = field(default_factory=dict[str, float])
    """This rank's part of the loss and metrics since the last optimizer step; the parts add up over ranks."""


def both_digests(one: Mapping[int, str], other: Mapping[int, str]) -> dict[int, str]:
    """Return the digests by version of what has tokens of both. Where two sides call different weights by one version,
    its digest names both, which is that of no version."""
    both = {**one, **other}
    for version in one.keys() & other.keys():
        both[version] = " and ".join(sorted({one[version], other[version]} - {""}))
    return both


def _keep_columns(record: object, **kinds: type[Column[Any]]) -> None:
    """Make a column of each of these fields that was made with another sequence."""
    for name, kind in kinds.items():
        values = getattr(record, name)
        if not isinstance(values, kind):
            object.__setattr__(record, name, kind(values))
