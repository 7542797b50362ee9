"""Lengths that follow from the model's config.json, and what the KV cache holds on this machine."""

from pathlib import Path
from typing import TypeVar, cast

from ductile import host
from ductile.config.inference import InferenceConfig
from ductile.config.on_disk import read_spec
from ductile.config.orchestrator import OrchestratorConfig
from ductile.config.run import InferenceRunConfig, RLConfig
from ductile.config.section import Section
from ductile.core.cache_size import cpu_cache_bytes, token_bytes
from ductile.core.layout.spec import ModelSpec

S = TypeVar("S", bound=Section)


def follow(config: S) -> tuple[S, tuple[str, ...]]:
    """The config, its lengths as the model has them where the user wrote none, and a sentence for each that changed."""
    if isinstance(config, RLConfig):
        return cast("tuple[S, tuple[str, ...]]", _rl(config))
    if isinstance(config, InferenceRunConfig):
        return cast("tuple[S, tuple[str, ...]]", _inference(config))
    return config, ()


def _rl(config: RLConfig) -> tuple[RLConfig, tuple[str, ...]]:
    """A rollout is trained on as a whole, so its length is bounded by what a micro-batch takes, too."""
    trainer, inference = config.trainer.model, config.inference.model
    reasons: list[str] = []
    spec = read_spec(trainer.name)
    if spec is not None and "max_model_len" not in inference.model_fields_set:
        bounds = [inference.max_model_len, spec.max_position]
        bounds += [trainer.seq_len] if "seq_len" in trainer.model_fields_set else []
        if (length := max(2, min(bounds))) != inference.max_model_len:
            inference = inference.model_copy(update={"max_model_len": length})
            said = "trainer.model.seq_len" if length != spec.max_position else "the model's max_position_embeddings"
            reasons.append(f"inference.model.max_model_len = {length}: {said}")
    if "seq_len" not in trainer.model_fields_set and inference.max_model_len > trainer.seq_len:
        trainer = trainer.model_copy(update={"seq_len": inference.max_model_len})
        reasons.append(f"trainer.model.seq_len = {trainer.seq_len}: inference.model.max_model_len, a whole completion")
    orchestrator = _short_enough(config.orchestrator, inference.max_model_len, reasons)
    parts = {
        "orchestrator": orchestrator,
        "trainer": config.trainer.model_copy(update={"model": trainer}),
        "inference": config.inference.model_copy(update={"model": inference}),
    }
    return (config.model_copy(update=parts) if reasons else config), tuple(reasons)


def _short_enough(config: OrchestratorConfig, max_model_len: int, reasons: list[str]) -> OrchestratorConfig:
    """Completions get half of what a sequence may have, where the user does not say how long they are and the
    default is too long."""
    most = max(1, max_model_len // 2)
    if "max_tokens" not in config.sampling.model_fields_set and config.sampling.max_tokens >= max_model_len:
        config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_tokens": most})})
        reasons.append(f"orchestrator.sampling.max_tokens = {most}: half of inference.model.max_model_len")
    evaluated = config.eval.sampling
    if "max_tokens" not in evaluated.model_fields_set and evaluated.max_tokens != config.sampling.max_tokens:
        evaluated = evaluated.model_copy(update={"max_tokens": config.sampling.max_tokens})
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"sampling": evaluated})})
    return config


def _inference(config: InferenceRunConfig) -> tuple[InferenceRunConfig, tuple[str, ...]]:
    spec = read_spec(config.model.name)
    if spec is None or "max_model_len" in config.model.model_fields_set:
        return config, ()
    length, why = spec.max_position, "the model's max_position_embeddings"
    cache = cache_tokens(config, spec, config.cluster.device)
    if cache is not None and cache[0] < length:
        length, why = max(2, cache[0]), f"what the KV cache holds; the model's max_position_embeddings are {length}"
    model = config.model.model_copy(update={"max_model_len": length})
    return config.model_copy(update={"model": model}), (f"model.max_model_len = {length}: {why}",)


def cache_tokens(config: InferenceConfig, spec: ModelSpec, device: str) -> tuple[int, str] | None:
    """Tokens that the cache may hold at most, and what decided it; None where that is known only on the GPU, when the
    model is loaded.

    device: `cluster.device`.
    """
    if config.num_blocks is not None:
        return config.num_blocks * config.block_size, "num_blocks"
    maybe_gpu = device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())
    if config.cache_memory_gib is not None:
        cache_bytes, why = int(config.cache_memory_gib * 2**30), "cache_memory_gib"
    elif maybe_gpu:
        return None
    else:
        cache_bytes, why = cpu_cache_bytes(host.memory_bytes())
    narrow = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and maybe_gpu)
    block_bytes = token_bytes(spec, 2 if narrow else 4) * config.block_size
    return cache_bytes // block_bytes * config.block_size, why
