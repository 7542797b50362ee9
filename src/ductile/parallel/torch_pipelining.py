"""All of torch's private parts that pipeline parallelism stands on: `tests/fabric/test_private_torch.py` holds each.

VirtualStage            micro-batches of any sizes: torch's own stages have one shape for all, and finding it out
                        drops the gradient that FSDP2 has accumulated
end_backward_passes     the sum of gradients behind a whole schedule: FSDP2 would sum behind each backward pass
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

Schedule = _PipelineSchedule


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
        self._runtime_validate = False  # it knows one shape
        self._metas = [_TensorMeta(torch.Size(shape), (shape[1], 1), dtype, requires_grad=True) for shape in hidden]
        self._stage_meta.inputs = () if self.is_first else (self._metas[0],)
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
        meta = self._metas[chunk_id]
        buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return _RecvInfo(f"micro-batch {chunk_id}", source, buffer, meta)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        log_probs_and_entropies = {0: [], 1: []}
        self.act_send_info = log_probs_and_entropies if self.is_last else {0: [self.stage_index + 1]}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> None:
        self._setup_backward_recv_info(num_microbatches)

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[_RecvInfo, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []  # the group has met when it was made


def end_backward_passes(model: FSDPModule) -> None:
    """Sum the gradients that have been accumulated without a sum, and reshard: what FSDP2 does behind a backward pass,
    as `torch.distributed.pipelining` asks for it. Collective."""
    root = fully_shard.state(model)
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()
