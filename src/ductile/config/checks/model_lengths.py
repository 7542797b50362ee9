"""Lengths that follow from the model's config.json, and what the KV cache holds on this machine."""

from collections.abc import Iterator
from typing import TypeVar

from ductile import host
from ductile.config.checks.device_kind import device_kind
from ductile.config.checks.on_disk import read_spec
from ductile.config.reading.derive import Derived, fill_in
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.run import InferenceRunConfig, RLConfig
from ductile.config.schema.section import Section
from ductile.core.cache_size import cpu_cache_bytes, token_bytes
from ductile.core.layout.model.spec import ModelSpec

S = TypeVar("S", bound=Section)


def follow(config: S) -> tuple[S, tuple[str, ...]]:
    """The config, its lengths as the model has them where the user wrote none, and a sentence for each that changed."""
    if isinstance(config, RLConfig):
        return fill_in(config, _rl(config))
    return fill_in(config, _inference(config) if isinstance(config, InferenceRunConfig) else ())


def _rl(config: RLConfig) -> Iterator[Derived]:
    """A rollout is trained on as a whole, so its length is bounded by what a micro-batch takes, too."""
    trainer, inference, sampling = config.trainer.model, config.inference.model, config.orchestrator.sampling
    spec, length, max_tokens = read_spec(trainer.name), inference.max_model_len, sampling.max_tokens
    if spec is not None and "max_model_len" not in inference.model_fields_set:
        bounds = [length, spec.max_position]
        bounds += [trainer.seq_len] if "seq_len" in trainer.model_fields_set else []
        length = max(2, min(bounds))
        why = "trainer.model.seq_len" if length != spec.max_position else "the model's max_position_embeddings"
        yield Derived(("inference", "model", "max_model_len"), length, why)
    if "seq_len" not in trainer.model_fields_set and length > trainer.seq_len:
        yield Derived(("trainer", "model", "seq_len"), length, "inference.model.max_model_len, a whole completion")
    # Completions get half of a sequence, where the user does not say how long they are and the default is too long.
    if "max_tokens" not in sampling.model_fields_set and max_tokens >= length:
        max_tokens = max(1, length // 2)
        yield Derived(("orchestrator", "sampling", "max_tokens"), max_tokens, "half of inference.model.max_model_len")
    if "max_tokens" not in config.orchestrator.eval.sampling.model_fields_set:
        yield Derived(("orchestrator", "eval", "sampling", "max_tokens"), max_tokens)


def _inference(config: InferenceRunConfig) -> Iterator[Derived]:
    spec = read_spec(config.model.name)
    if spec is None or "max_model_len" in config.model.model_fields_set:
        return
    length, why = spec.max_position, "the model's max_position_embeddings"
    cache = cache_tokens(config, spec, config.cluster.device)
    if cache is not None and cache[0] < length:
        length, why = max(2, cache[0]), f"what the KV cache holds; the model's max_position_embeddings are {length}"
    yield Derived(("model", "max_model_len"), length, why)


def cache_tokens(config: InferenceConfig, spec: ModelSpec, device: str) -> tuple[int, str] | None:
    """Tokens that the cache may hold at most, and what decided it; None where that is known only on the GPU, when the
    model is loaded.

    device: `cluster.device`.
    """
    if config.num_blocks is not None:
        return config.num_blocks * config.block_size, "num_blocks"
    maybe_gpu = device_kind(device) == "cuda"
    if config.cache_memory_gib is not None:
        cache_bytes, why = int(config.cache_memory_gib * 2**30), "cache_memory_gib"
    elif maybe_gpu:
        return None
    else:
        cache_bytes, why = cpu_cache_bytes(host.memory_bytes())
    narrow = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and maybe_gpu)
    block_bytes = token_bytes(spec, 2 if narrow else 4) * config.block_size
    return cache_bytes // block_bytes * config.block_size, why
