"""Losses. Each takes what is known of every trained token and gives one number a token; the trainer weighs and sums.

Legend: A advantage; p probability under the weights in training, q when it was sampled, o under the weights before
this batch (from the scorer, or q); r = p/q or p/o; w = min(o/q, importance_cap).

    default  DPPO    -A r, unless p moved too far from q in A's direction;  + kl_tau (log p/q)^2
    ipo              the same, unless |p - q| is too large
    grpo     PPO     -w min(A r, A clip(r))
    sft              -log p

All but sft: where A < 0 and r > clip_ratio_c there is no gradient (dual clip), or one token that was all but
impossible when it was sampled could own the whole batch's;  + kl_coef k3(p, reference).

A scorer's o is of the newest weights, but tokens may be older: the clip then says how far one batch may move the
policy, and w corrects for who sampled the tokens (decoupled PPO). Without a scorer o is q, w is 1,
and the clip does both.

Every ratio is the exponential of a clamped log-ratio: a token that is dropped or weighs nothing still takes part in
the arithmetic, and 0 * inf would poison the whole gradient. Beyond the clamp a ratio has no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import log

import torch
from torch import Tensor

from ductile.config.reading.imports import import_object
from ductile.config.schema.trainer import (
    CustomLoss,
    DefaultLoss,
    GRPOLoss,
    IPOLoss,
    LossConfig,
    SFTLoss,
    needs_reference,
)

MAX_LOG_RATIO = 20.0
"""Cap on the log of a ratio. A ratio of 5e8 is far beyond what means anything, and far below what overflows."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The N trained tokens of one micro-batch, all tensors [N]. Only the first two have a gradient."""

    logprobs: Tensor
    """Log-probs under the weights in training."""
    entropies: Tensor
    """Entropy of the whole distribution that each token was drawn from, under the weights in training."""
    rollout_logprobs: Tensor
    """Log-probs that the generator reported; 0 in SFT."""
    old_logprobs: Tensor
    """Log-probs under the weights before the batch: the scorer's, or without one the generator's."""
    reference: Tensor | None
    """Log-probs of the reference model; None for a loss that has not asked for them."""
    advantages: Tensor
    sequences: Tensor
    """Index (int64) of the micro-batch's sample that the token belongs to."""

    @property
    def ref_logprobs(self) -> Tensor:
        """Log-probs of the reference model. Raises ValueError for a loss that has not asked for them."""
        if self.reference is None:
            raise ValueError(
                "the loss reads ref_logprobs and has not asked for them: write trainer.loss.needs_reference = true, "
                "and give the run a score slot"
            )
        return self.reference


@dataclass(frozen=True, slots=True)
class LossOutputs:
    loss: Tensor
    """Loss of each token [N]."""
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values of each metric [N], without gradient; their mean over all trained tokens is reported. The names must not
    depend on the tokens: ranks add up their metrics one by one."""


Loss = Callable[[LossInputs], LossOutputs]
"""Loss function. A custom one is called as `function(inputs, **kwargs)`. It may be called with made-up tokens, whose
result is thrown away, where a rank has none, or a stage of pp no loss."""


def make_loss(config: LossConfig) -> Loss:
    """The loss function that the config names. Raises ImportPathError when a custom one cannot be imported."""
    match config:
        case DefaultLoss() | IPOLoss():
            return partial(masked_policy_gradient, config=config)
        case GRPOLoss():
            return partial(ppo_clip, config=config)
        case SFTLoss():
            return negative_log_likelihood
        case CustomLoss():
            return partial(import_object(config.import_path), **config.kwargs)


def masked_policy_gradient(inputs: LossInputs, config: DefaultLoss | IPOLoss) -> LossOutputs:
    """The DPPO loss, and IPO: a token whose probability moved too far is masked, not clipped."""
    log_ratio = inputs.logprobs - inputs.rollout_logprobs
    change = (inputs.logprobs.exp() - inputs.rollout_logprobs.exp()).detach()
    if isinstance(config, IPOLoss):
        dropped = change.abs() > config.ipo_threshold
    else:
        too_high, too_low = change > config.dppo_mask_high, change < -config.dppo_mask_low
        dropped = torch.where(inputs.advantages > 0, too_high, too_low)
    dropped = dropped | _dual_clipped(config.clip_ratio_c, log_ratio, inputs.advantages)
    kept = -config.adv_tau * inputs.advantages * bounded_exp(log_ratio)
    loss = kept.masked_fill(dropped, 0.0) + config.kl_tau * log_ratio.square()
    return _with_reference_kl(LossOutputs(loss, {"masked_fraction": dropped.float()}), inputs, config.kl_coef)


def ppo_clip(inputs: LossInputs, config: GRPOLoss) -> LossOutputs:
    """PPO's clipped objective, with truncated importance sampling for who sampled the tokens."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = bounded_exp(log_ratio)
    plain = -inputs.advantages * ratio
    limited = -inputs.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    importance = bounded_exp(inputs.old_logprobs - inputs.rollout_logprobs).clamp(max=config.importance_cap)
    worse, beyond = torch.maximum(plain, limited), _dual_clipped(config.clip_ratio_c, log_ratio, inputs.advantages)
    if config.clip_ratio_c is not None:
        worse = torch.where(beyond, -inputs.advantages * config.clip_ratio_c, worse)
    loss = importance * worse
    metrics = {"clip_fraction": ((limited > plain) | beyond).float(), "importance": importance}
    return _with_reference_kl(LossOutputs(loss, metrics), inputs, config.kl_coef)


def negative_log_likelihood(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-inputs.logprobs, {"entropy": inputs.entropies.detach()})


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's third KL estimate: never negative, without bias when sampled from the denominator's distribution.

    Near 0 it is half the square of the log-ratio, which exp(x) - x - 1 would lose to rounding."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1() - log_ratio


def _dual_clipped(limit: float | None, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """True for a token that should become rarer and is more than `limit` times likelier: its gradient grows with r."""
    if limit is None:
        return torch.zeros_like(advantages, dtype=torch.bool)
    return (advantages < 0) & (log_ratio.detach() > log(limit))


def _with_reference_kl(outputs: LossOutputs, inputs: LossInputs, kl_coef: float) -> LossOutputs:
    """Add the KL term to the loss, and the metrics that all policy gradients report."""
    log_ratio = (inputs.logprobs - inputs.rollout_logprobs).detach()
    metrics = {**outputs.metrics, "entropy": inputs.entropies.detach(), "mismatch_kl": k3(log_ratio)}
    if not kl_coef:
        return LossOutputs(outputs.loss, metrics)
    kl = k3(inputs.ref_logprobs - inputs.logprobs)
    return LossOutputs(outputs.loss + kl_coef * kl, {**metrics, "kl_to_reference": kl.detach()})


def required_fields(config: LossConfig) -> tuple[str, ...]:
    """Which lists of a `Sample` this loss cannot do without: zeros in their place would be taken for log-probs."""
    if isinstance(config, SFTLoss):
        return ()
    return ("rollout_logprobs", "advantages", *(("ref_logprobs",) if needs_reference(config) else ()))
