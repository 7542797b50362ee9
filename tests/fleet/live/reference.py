"""The truth about a version, found without the product: what `transformers` says of the weights that a folder has.

A server that says "version 3" and generates with a mixture of 2 and 3 is found by this, whatever digest it claims: each
token's log-prob is compared with that of the version that the token names.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ductile.messages.updates import Digest
from ductile.model.checkpoint import load_model
from ductile.weights.digest import whole_digest

TOLERANCE = 2e-3


class Versions:
    """Committed versions of a run, by number."""

    def __init__(self, model: Any) -> None:
        """model: of `transformers`, with any weights."""
        self._model = model.eval()
        self._weights: dict[int, Mapping[str, torch.Tensor]] = {}
        self.tensors: dict[int, Mapping[str, torch.Tensor]] = {}
        """Tensors of each version by ductile's names, as they are published."""
        self.digests: dict[int, Digest] = {}
        self._loaded: int | None = None

    def __contains__(self, version: int) -> bool:
        return version in self._weights

    def add(self, version: int, folder: Path) -> None:
        """The folder has the version's weights, in Hugging Face's form."""
        self._weights[version] = {
            name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        self.tensors[version] = {name: each.detach() for name, each in load_model(folder).named_parameters()}
        self.digests[version] = whole_digest(self.tensors[version].items())

    def make(self, version: int, base: Path, folder: Path) -> None:
        """Add a version that differs from that of the folder `base` in every tensor."""
        shutil.copytree(base, folder)
        generator = torch.Generator().manual_seed(version)
        weights = {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
            for file in base.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self.add(version, folder)

    def differs(self, one: int, other: int) -> bool:
        return any(not torch.equal(tensor, self._weights[other][name]) for name, tensor in self._weights[one].items())

    @torch.no_grad()
    def logprobs(self, version: int, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each token but the first one, with temperature 1."""
        if self._loaded != version:
            missing, unexpected = self._model.load_state_dict(dict(self._weights[version]), strict=False)
            assert not unexpected
            assert set(missing) <= {"lm_head.weight"}, "tied weights are written once"
            self._model.tie_weights()
            self._loaded = version
        logits = self._model(torch.tensor([list(token_ids)])).logits[0, :-1].float()
        rows = torch.log_softmax(logits, -1)
        return rows.gather(1, torch.tensor(list(token_ids[1:]))[:, None])[:, 0].tolist()

    def why_not(
        self, prompt: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> str:
        """A sentence where a token is not of the version that it names; "" where all are."""
        for version in sorted(set(versions)):
            if version not in self:
                return f"nobody committed version {version}"
            expected = self.logprobs(version, [*prompt, *token_ids])[len(prompt) - 1 :]
            for place, (name, found, right) in enumerate(zip(versions, logprobs, expected, strict=True)):
                if name == version and abs(found - right) > TOLERANCE:
                    others = [
                        other
                        for other in self._weights
                        if abs(self.logprobs(other, [*prompt, *token_ids])[len(prompt) - 1 + place] - found)
                        <= TOLERANCE
                    ]
                    return (
                        f"token {place} says version {version}, whose log-prob is {right:.4f}; it has {found:.4f}, as "
                        f"{f'version {others[0]}' if others else 'no version'} has it"
                    )
        return ""
