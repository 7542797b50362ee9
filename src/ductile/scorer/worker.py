"""The score role of one slot: log-probs of sampled tokens, as the trainer would compute them.

It holds the policy, which follows published weights, and the reference: the weights that the run started from, from
disk, as soon as it begins where the loss needs them, and else when they are asked for.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ductile.columns import Floats
from ductile.config.trainer import TrainerConfig, needs_reference
from ductile.config.weight_headers import ModelFolderError
from ductile.core.batch.packing import pack
from ductile.fabric import heap
from ductile.messages.workers import Score, Scores
from ductile.model.checkpoint import empty_model, load_model, read_spec
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.parallelize import Precision
from ductile.records import MicroBatch, Sample
from ductile.roles import RoleAssignment
from ductile.weights.instance_role import InstanceRole
from ductile.weights.overwrite import overwrite_all


class ScoreRole(InstanceRole):
    """Follows `ductile.roles.SlotRole`. Every slot that scores holds whole models and works alone."""

    does, peers = "scores", "scorers"

    def __init__(self, settings: Mapping[str, Any], assignment: RoleAssignment) -> None:
        """`settings` is a dumped `TrainerConfig`: the scorer computes in the trainer's precision."""
        super().__init__(assignment)
        self._config, self._device = TrainerConfig.model_validate(settings), assignment.device
        if self._config.model.name is None:
            raise ModelFolderError("trainer.model.name is not set; it must be a model folder")
        self._folder = self._config.model.name
        self._precision = Precision.of(self._config.model, self._device)
        self._policy = self._allocate() if assignment.joining else self._load()
        self._version = 0
        # The reference is loaded at once: what lies at model.name may be newer later.
        self._reference: Transformer | None = self._load() if needs_reference(self._config.loss) else None

    def handle(self, command: Any) -> Any:
        if not isinstance(command, Score):
            return super().handle(command)
        if command.model == "policy":
            self.needs_weights(command)
        return Scores(tuple(self.score(command.samples, command.model)))

    def score(self, samples: tuple[Sample, ...], model: Literal["policy", "reference"]) -> list[Floats]:
        """Log-probs, one column a sample, as long as its tokens; 0 where the mask is false."""
        scoring = self._policy if model == "policy" else self._load_reference()
        scores: dict[int, Floats] = {}
        (micro_batches,) = pack(samples, num_ranks=1, seq_len=self._config.model.seq_len)
        for micro_batch in micro_batches:
            scores |= self._score(micro_batch, scoring)
        return [scores[id(sample)] for sample in samples]

    def live_weights(self) -> tuple[int, Iterable[tuple[str, Tensor]]]:
        return self._version, self._policy.named_parameters()

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        overwrite_all(self._policy, tensors, version)
        self._version = version

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        super().close()
        self._reference = None
        del self._policy
        heap.trim_all()

    @torch.no_grad()
    def _score(self, micro_batch: MicroBatch, model: Transformer) -> dict[int, Floats]:
        """Log-probs by the `id` of the sample: its value, all tokens, would be hashed."""
        packed = PackedSamples.of(micro_batch.samples, self._device)
        logprobs, _ = packed.score(model, self._config.model.head_chunk_tokens)
        scores: dict[int, Floats] = {}
        of_samples = logprobs.cpu().split([sample.num_trained for sample in micro_batch.samples])
        for sample, of_sample in zip(micro_batch.samples, of_samples, strict=True):
            values = np.zeros(len(sample), np.float32)
            values[sample.loss_mask.array] = of_sample.numpy()
            scores[id(sample)] = Floats.of(values)
        return scores

    def _load_reference(self) -> Transformer:
        if self._reference is None:
            self._reference = self._load()
        return self._reference

    def _allocate(self) -> Transformer:
        """The policy's model without weights, which are to come."""
        spec = read_spec(self._folder, self._config.model.debug.num_layers)
        return empty_model(spec, self._precision.compute, self._device).requires_grad_(False)

    def _load(self) -> Transformer:
        debug = self._config.model.debug
        # Rounded as the trainer rounds: to the optimizer's precision first, then to what forward passes see.
        loaded = load_model(
            self._folder,
            self._precision.parameters,
            self._device,
            debug.random_init,
            debug.num_layers,
            self._config.seed,
        )
        return loaded.to(self._precision.compute).requires_grad_(False)
