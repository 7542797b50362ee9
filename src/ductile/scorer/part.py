"""A slot's part of a scorer: of the policy and of the reference, over the groups of the scorer's slots.

The slots of a scorer cut each weight matrix among themselves, as those of the trainer's tp do
(`ductile.parallel.tensor_parallel`). There is no other axis, and nothing has a gradient.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ductile.columns import Floats
from ductile.config.checks.weight_headers import ModelFolderError
from ductile.config.schema.trainer import TrainerConfig, needs_reference
from ductile.core.batch.packing import pack
from ductile.core.layout.model.spec import ModelSpec
from ductile.kernels.flash_attention import use_kernel
from ductile.model.checkpoint import first_tensors, read_spec
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.gathered import full_tensors
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parallelize import ParallelizeOptions, Precision, build, build_empty
from ductile.parallel.parts import SlotParts
from ductile.parallel.scoring import HeadOptions, as_columns, score
from ductile.records import MicroBatch, Sample


class ScorerPart:
    """All slots of the scorer call the same methods in the same order, but for `parts`."""

    def __init__(self, config: TrainerConfig, context: ParallelContext, device: str, has_weights: bool) -> None:
        """has_weights: false where the policy's are to come. Raises ModelFolderError, or ValueError where a slot would
        have no part of something, or `attn` cannot be had."""
        if config.model.name is None:
            raise ModelFolderError("trainer.model.name is not set; it must be a model folder")
        self.context = context
        self._config, self._folder, self._device = config, config.model.name, device
        rounded = Precision.of(config.model, device)
        self._stored, self._compute = rounded.parameters, rounded.compute
        # Nothing is updated: what forward passes see is all that is kept.
        self._options = ParallelizeOptions(Precision(rounded.compute, rounded.compute, rounded.compute))
        self._spec = read_spec(self._folder, config.model.debug.num_layers, config.model.adapters)
        use_kernel(config.model.attn, self._compute, self._spec.head_dim, torch.device(device))
        self.parts = SlotParts.of(self._spec, context.layout, context.slot)
        self.policy = self._load(self._spec) if has_weights else self._allocate()
        # The reference is loaded at once: what lies at model.name may be newer later.
        self._reference: Transformer | None = self._load(self._spec.base) if needs_reference(config.loss) else None

    @property
    def reference(self) -> Transformer:
        """The weights that the run started from, without adapters, which change nothing then. They are loaded now
        unless the loss needs them."""
        if self._reference is None:
            self._reference = self._load(self._spec.base)
        return self._reference

    def score(self, samples: tuple[Sample, ...], model: Transformer) -> Iterator[tuple[Sample, Floats]]:
        """The samples in some order, each with its column of log-probs."""
        (micro_batches,) = pack(samples, num_ranks=1, seq_len=self._config.model.seq_len)
        for micro_batch in micro_batches:
            yield from self._score(micro_batch, model)

    @torch.no_grad()
    def _score(self, micro_batch: MicroBatch, model: Transformer) -> Iterable[tuple[Sample, Floats]]:
        packed = PackedSamples.of(micro_batch.samples, self._device)
        logprobs, _ = score(model, packed, self.context, HeadOptions.of(self._config.model), "ulysses")
        return zip(micro_batch.samples, as_columns(micro_batch.samples, logprobs), strict=True)

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's whole parameters, gathered one at a time. All slots must run it to its end."""
        return full_tensors(self.policy, self.context, self._compute)

    def _allocate(self) -> Transformer:
        return build_empty(self._spec, self.context, self._device, self._options).requires_grad_(False)

    def _load(self, spec: ModelSpec) -> Transformer:
        config = self._config
        tensors = first_tensors(self._folder, spec, config.model.debug.random_init, config.seed)
        # Rounded as the trainer rounds: to the optimizer's precision first, then to what forward passes see.
        stored = ((name, tensor.to(self._stored)) for name, tensor in tensors)
        parts = SlotParts.of(spec, self.context.layout, self.context.slot)
        return build(spec, stored, self.context, parts, self._device, self._options).requires_grad_(False)
