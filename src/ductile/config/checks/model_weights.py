"""Finds a model's weights in its folder, and says whether they are what its config.json calls for.

Without torch, and without any data but that of an output head beside tied embeddings. So the check of a config and the
slot that loads the weights check the same things, and a login node checks a large model at once. What the files have
and config.json does not call for is refused: it means another model than the one that config.json describes.
"""

import re
from pathlib import Path

from ductile.config.checks.weight_headers import (
    CONFIG,
    DTYPES,
    ITEM_BYTES,
    ModelFolderError,
    StoredTensor,
    Weights,
    read_headers,
)
from ductile.core.layout.model.parameters import HfTensor, parameters
from ductile.core.layout.model.spec import ModelSpec

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROTATIONS = ".rotary_emb.inv_freq"
"""End of the name of a constant that old Llamas carry: it follows from `head_dim` and `rope_theta`."""


def find_weights(folder: Path, spec: ModelSpec, num_layers: int | None = None) -> dict[str, Path]:
    """The file of each tensor that the model is made of, as Hugging Face names it. Raises ModelFolderError.

    num_layers: of the model that the folder holds, where `spec` has fewer.
    """
    weights = read_headers(folder)
    _refuse_surplus(weights, spec, num_layers or spec.num_layers)
    parts = [part for parameter in parameters(spec) for part in parameter.parts]
    for part in parts:
        if part.name not in weights.entries:
            hint = "; if it is tied, set tie_word_embeddings to true" if part.name == HEAD else _bias_hint(part.name)
            raise ModelFolderError(f"{weights.listed_in} does not have {part.name}, which {CONFIG} calls for{hint}")
        _refuse_unfit(weights.file_of[part.name], weights.entries[part.name], part)
    if spec.tie_embeddings and HEAD in weights.entries:
        _refuse_another_head(weights)
    return {part.name: weights.file_of[part.name] for part in parts}


def _refuse_surplus(weights: Weights, spec: ModelSpec, num_layers: int) -> None:
    expected = {part.name for parameter in parameters(spec) for part in parameter.parts} | {HEAD}
    surplus: list[str] = []
    for name, entry in weights.entries.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name in expected or (layer is not None and spec.num_layers <= int(layer[1]) < num_layers):
            continue
        if not name.endswith(_ROTATIONS):
            surplus.append(name)
        elif entry.shape != (spec.head_dim // 2,):
            _refuse_unfit(weights.file_of[name], entry, HfTensor(name, (spec.head_dim // 2,)))
    if surplus:
        first, *others = sorted(surplus)
        more = f" and {len(others)} more, such as {others[-1]}" if others else ""
        beyond = re.match(r"model\.layers\.(\d+)\.", first)
        hint = _bias_hint(first)
        if beyond is not None and int(beyond[1]) >= num_layers:
            hint = f" (num_hidden_layers is {num_layers})"
        what = f"{weights.listed_in} has {first}{more}, which {CONFIG} does not call for{hint}"
        raise ModelFolderError(f"{what}: they do not belong together")


def _bias_hint(name: str) -> str:
    """The key of config.json that says whether there is a tensor of that name."""
    if not name.endswith(".bias"):
        return ""
    return f" ({'mlp_bias' if '.mlp.' in name else 'attention_bias'} says which)"


def _refuse_another_head(weights: Weights) -> None:
    """Old writers made a copy of tied embeddings, which says nothing new. Another head is of another model."""
    embeddings, head = weights.entries[EMBEDDINGS], weights.entries[HEAD]
    file = weights.file_of[HEAD]
    _refuse_unfit(file, head, HfTensor(HEAD, embeddings.shape))
    from ductile.config.checks.weight_numbers import num_differing  # loads numpy, which few folders need

    differing = num_differing(weights, EMBEDDINGS, HEAD)
    if differing:
        raise ModelFolderError(
            f"{file} has an output head that {CONFIG} does not let the model have: {differing:,} of the {head.size:,} "
            f"numbers of {HEAD} are not those of {EMBEDDINGS}, and tie_word_embeddings is true. Write false there, to "
            f"use the head, or save the folder without {HEAD}"
        )


def _refuse_unfit(file: Path, entry: StoredTensor, part: HfTensor) -> None:
    if entry.shape != part.shape:
        shapes = f"has shape {list(entry.shape)}, but {CONFIG} calls for {list(part.shape)}"
        raise ModelFolderError(f"{file}: {part.name} {shapes}")
    if entry.dtype not in DTYPES:
        what = f"is {entry.dtype}; ductile reads float32, bfloat16 and float16, so save the model in one of these first"
        raise ModelFolderError(f"{file}: {part.name} {what}")
    if entry.end - entry.begin != entry.size * ITEM_BYTES[entry.dtype]:
        what = f"has {entry.end - entry.begin} bytes, which its shape and {entry.dtype} do not have; download it again"
        raise ModelFolderError(f"{file}: {part.name} {what}")
