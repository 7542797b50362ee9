"""Sizes of tp that a model can have, and what they do besides cutting."""

from ductile.core.layout.model.spec import ModelSpec


def why_not_tp(spec: ModelSpec, tp: int) -> list[str]:
    """What keeps the model from this size, a clause each; none when it can be. Parts are rounded up, so the last slot's
    is the first to be empty."""
    found: list[str] = []
    for what, units in (("heads", spec.num_heads), ("rows of gate and up", spec.intermediate_size)):
        chunk = -(-units // tp)
        if (tp - 1) * chunk >= units:
            found.append(f"leaves a slot without any of the model's {units} {what}")
    return found


def even_tp_sizes(spec: ModelSpec) -> list[int]:
    """Sizes with which all slots have equally much."""
    return [
        tp
        for tp in range(1, spec.num_heads + 1)
        if spec.num_heads % tp == 0
        and spec.intermediate_size % tp == 0
        and (spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0)
    ]


def tp_notes(spec: ModelSpec, tp: int) -> list[str]:
    """What is good to know of a size, a clause each."""
    found: list[str] = []
    if tp not in (even := even_tp_sizes(spec)):
        most = -(-spec.num_heads // tp)
        found.append(
            f"deals the work out unevenly (a slot has {most} of {spec.num_heads} heads): of {even} all are even"
        )
    elif tp > spec.num_kv_heads:
        sharing = tp // spec.num_kv_heads
        found.append(f"is more than the {spec.num_kv_heads} key/value heads: {sharing} neighbours hold the same one")
    if spec.vocab_size % tp:
        padded = -(-spec.vocab_size // tp) * tp
        found.append(f"pads the vocabulary from {spec.vocab_size:,} to {padded:,} rows")
    return found
