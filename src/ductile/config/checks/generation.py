"""What generators are asked, and what they hold: findings that an engine would otherwise make at the first request."""

from collections.abc import Iterator
from pathlib import Path

from ductile.config.checks.generation_config import FILE, GenerationDefaults, generation_defaults, values_listed
from ductile.config.checks.model_lengths import cache_tokens
from ductile.config.checks.on_disk import file_findings
from ductile.config.finding import Finding
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.model import ChatModelConfig
from ductile.config.schema.orchestrator import OrchestratorConfig, SamplingConfig, to_sampling
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.rollouts.sampling_limits import (
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    RESERVED_VARIABLES,
    wrong_values,
)


def length_findings(config: OrchestratorConfig, max_model_len: int) -> Iterator[Finding]:
    limits = {"orchestrator.sampling.max_tokens": config.sampling.max_tokens}
    if config.eval.enabled and config.eval.sampling.max_tokens != config.sampling.max_tokens:  # else it is said once
        limits["orchestrator.eval.sampling.max_tokens"] = config.eval.sampling.max_tokens
    for key, max_tokens in limits.items():
        if max_tokens >= max_model_len:
            yield Finding(
                (key, "inference.model.max_model_len"),
                f"must be less than inference.model.max_model_len ({max_model_len}), which holds the prompt too",
            )


def sampling_findings(key: str, sampling: SamplingConfig, spec: ModelSpec | None) -> Iterator[Finding]:
    """`key` names the sampling table. `spec` is the model's; None where it cannot be read."""
    for name, _, rule in wrong_values(to_sampling(sampling)):
        yield Finding((f"{key}.{name}",), f"must be {rule}")
    foreign = [token for token in sampling.stop_token_ids if token < 0 or (spec and token >= spec.vocab_size)]
    if foreign:
        rule = f"token ids of the model, 0 to {spec.vocab_size - 1}" if spec else "token ids, which begin at 0"
        yield Finding((f"{key}.stop_token_ids",), f"must be {rule}: {foreign[0]} is none")


def sampling_warnings(key: str, sampling: SamplingConfig) -> list[str]:
    """A warning where completions are drawn from a part of the vocabulary."""
    filters = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    names = " and ".join(f"{key}.{name}" for name, cuts in filters.items() if cuts)
    why = "completions are drawn from the likeliest tokens only, while the loss takes them for draws from all tokens"
    return [f"{names}: {why} (docs/trainer.md)"] if names else []


def generation_config_notes(config: InferenceConfig | SamplingConfig, folder: str | None) -> list[str]:
    """Meaning of the model's generation_config.json for a server, or for rollouts, which are drawn as the config says.
    A file that cannot be read is a finding of its own."""
    try:
        found = generation_defaults(Path(folder)) if folder else GenerationDefaults()
    except ValueError:
        return []
    if isinstance(config, InferenceConfig):
        return found.sentences() if config.server.generation_config == "auto" else []
    drawn = config.model_dump()
    others = {name: value for name, value in {**found.used, **found.unused}.items() if drawn.get(name) != value}
    if not others:
        return []
    drawn = "rollouts are drawn as `sampling` says, and so without these"
    return [f"{FILE} of {folder} says {values_listed(others)}; {drawn}"]


def server_warnings(key: str, sampling: SamplingConfig) -> Iterator[str]:
    """What our own server refuses, and others may take."""
    longest = max(map(len, sampling.stop), default=0)
    for name, number, what, most in (
        ("stop", len(sampling.stop), "texts", MAX_STOPS),
        ("stop", longest, "characters in one text", MAX_STOP_CHARS),
        ("stop_token_ids", len(sampling.stop_token_ids), "tokens", MAX_STOP_TOKEN_IDS),
    ):
        if number > most:
            limit = f"`ductile inference` takes at most {most} and refuses requests with more; other servers may not"
            yield f"{key}.{name} has {number} {what}: {limit}"


def template_findings(at: str, model: ChatModelConfig) -> Iterator[Finding]:
    """A chat template that is not there, and variables that it gets from us anyhow. `at` stands before the keys of
    `model`: "inference.model"."""
    if model.chat_template is not None:
        yield from file_findings(f"{at}.chat_template", model.chat_template)
    for name in sorted(RESERVED_VARIABLES & model.chat_template_kwargs.keys()):
        yield Finding((f"{at}.chat_template_kwargs",), f"has {name}, which every template gets anyhow. Leave it out")


def generator_findings(config: InferenceConfig, at: str, spec: ModelSpec | None, device: str) -> Iterator[Finding]:
    """`at` stands before the keys of `config`: "inference." or nothing. `spec` is the model's; None where it cannot be
    read. `device` is `cluster.device`."""
    yield from template_findings(f"{at}model", config.model)
    needed = -(-config.model.max_model_len // config.block_size)
    if config.num_blocks is not None and config.num_blocks < needed:
        yield Finding(
            (f"{at}num_blocks", f"{at}model.max_model_len", f"{at}block_size"),
            f"must be at least {needed}, to hold one sequence of max_model_len ({config.model.max_model_len}) tokens",
        )
    yield from _size_findings(config, at, device)
    cache = cache_tokens(config, spec, device) if spec is not None and config.num_blocks is None else None
    if cache is not None and cache[0] < config.model.max_model_len:
        num_held, size = cache
        why = "cache_memory_gib holds" if config.cache_memory_gib else f"the KV cache has {size}, which holds"
        yield Finding(
            (f"{at}model.max_model_len", f"{at}cache_memory_gib"),
            f"must be at most {num_held}: {why} no more tokens. Or write a larger {at}cache_memory_gib",
        )
    if config.max_num_seqs > config.max_num_batched_tokens:
        yield Finding(
            (f"{at}max_num_seqs", f"{at}max_num_batched_tokens"),
            f"must be at most max_num_batched_tokens ({config.max_num_batched_tokens}): each sequence takes a token of "
            "every step",
        )
    if spec is not None and config.model.max_model_len > spec.max_position:
        what = f"must be at most {spec.max_position}, the model's max_position_embeddings"
        yield Finding((f"{at}model.max_model_len",), what)


def _size_findings(config: InferenceConfig, at: str, device: str) -> Iterator[Finding]:
    """The KV cache has one size: of the keys that say it, only one can be followed."""
    sizes = {
        "num_blocks": config.num_blocks,
        "cache_memory_gib": config.cache_memory_gib,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    given = [name for name, value in sizes.items() if value is not None]
    for name in given[1:]:
        what = f"contradicts {at}{given[0]}, which says the KV cache's size, too. Leave one of them out"
        yield Finding((f"{at}{name}", f"{at}{given[0]}"), what)
    if config.gpu_memory_utilization is not None and device == "cpu":
        what = f'is a share of a GPU\'s memory, and cluster.device is "cpu". Write {at}cache_memory_gib instead'
        yield Finding((f"{at}gpu_memory_utilization", "cluster.device"), what)
