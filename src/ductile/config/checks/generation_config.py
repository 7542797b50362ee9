"""A model's `generation_config.json`, as far as it says how to sample: what of it counts, and for whom.

A server takes these values where a request says nothing, as vLLM's does. A run takes none: it draws as its config says,
since the loss knows how rollouts were drawn.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ductile.user_files import read_text

FILE = "generation_config.json"
USED = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
"""Keys that count where a request says nothing of them: vLLM's, but for `repetition_penalty`."""
RULES = {
    "temperature": "it must be a number of at least 0",
    "top_p": "it must be a number above 0 and at most 1",
    "top_k": "it must be a whole number, -1 or 0 for all tokens",
    "min_p": "it must be a number from 0 to 1",
    "max_new_tokens": "it must be a whole number of at least 1",
}
NEUTRAL: Mapping[str, object] = {
    "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "typical_p": 1, "repetition_penalty": 1, "length_penalty": 1,
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "max_length": 20,
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "diversity_penalty": 0, "min_length": 0,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "renormalize_logits": False, "remove_invalid_values": False,
}  # fmt: skip
"""Values that change nothing."""
OF_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
OF_TRANSFORMERS = ("do_sample", "use_cache", "cache_implementation", "transformers_version", "return_dict_in_generate")
"""Keys that say how transformers run. As vLLM reads the file, a temperature counts without `do_sample`, too."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    used: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values of `USED` that are not neutral, by their names in the file."""
    unused: Mapping[str, object] = field(default_factory=dict[str, object])
    """Values of all other keys that would change what is sampled."""

    def sentences(self) -> list[str]:
        """Return what a server says of them when it starts."""
        used = f"requests that do not say otherwise are sampled with {values_listed(self.used)}, of {FILE}"
        unused = f"not used of {FILE}: {values_listed(self.unused)}"
        return [said for said, values in ((used, self.used), (unused, self.unused)) if values]


def generation_defaults(folder: Path) -> GenerationDefaults:
    """Read the folder's file; nothing where there is none. Raises ValueError with a sentence."""
    path = folder / FILE
    try:
        table = json.loads(read_text(path))
    except FileNotFoundError:
        return GenerationDefaults()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(table).__name__}")
    given = {
        name: value
        for name, value in cast(dict[str, Any], table).items()
        if value is not None and not name.startswith("_") and name not in (*OF_TOKENS, *OF_TRANSFORMERS)
        if value is not False and value not in ([], {}) and not (name in NEUTRAL and value == NEUTRAL[name])
    }
    for name, value in given.items():
        if name in USED and not _can_be(name, value):
            raise ValueError(f"{path}: {name} is {value!r}; {RULES[name]}")
    return GenerationDefaults(
        {name: value for name, value in given.items() if name in USED},
        {name: value for name, value in given.items() if name not in USED},
    )


def _can_be(name: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name in ("top_k", "max_new_tokens"):
        return isinstance(value, int) and value >= (-1 if name == "top_k" else 1)
    return value >= 0 and (name == "temperature" or value <= 1) and (name != "top_p" or value > 0)


def values_listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in values.items())
