"""All of torch's private parts that pipeline parallelism stands on: `tests/fabric/test_private_torch.py` holds each.

VirtualStage            micro-batches of any sizes: torch's own stages have one shape for all, and finding it out
                        drops the gradient that FSDP2 has accumulated
end_backward_passes     the sum of gradients behind a whole schedule: FSDP2 would sum behind each backward pass

It works with torch 2.11, whose stages describe no tensors beside their buffers, and with 2.13.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import _backward, _utils
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from ductile.parallel.fsdp_state import parameter_groups

Schedule = _PipelineSchedule

HAS_DESCRIPTIONS = hasattr(_utils, "_TensorMeta")
"""Whether `_RecvInfo` takes a `_TensorMeta` beside its buffer; it does not in torch 2.11."""

HAS_ZERO_BUBBLE = hasattr(_backward, "_autograd_grad_for_inputs")
"""Whether torch's split backward pass is right for operations with several outputs. That of 2.11 takes only the first,
so that gradients of weights are wrong. Told by a helper that came with the mended one."""


class VirtualStage(_PipelineStageBase):
    """A run of layers as torch's schedules take it, where each micro-batch has a size of its own.

    What comes from a neighbour gets its memory when it is received, and is let go of by the backward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        hidden: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        """`hidden`: shape of the hidden states of every micro-batch on this slot."""
        super().__init__(module, index, num_stages, device, group)
        self._hidden, self._dtype = hidden, dtype
        if HAS_DESCRIPTIONS:
            self._runtime_validate = False  # it knows one shape
            self._stage_meta.inputs = () if self.is_first else (self._description(0),)
        self.grad_send_info = [index - 1]  # the first one sends none

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_first:
            self.args_recv_info[fwd_chunk_id] = (self._arriving(fwd_chunk_id, self.stage_index - 1),)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.is_last:
            self.grad_recv_info[bwd_chunk_id] = (self._arriving(bwd_chunk_id, self.stage_index + 1),)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.args_recv_info[bwd_chunk_id] = self.grad_recv_info[bwd_chunk_id] = ()

    def _arriving(self, chunk_id: int, source: int) -> _RecvInfo:
        buffer = torch.empty(self._hidden[chunk_id], dtype=self._dtype, device=self.device)
        described = (self._description(chunk_id),) if HAS_DESCRIPTIONS else ()
        return _RecvInfo(f"micro-batch {chunk_id}", source, buffer, *described)

    def _description(self, chunk_id: int) -> Any:
        shape = torch.Size(self._hidden[chunk_id])
        return _utils._TensorMeta(shape, (shape[1], 1), self._dtype, requires_grad=True)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        """What has arrived wants a gradient only now: nothing can be received into a tensor that does."""
        arrived = [cast(torch.Tensor, info.buffer) for info in self.args_recv_info[fwd_chunk_id]]
        return tuple(buffer.requires_grad_(True) for buffer in arrived)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        log_probs_and_entropies = {0: [], 1: []}
        self.act_send_info = log_probs_and_entropies if self.is_last else {0: [self.stage_index + 1]}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.chunks = num_microbatches
        self.grad_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[_RecvInfo, ...]:
        return ()

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """torch 2.11 would compare with the one shape that its own stages have."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """torch 2.11 would compare with that shape here, too."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []  # the group has met when it was made


def end_backward_passes(model: FSDPModule) -> None:
    """Sum the gradients that have been accumulated without a sum, and reshard: what FSDP2 does behind a backward pass,
    as `torch.distributed.pipelining` asks for it. Collective."""
    root = fully_shard.state(model)
    for state in root._state_ctx.all_states:
        for group in parameter_groups(state):
            group.post_backward()
    root._root_post_backward_final_callback()
