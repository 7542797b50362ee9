"""Losses. Each takes what is known of every trained token and gives one number a token; the trainer weighs and sums.

Legend: A advantage; p probability under the weights in training, q when it was sampled, o under the weights before
this batch (from the scorer, or q); r = p/q or p/o; w = min(o/q, importance_cap).

    default  DPPO    -A r, unless p moved too far from q in A's direction;  + kl_tau (log p/q)^2
    ipo              the same, unless |p - q| is too large
    grpo     PPO     -w min(A r, A clip(r));  + kl_coef k3(p, reference)
    sft              -log p

A scorer's o is of the newest weights, but tokens may be older: the clip then says how far one batch may move the
policy, and w corrects for who sampled the tokens (decoupled PPO). Without a scorer o is q, w is 1,
and the clip does both.

Every ratio is the exponential of a clamped log-ratio: a token that is dropped or weighs nothing still takes part in
the arithmetic, and 0 * inf would poison the whole gradient. Beyond the clamp a ratio has no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ductile.config.imports import import_object
from ductile.config.trainer import CustomLoss, DefaultLoss, GRPOLoss, IPOLoss, LossConfig, SFTLoss

MAX_LOG_RATIO = 20.0
"""A ratio of 5e8: far beyond what means anything, far below what overflows."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The N trained tokens of one micro-batch, all tensors [N]. Only `logprobs` has a gradient."""

    logprobs: Tensor
    """Under the weights in training."""
    entropies: Tensor
    sampled_logprobs: Tensor
    """As the generator reported them; 0 in SFT."""
    old_logprobs: Tensor
    """From the scorer, or else the generator's."""
    ref_logprobs: Tensor
    """Of the reference model; 0 where a sample has none."""
    advantages: Tensor
    sequences: Tensor
    """int64: which of the micro-batch's samples the token belongs to."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    loss: Tensor
    """[N]"""
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """[N] each, without gradient; reported as the mean over all trained tokens. The names
    must not depend on the tokens: ranks add up their metrics one by one."""


Loss = Callable[[LossInputs], LossOutputs]
"""A custom one is called as `function(inputs, **kwargs)`. It may be called with made-up tokens, whose result is thrown
away, where a rank has none."""


def make_loss(config: LossConfig) -> Loss:
    """Raises ImportPathError when a custom loss cannot be imported."""
    match config:
        case DefaultLoss() | IPOLoss():
            return partial(policy_gradient, config=config)
        case GRPOLoss():
            return partial(clipped, config=config)
        case SFTLoss():
            return negative_log_likelihood
        case CustomLoss():
            return partial(import_object(config.import_path), **config.kwargs)


def policy_gradient(inputs: LossInputs, config: DefaultLoss | IPOLoss) -> LossOutputs:
    log_ratio = inputs.logprobs - inputs.sampled_logprobs
    change = (inputs.logprobs.exp() - inputs.sampled_logprobs.exp()).detach()
    if isinstance(config, IPOLoss):
        dropped = change.abs() > config.ipo_threshold
    else:
        too_high, too_low = change > config.dppo_mask_high, change < -config.dppo_mask_low
        dropped = torch.where(inputs.advantages > 0, too_high, too_low)
    kept = -config.adv_tau * inputs.advantages * bounded_exp(log_ratio)
    loss = kept.masked_fill(dropped, 0.0) + config.kl_tau * log_ratio.square()
    return LossOutputs(loss, {"masked_fraction": dropped.float(), **_common_metrics(inputs)})


def clipped(inputs: LossInputs, config: GRPOLoss) -> LossOutputs:
    ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
    plain = -inputs.advantages * ratio
    limited = -inputs.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    importance = bounded_exp(inputs.old_logprobs - inputs.sampled_logprobs).clamp(max=config.importance_cap)
    loss = importance * torch.maximum(plain, limited)
    metrics = {"clip_fraction": (limited > plain).float(), "importance": importance, **_common_metrics(inputs)}
    if config.kl_coef:
        kl = k3(inputs.ref_logprobs - inputs.logprobs)
        metrics["kl_to_reference"] = kl.detach()
        loss = loss + config.kl_coef * kl
    return LossOutputs(loss, metrics)


def negative_log_likelihood(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-inputs.logprobs, {"entropy": inputs.entropies})


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's third KL estimate: never negative, without bias when sampled from the denominator's distribution."""
    return bounded_exp(log_ratio) - log_ratio - 1


def _common_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    log_ratio = (inputs.logprobs - inputs.sampled_logprobs).detach()
    return {"entropy": inputs.entropies, "mismatch_kl": k3(log_ratio)}


def required_fields(config: LossConfig) -> tuple[str, ...]:
    """Which lists of a `Sample` this loss cannot do without."""
    match config:
        case DefaultLoss() | IPOLoss():
            return ("logprobs", "advantages")
        case GRPOLoss():
            return ("logprobs", "advantages", "ref_logprobs") if config.kl_coef else ("logprobs", "advantages")
        case SFTLoss() | CustomLoss():
            return ()
