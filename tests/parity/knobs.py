"""Knobs that parity is shown with, most of memory: none of them changes what is computed.

A case has some of them by name, as the setting `knobs`: "ac+optim_cpu_offload".
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ductile.config.schema.model import TrainerModelConfig, excluded_pairs, why_not_selective
from tests.parity.meshes import MESHES, MeshCase

KNOBS: Mapping[str, Mapping[str, Any]] = {
    "ac": {"ac": {}},
    "ac_freq": {"ac": {"freq": 2}},
    "ac_norm": {"ac": {"mode": "selective", "targets": ["norm"]}},
    "ac_attn_proj": {"ac": {"mode": "selective", "targets": ["attn_proj"]}},
    "ac_mlp": {"ac": {"mode": "selective", "targets": ["mlp"]}},
    "ac_most": {"ac": {"mode": "selective", "targets": ["norm", "attn_proj", "mlp"]}},
    "ac_offloading": {"ac_offloading": {}},
    "ac_offloading_1": {"ac_offloading": {"max_inflight_activations": 1}},
    "optim_cpu_offload": {"optim_cpu_offload": True},
    "fsdp_cpu_offload": {"fsdp_cpu_offload": True},
    "keep_gathered": {"reshard_after_forward": False},
    "compile": {"compile": {"backend": "aot_eager"}},
    "head_chunks": {"fused_lm_head_token_chunk_size": 8},
    "whole_head": {"fused_lm_head_token_chunk_size": "disabled"},
}
"""Keys of [trainer.model] by the name of a knob."""
ROUNDS_OTHERWISE = frozenset({"compile", "head_chunks", "whole_head"})
"""Knobs that add the same numbers up in another order. The others recompute or move them, and change no bit."""
CHOICES = (
    ("", "ac", "ac_freq", "ac_norm", "ac_attn_proj", "ac_mlp", "ac_most"),
    ("", "ac_offloading", "ac_offloading_1"),
    ("", "optim_cpu_offload", "fsdp_cpu_offload"),
    ("", "keep_gathered"),
    ("", "compile"),
    ("", "head_chunks", "whole_head"),
)
"""Knobs of which a run has at most one."""


def with_knobs(case: MeshCase, *names: str) -> MeshCase:
    return MeshCase(case.axes, case.stages, (*case.settings, ("knobs", "+".join(names)))) if names else case


def without_knobs(case: MeshCase) -> MeshCase:
    return MeshCase(case.axes, case.stages, tuple(each for each in case.settings if each[0] != "knobs"))


def knobs_of(case: MeshCase) -> list[str]:
    return dict(case.settings)["knobs"].split("+")


def keys_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of [trainer.model] that settings of a case stand for."""
    keys: dict[str, Any] = {key: value for key, value in settings.items() if key != "knobs"}
    for name in settings.get("knobs", "").split("+"):
        keys |= KNOBS[name] if name else {}
    return keys


def can_have(case: MeshCase, names: Sequence[str]) -> bool:
    """Return whether a trainer takes these knobs on the mesh."""
    model = TrainerModelConfig.model_validate(keys_of(dict(with_knobs(case, *names).settings)))
    return not why_not_selective(model) and not any(excluded_pairs(model, case.layout.dims.pp > 1))


def combinations(number: int, seed: int) -> Iterator[MeshCase]:
    """Return meshes with at least two knobs each, all drawn at random."""
    chance = random.Random(seed)
    for _ in range(number):
        case, names = chance.choice(MESHES), list[str]()
        while len(names) < 2 or not can_have(case, names):
            names = [name for choices in CHOICES if (name := chance.choice(choices))]
        yield with_knobs(case, *names)
