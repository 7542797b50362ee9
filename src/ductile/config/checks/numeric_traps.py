"""Settings that are accepted and do not do what they say, by the arithmetic of number formats and formulas.

Each trap is a sentence with the numbers. What cannot be computed from the config and the weights is no trap.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, log2, sqrt
from pathlib import Path
from typing import Literal

from ductile.config.checks.device_kind import device_kind
from ductile.config.checks.on_disk import read_spec
from ductile.config.checks.weight_headers import CONFIG, dtype_of_weights, read_json, weights_of
from ductile.config.schema.model import TrainerModelConfig
from ductile.config.schema.orchestrator import JsonlTask, OrchestratorConfig
from ductile.config.schema.run import RLConfig, SFTConfig, TrainerRunConfig
from ductile.config.schema.trainer import (
    AdamWConfig,
    ConstantSchedule,
    DefaultLoss,
    GRPOLoss,
    IPOLoss,
    LossConfig,
    MuonConfig,
    OptimConfig,
    SGDConfig,
)
from ductile.core.layout.model.peak import compute_dtype
from ductile.core.layout.model.spec import ModelSpec

SIGNIFICANT_BITS = {"float32": 24, "bfloat16": 8}
WORTH_A_WORD = 0.1
"""Least share of the weights that stand still which is told."""


def numeric_traps(config: RLConfig | SFTConfig | TrainerRunConfig) -> Iterator[str]:
    """A sentence for each trap of the config."""
    trainer, root = (config.trainer, "trainer.") if isinstance(config, RLConfig) else (config, "")
    model, optim = trainer.model, trainer.optim
    if (found := read_spec(model.name)) is not None:
        spec = replace(found, lora=model.adapters)
        if spec.lora is None:  # adapters begin at zero
            yield from _lost_updates(model, optim, spec, root)
        if isinstance(optim, AdamWConfig):
            yield from _large_eps(optim, spec, root)
    if isinstance(optim, AdamWConfig | MuonConfig):
        yield from _lost_in_adam(optim, model.optimization_dtype, root)
    if not isinstance(optim, SGDConfig):  # which adds the decay to the gradient, and rounds their sum
        yield from _lost_decay(optim, model.optimization_dtype, root)
    if not isinstance(trainer.scheduler, ConstantSchedule) and trainer.scheduler.min_lr > optim.lr:
        at = f"{root}scheduler.min_lr = {trainer.scheduler.min_lr:g}"
        yield f"{at} is above {root}optim.lr = {optim.lr:g}: what is called decay makes the learning rate rise"
    yield from _stored_dtypes(config, model, root)
    if isinstance(config, RLConfig):
        yield from _in_loss(config.trainer.loss, "trainer.loss")
        yield from _between_engines(config)
        yield from _in_rollouts(config.orchestrator)
    elif isinstance(config, TrainerRunConfig):
        yield from _in_loss(config.loss, "loss")


def _lost_updates(model: TrainerModelConfig, optim: OptimConfig, spec: ModelSpec, root: str) -> Iterator[str]:
    if isinstance(optim, SGDConfig):
        if optim.max_norm is None:
            return
        step, called = optim.lr * optim.max_norm / (1 - optim.momentum), "of at most lr max_norm / (1 - momentum)"
    else:
        step, called = optim.lr, "of about lr"
    dtype, bits = model.optimization_dtype, SIGNIFICANT_BITS[model.optimization_dtype]
    if step >= 2.0**-bits:  # less than half of the distance from any number below 1 to the next
        return
    weights = None if model.debug.random_init else weights_of(Path(model.name or ""))
    from ductile.config.checks.weight_numbers import drawn, sampled, share_standing_still  # loads numpy

    share = share_standing_still(sampled(weights) if weights else drawn(spec.initializer_range), step, bits)
    if share < WORTH_A_WORD:
        return
    largest = 2.0 ** ceil(bits + log2(step)) if step else 0.0  # a product may be below all floats
    instead = 'Write "float32"' if dtype == "bfloat16" else f"Write a larger {root}optim.lr"
    yield (
        f'{root}model.optimization_dtype = "{dtype}" has {bits} significant bits, so that a step {called} = {step:g} '
        f"rounds away for each weight of {largest:.2g} or more: about {share:.0%} of the model's weights, which never "
        f"move. {instead}"
    )


def _lost_in_adam(optim: AdamWConfig | MuonConfig, dtype: Literal["float32", "bfloat16"], root: str) -> Iterator[str]:
    kept = _rounded_away(dtype)
    if not (isinstance(optim, AdamWConfig) and optim.moments == "8bit") and 1 - optim.betas2 < kept:
        yield (
            f"{root}optim.betas2 = {optim.betas2:g} lets the second moment fall by {1 - optim.betas2:.2g} of itself a "
            f"step, and {dtype}, which {root}model.optimization_dtype has it kept in, rounds away what is below "
            f'{kept:.2g}: it never falls. Write "float32", or betas2 of at most {1 - 2 * kept:.3g}'
        )


def _lost_decay(optim: OptimConfig, dtype: Literal["float32", "bfloat16"], root: str) -> Iterator[str]:
    kept = _rounded_away(dtype)
    if "weight_decay" in optim.model_fields_set and 0 < optim.lr * optim.weight_decay < kept:
        yield (
            f"{root}optim.weight_decay = {optim.weight_decay:g} has no effect: a step takes lr weight_decay = "
            f"{optim.lr * optim.weight_decay:.2g} of a weight, and {dtype} rounds away what is below {kept:.2g}"
        )


def _rounded_away(dtype: Literal["float32", "bfloat16"]) -> float:
    """A number times (1 - x) is rounded back to the number for every x below this."""
    return 2.0 ** -(SIGNIFICANT_BITS[dtype] + 1)


def _large_eps(optim: AdamWConfig, spec: ModelSpec, root: str) -> Iterator[str]:
    if optim.max_norm is None:
        return
    each = optim.max_norm / sqrt(spec.num_trained)
    if optim.eps >= each:
        yield (
            f"{root}optim.eps = {optim.eps:g} outweighs the gradient: clipped to {root}optim.max_norm = "
            f"{optim.max_norm:g} it has {each:.2g} for each of {spec.num_trained:,} weights, so that steps are "
            f"{each / (each + optim.eps):.2g} of lr"
        )


def _stored_dtypes(
    config: RLConfig | SFTConfig | TrainerRunConfig, model: TrainerModelConfig, root: str
) -> Iterator[str]:
    """Yield what is rounded where weights are read and written."""
    if model.name is None or model.debug.random_init or (found := dtype_of_weights(Path(model.name))) is None:
        return
    if model.optimization_dtype == "bfloat16" and found != "bfloat16":
        yield (
            f'{root}model.optimization_dtype = "bfloat16" rounds the weights of {model.name}, which are {found}, when '
            f"they are read"
        )
    hf = read_json(Path(model.name) / CONFIG)
    said = hf.get("dtype", hf.get("torch_dtype"))
    checkpoint = None if isinstance(config, TrainerRunConfig) else config.ckpt
    goes_by_weights = checkpoint is not None and checkpoint.export_model and checkpoint.export_dtype == "auto"
    if goes_by_weights and said not in (None, found):
        yield (
            f'{model.name}/{CONFIG} says {said}, and the weights are {found}: ckpt.export_dtype = "auto" goes by the '
            f"weights"
        )


def _in_loss(loss: LossConfig, at: str) -> Iterator[str]:
    if isinstance(loss, DefaultLoss | IPOLoss) and loss.adv_tau == 0:
        yield f"{at}.adv_tau = 0: advantages count for nothing, and so do rewards"
    never = "a probability changes by less than 1, so that no token is dropped"
    if isinstance(loss, DefaultLoss):
        limits = {"dppo_mask_low": loss.dppo_mask_low, "dppo_mask_high": loss.dppo_mask_high}
        yield from (f"{at}.{key} = {value:g} has no effect: {never}" for key, value in limits.items() if value >= 1)
    elif isinstance(loss, IPOLoss) and loss.ipo_threshold >= 1:
        yield f"{at}.ipo_threshold = {loss.ipo_threshold:g} has no effect: {never}"
    elif isinstance(loss, GRPOLoss) and loss.clip_low >= 1:
        yield f"{at}.clip_low = {loss.clip_low:g} has no effect: a ratio is never below {1 - loss.clip_low:g}"


def _between_engines(config: RLConfig) -> Iterator[str]:
    device = device_kind(config.cluster.device)
    trainer, name = config.trainer.model.compute_dtype, config.inference.model.dtype
    ours, theirs = compute_dtype(trainer, device), compute_dtype(None if name == "auto" else name, device)
    if ours != theirs:
        yield (
            f"trainer.model.compute_dtype is {ours} and inference.model.dtype is {theirs}: bfloat16 rounds weights and "
            f"activations by up to {2.0**-9:.1%}, so that the generators sample from another distribution than the one "
            f"that is trained. train/mismatch_kl tells how far it is. Write the same for both"
        )
    elif ours == "bfloat16" and config.trainer.model.fp32_lm_head != config.inference.model.fp32_lm_head:
        at = ("trainer", "inference") if config.trainer.model.fp32_lm_head else ("inference", "trainer")
        yield (
            f"{at[0]}.model.fp32_lm_head is true and {at[1]}.model.fp32_lm_head is false: one side rounds logits to "
            f"bfloat16, by up to {2.0**-9:.1%}. train/mismatch_kl tells how far that is. Write the same for both"
        )


def _in_rollouts(config: OrchestratorConfig) -> Iterator[str]:
    at, task = "orchestrator.", config.task
    if config.advantage.type == "grpo" and config.rollouts_per_example == 2:
        yield (
            f'{at}advantage.type = "grpo" with {at}rollouts_per_example = 2: the deviation of two rewards is their '
            f"difference over sqrt(2), so that advantages are +-{sqrt(0.5):.2f}, by whatever the rewards differ"
        )
    if isinstance(task, JsonlTask) and task.reward_weights and not any(task.reward_weights):
        yield f"{at}task.reward_weights are all 0: so is every reward, and every advantage"
    if config.sampling.ignore_eos:
        yield (
            f"{at}sampling.ignore_eos = true: completions go on to max_tokens behind their end, and all of that is "
            "trained on"
        )
    evaluation = config.eval
    if evaluation.enabled and evaluation.samples_per_example > 1 and evaluation.sampling.temperature == 0:
        yield (
            f"{at}eval.samples_per_example = {evaluation.samples_per_example} with {at}eval.sampling.temperature = 0: "
            "greedy completions of one prompt are all the same, and pass@k is pass@1"
        )
