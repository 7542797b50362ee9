"""Gradients of a slot's model, summed over slots, and when:

    micro_step   FSDP2 sums in every backward pass; with pp once, after all of them that a schedule runs
    step         each slot adds up the whole gradients of the weights that it gathers; they are summed before an
                 optimizer step, and before the state moves

Tied embeddings are on the first and on the last stage of pp. Each has a term of their gradient, and gets the sum.
"""

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ductile.model.transformer import Transformer
from ductile.parallel.data import local_shard
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.torch_pipelining import end_backward_passes


class GradientReduction:
    """All slots call the same methods in the same order."""

    def __init__(self, model: Transformer, context: ParallelContext, once_a_step: bool) -> None:
        self._model = model
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._root = model if isinstance(model, FSDPModule) else None
        self._once_a_step, self._in_stages = once_a_step, context.layout.dims.pp > 1
        self._device_type = context.mesh.device_type
        self._ends = context.ends if model.spec.tie_embeddings and model.spec.lora is None else None
        self._is_pending = False
        self._summed: Tensor | None = None
        """Gradient of tied embeddings that is summed already, while more is pending."""

    def begin(self) -> None:
        """Forward and backward passes follow."""
        if self._is_pending or not (self._once_a_step or self._in_stages):
            return
        self._is_pending = True
        if self._root is not None:
            self._root.set_requires_gradient_sync(False)
            if self._in_stages:  # one micro-batch's backward pass comes between those of others
                self._root.set_is_last_backward(False)
                self._root.set_reshard_after_backward(False)
        if self._ends is not None:
            embeddings = self._model.embed.weight
            self._summed, embeddings.grad = embeddings.grad, None

    def end(self) -> None:
        """They have been run."""
        if not self._once_a_step:
            self.reduce()
        elif self._in_stages:
            for unit in self._units:
                unit.reshard()

    def reduce(self) -> None:
        """Sum what is pending. Collective where something is."""
        if not self._is_pending:
            return
        self._is_pending = False
        if self._root is not None:
            self._root.set_requires_gradient_sync(True)
            self._root.set_is_last_backward(True)
            self._root.set_reshard_after_backward(True)
            end_backward_passes(self._root)
        if self._ends is not None:
            self._sum_embeddings(self._ends)

    def pending(self) -> Iterator[Tensor]:
        """Yield what is kept apart from the parameters and from FSDP2 while a sum is pending."""
        if self._summed is not None:
            yield self._summed

    def _sum_embeddings(self, ends: dist.ProcessGroup) -> None:
        embeddings = self._model.embed.weight
        assert embeddings.grad is not None, "both ends have run their part of every micro-batch"
        local = local_shard(embeddings.grad)
        if local.numel():
            on_device = local.to(self._device_type)  # a copy where the gradient is in host memory
            dist.all_reduce(on_device, group=ends)
            if on_device is not local:
                local.copy_(on_device)
        if self._summed is not None:
            local += local_shard(self._summed)
        self._summed = None
