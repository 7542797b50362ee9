"""Which values of `Sampling`, and variables of a template, make sense: asked by `ductile check`, and at each request.

What a grader's process asks, too: it is small, and imports no more of the config than its own tables.
"""

import json
import math
from collections.abc import Iterator

from ductile.sampling import Sampling

COLDEST = 1e-5
"""Lowest temperature besides 0. Logits divided by less may overflow, and one such request would make the whole engine's
step fail."""

MAX_STOPS = 64
"""Most stop strings of a request to the server. OpenAI takes four; benchmarks of code send more."""

MAX_STOP_CHARS = 256
"""Most characters of a stop string in a request to the server, which holds back text that may become one and looks at
it again with every token."""

MAX_STOP_TOKEN_IDS = 128
"""Most stop token ids of a request to the server."""

RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""Variables that no caller may give a chat template: `self` is Jinja's own, and a conversation has the others."""


def wrong_values(sampling: Sampling) -> Iterator[tuple[str, object, str]]:
    """(field, value, what it must be) of each value that makes no sense."""
    temperature = sampling.temperature
    for name, value, fits, rule in (
        ("temperature", temperature, temperature == 0 or COLDEST <= temperature < math.inf, f"0 or at least {COLDEST}"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k == -1 or sampling.top_k > 0, "-1 (all) or 1 or more"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "1 or more"),
        ("stop", sampling.stop, all(sampling.stop), "strings of at least one character"),
    ):
        if not fits:
            yield name, value, rule


def wrong_sampling(sampling: Sampling) -> str:
    """The first value that makes no sense, in a sentence; "" when all make sense."""
    for name, value, rule in wrong_values(sampling):
        return f"{name} is {json.dumps(value) if isinstance(value, tuple) else value}; it must be {rule}"
    return ""
