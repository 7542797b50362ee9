"""The score role of one slot: log-probs of sampled tokens, as the trainer would compute them.

It holds the policy, which follows published weights, and, from the first time that it is asked for, the reference:
the weights that the run started from.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from ductile.config.trainer import TrainerConfig
from ductile.core.batch.packing import pack
from ductile.model.checkpoint import ModelFolderError, load_model
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.apply import Precision
from ductile.records import Manifest, MicroBatch, Sample
from ductile.roles import Place
from ductile.weights.subscriber import receive
from ductile.wire.messages import Done, Receive, Score, Scores


class ScoreRole:
    """Follows `ductile.roles.SlotRole`. Every slot that scores holds whole models and works alone."""

    def __init__(self, settings: Mapping[str, Any], place: Place) -> None:
        """`settings` is a dumped `TrainerConfig`: the scorer computes in the trainer's precision."""
        self._config = TrainerConfig.model_validate(settings)
        self._device = place.device
        self._policy = self._load()
        self._reference: Transformer | None = None

    def handle(self, command: Any) -> Any:
        match command:
            case Score(samples=samples, model=model):
                return Scores(tuple(self.score(samples, model)))
            case Receive(manifest=manifest):
                self.receive(manifest)
                return Done()
            case _:
                raise ValueError(f"a score slot does not know the command {type(command).__name__}")

    def score(self, samples: tuple[Sample, ...], model: Literal["policy", "reference"]) -> list[tuple[float, ...]]:
        """One list a sample, as long as its tokens; 0 where the mask is false."""
        scoring = self._policy if model == "policy" else self._load_reference()
        scores: dict[Sample, tuple[float, ...]] = {}
        (micro_batches,) = pack(samples, num_ranks=1, seq_len=self._config.model.seq_len)
        for micro_batch in micro_batches:
            scores |= self._score(micro_batch, scoring)
        return [scores[sample] for sample in samples]

    def receive(self, manifest: Manifest) -> None:
        """Make a published version the policy. A version that does not fit leaves the policy as it was."""
        tensors = receive(manifest)
        ours = dict(self._policy.named_parameters())
        shapes = {name: tensor.shape for name, tensor in ours.items()}
        if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise ValueError(f"version {manifest.version} is of another model than the scorer's")
        with torch.no_grad():
            for name, tensor in tensors.items():
                ours[name].copy_(tensor)

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        self._reference = None
        del self._policy

    @torch.no_grad()
    def _score(self, micro_batch: MicroBatch, model: Transformer) -> dict[Sample, tuple[float, ...]]:
        packed = PackedSamples.of(micro_batch.samples, self._device)
        logprobs, _ = packed.score(model)
        in_order = iter(logprobs.tolist())
        return {
            sample: tuple(next(in_order) if is_scored else 0.0 for is_scored in sample.mask)
            for sample in micro_batch.samples
        }

    def _load_reference(self) -> Transformer:
        if self._reference is None:
            self._reference = self._load()
        return self._reference

    def _load(self) -> Transformer:
        model = self._config.model
        if model.name is None:
            raise ModelFolderError("trainer.model.name is not set; it must be a model folder")
        # Rounded as the trainer rounds: to the optimizer's precision first, then to what forward passes see.
        precision = Precision.of(model, self._device)
        loaded = load_model(
            model.name,
            dtype=precision.parameters,
            device=self._device,
            random_init=model.debug.random_init,
            num_layers=model.debug.num_layers,
            seed=self._config.seed,
        )
        return loaded.to(precision.compute).requires_grad_(False)
