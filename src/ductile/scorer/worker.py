"""The score role of one slot: log-probs of sampled tokens, as the trainer would compute them.

It holds the policy, which follows published weights (one that joins has none before the first `Receive`), and the
reference: the weights that the run started from, from disk, as soon as it begins where the loss needs them, and else
when they are asked for.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from ductile.columns import Floats
from ductile.config.trainer import TrainerConfig, needs_reference
from ductile.config.weight_headers import ModelFolderError
from ductile.core.batch.packing import pack
from ductile.fabric import heap
from ductile.model.checkpoint import empty_model, load_model, read_spec, truncate
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.parallelize import Precision
from ductile.records import Manifest, MicroBatch, Sample
from ductile.roles import Refused, RoleAssignment
from ductile.weights.publisher import Publisher
from ductile.weights.subscriber import receive
from ductile.wire.messages import Done, EndLease, LeaseWeights, Published, Receive, Score, Scores


class ScoreRole:
    """Follows `ductile.roles.SlotRole`. Every slot that scores holds whole models and works alone."""

    def __init__(self, settings: Mapping[str, Any], assignment: RoleAssignment) -> None:
        """`settings` is a dumped `TrainerConfig`: the scorer computes in the trainer's precision."""
        self._config = TrainerConfig.model_validate(settings)
        self._assignment, self._device = assignment, assignment.device
        self._has_weights = not assignment.joining
        self._policy = self._load() if self._has_weights else self._allocate()
        self._version = 0
        self._leased = Publisher()
        # The reference is loaded at once: what lies at model.name may be newer later.
        self._reference: Transformer | None = self._load() if needs_reference(self._config.loss) else None

    def handle(self, command: Any) -> Any:
        match command:
            case Score(samples=samples, model=model):
                if model == "policy":
                    self._needs_weights(command)
                return Scores(tuple(self.score(samples, model)))
            case Receive(manifest=manifest):
                self.receive(manifest)
                return Done()
            case LeaseWeights():
                self._needs_weights(command)
                return Published(self._leased.lease(self._version, self._policy.named_parameters()))
            case EndLease():
                self._leased.close()
                return Done()
            case _:
                raise ValueError(f"a score slot does not know the command {type(command).__name__}")

    def score(self, samples: tuple[Sample, ...], model: Literal["policy", "reference"]) -> list[Floats]:
        """Log-probs, one column a sample, as long as its tokens; 0 where the mask is false."""
        scoring = self._policy if model == "policy" else self._load_reference()
        scores: dict[int, Floats] = {}
        (micro_batches,) = pack(samples, num_ranks=1, seq_len=self._config.model.seq_len)
        for micro_batch in micro_batches:
            scores |= self._score(micro_batch, scoring)
        return [scores[id(sample)] for sample in samples]

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
        self._version = manifest.version
        self._has_weights = True

    def has_work(self) -> bool:
        return False

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        self._leased.close()
        self._reference = None
        del self._policy
        heap.trim_all()

    def _needs_weights(self, command: Score | LeaseWeights) -> None:
        if not self._has_weights:
            raise Refused(
                f"slot {self._assignment.slot} joins the scorers and has no weights yet: it cannot execute "
                f"{type(command).__name__} before the first Receive"
            )

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
        model, folder = self._config.model, self._folder()
        spec = read_spec(folder)
        if model.debug.num_layers is not None:
            spec = truncate(spec, model.debug.num_layers, folder)
        dtype = Precision.of(model, self._device).compute
        return empty_model(spec, dtype, self._device).requires_grad_(False)

    def _folder(self) -> str:
        if self._config.model.name is None:
            raise ModelFolderError("trainer.model.name is not set; it must be a model folder")
        return self._config.model.name

    def _load(self) -> Transformer:
        model, folder = self._config.model, self._folder()
        # Rounded as the trainer rounds: to the optimizer's precision first, then to what forward passes see.
        precision = Precision.of(model, self._device)
        loaded = load_model(
            folder,
            dtype=precision.parameters,
            device=self._device,
            random_init=model.debug.random_init,
            num_layers=model.debug.num_layers,
            seed=self._config.seed,
        )
        return loaded.to(precision.compute).requires_grad_(False)
