"""[bench]: a few steps, or for `ductile inference` rounds of requests, and the figures."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field

from ductile.config.finding import Finding
from ductile.config.reading.errors import listed
from ductile.config.reading.key_tree import value_at
from ductile.config.schema.inference import InferenceConfig, ServerConfig
from ductile.config.schema.section import FilePath, Section

PROMPT_TOKENS, MAX_TOKENS = 128, 64
OWN: dict[str, object] = {
    "host": "127.0.0.1",
    "port": 0,
    "api_key": None,
    "api_key_var": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
}
"""Settings that say where the server of a benchmark is, and who may ask it."""


class BenchConfig(Section):
    steps: int = Field(default=4, ge=2)
    """Steps to take, whatever `max_steps` says. Train slots take one more, which they trace for the share of
    communication in it."""
    warmup_steps: int = Field(default=1, ge=1)
    """The first ones of `steps`, which warm up and are not counted."""
    output_json: FilePath | None = None
    """Write the figures here too."""


def num_steps(bench: BenchConfig) -> int:
    """Return how many steps a command that trains takes: the last one is traced, and not timed."""
    return bench.steps + 1


def warmup_findings(bench: BenchConfig | None) -> Iterator[Finding]:
    """Findings for a benchmark that measures nothing."""
    if bench is not None and bench.warmup_steps >= bench.steps:
        what = f"must be less than bench.steps ({bench.steps}): the steps that are left are measured"
        yield Finding(("bench.warmup_steps", "bench.steps"), what)


class InferenceBenchConfig(BenchConfig):
    steps: int = Field(default=4, ge=2)
    """Rounds. All requests of one are sent at once."""
    num_requests: int | None = Field(default=None, ge=1)
    """Requests that a round sends at once. Default: the least of `max_num_seqs`, `server.max_connections` and
    `server.max_sequences`."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Prompt length of a request; random tokens, so that no two prompts share a prefix. Default: the least of 128, half
    of `max_model_len`, and what `bench.max_tokens` leaves of it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that each completion has, exactly. Default: 64, or what the prompt leaves of `max_model_len` if that is
    less."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that one round sends, all of one size."""

    num_requests: int
    prompt_tokens: int
    max_tokens: int


def load_of(bench: InferenceBenchConfig, config: InferenceConfig) -> Load:
    """The load that the config asks for; keys that are not set get what fits. Several keys that are set may not fit
    together: `load_findings` tells."""
    most, server = config.model.max_model_len, config.server
    prompt = bench.prompt_tokens or max(1, min(PROMPT_TOKENS, most // 2, most - (bench.max_tokens or 0)))
    completion = bench.max_tokens or max(1, min(MAX_TOKENS, most - prompt))
    at_once = bench.num_requests or min(config.max_num_seqs, server.max_connections, server.max_sequences)
    return Load(at_once, prompt, completion)


def load_findings(bench: InferenceBenchConfig | None, config: InferenceConfig) -> Iterator[Finding]:
    """Findings for what the server would refuse of the load of `--bench`."""
    if bench is None:
        return
    load, most, server = load_of(bench, config), config.model.max_model_len, config.server
    if load.prompt_tokens + load.max_tokens > most:
        written = "prompt_tokens" if bench.prompt_tokens else "max_tokens"
        left = load.max_tokens if bench.prompt_tokens else load.prompt_tokens
        what = f"must be at most {most - left}: prompt and completion share model.max_model_len ({most})"
        if left >= most:
            what = f"leaves no room: prompt and completion share model.max_model_len ({most}). Write less for both"
        yield Finding((f"bench.{written}", "bench.max_tokens", "model.max_model_len"), what)
    for key, places in (("max_connections", server.max_connections), ("max_sequences", server.max_sequences)):
        if load.num_requests > places:
            what = f"must be at most server.{key} ({places}): all are sent at once"
            yield Finding(("bench.num_requests", f"server.{key}"), what)


def own_server(config: ServerConfig) -> ServerConfig:
    """The server's settings for a benchmark: on a free port of the loopback interface, without a key or TLS."""
    return config.model_copy(update=OWN)


def server_notes(bench: InferenceBenchConfig | None, config: ServerConfig) -> Iterator[str]:
    """What `own_server` leaves out of what is written."""
    given = [f"server.{name}" for name in OWN if value_at(config, (name,)) != ServerConfig.model_fields[name].default]
    if bench is not None and given:
        yield f"{listed(given)} {'has' if len(given) == 1 else 'have'} no effect here: --bench asks a server of its own"
