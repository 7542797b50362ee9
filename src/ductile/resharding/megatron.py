"""Megatron's two ways to say how a tensor is cut: descriptors, and attributes on parameters.

Both are taken by what they are documented to have; megatron-core need not be installed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from ductile.core.transfer.cells import NotReshardable
from ductile.resharding.blocks import Block, plain

_Value = TypeVar("_Value")


@runtime_checkable
class ShardedTensor(Protocol):
    """`megatron.core.dist_checkpointing.ShardedTensor`: where the local tensor `data` lies in the one called `key`."""

    key: str
    data: Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int
    """Leading dims of the whole tensor that the local one lacks, such as the number of the layer or expert."""
    allow_shape_mismatch: bool
    """Whether the whole tensor may have another length on the other side, as a padded vocabulary may."""


@runtime_checkable
class ShardedTensorFactory(Protocol):
    """`megatron.core.dist_checkpointing.mapping.ShardedTensorFactory`: makes descriptors of a fused tensor's parts."""

    key: str
    data: Tensor

    def build_fn(self, *arguments: Any) -> Any: ...
    def build(self) -> Any: ...


def sharded_block(tensor: ShardedTensor) -> list[Block]:
    """The block that a descriptor stands for, if it has data."""
    if tensor.data is None:
        return []
    data = plain(tensor.key, tensor.data.detach())
    if tuple(data.shape) != tuple(tensor.local_shape):
        raise NotReshardable(
            f"{tensor.key}: its data has shape {list(data.shape)} and its local_shape is {list(tensor.local_shape)}; "
            "flattened ranges are not supported"
        )
    for _ in range(tensor.prepend_axis_num):
        data = data.unsqueeze(0)
    return [Block(tuple(tensor.global_shape), tuple(tensor.global_offset), data, tensor.allow_shape_mismatch)]


@dataclass(frozen=True)
class MegatronModule:
    """A module whose parameters say themselves how they are cut: `tensor_model_parallel`, `partition_dim` and
    `partition_stride`, as Megatron's layers stamp them.

    Column, row and vocabulary parallel parameters are cut evenly along `partition_dim`; what lacks the attributes, or
    says False, is whole on every rank. A fused parameter is cut by component: `partition_stride` 2 is
    gate and up, and `parts` gives the sizes of others, whole ones, by the end of their names:

        MegatronModule(model, tp_rank, tp_size, parts={"linear_qkv.weight": (4096, 1024, 1024)})

    Megatron's own fused qkv is interleaved by key head, not by component: it needs no parts. A padded vocabulary is as
    long as `lengths` says, by the end of the name; the rows behind belong to no tensor, and stay as they are.
    """

    module: nn.Module
    tp_rank: int
    tp_size: int
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    rename: Callable[[str], str] = lambda name: name
    """Function from this rank's name to the name in the whole model: a pipeline stage counts its layers from zero."""

    def blocks(self) -> Iterator[tuple[str, Tensor, list[Block]]]:
        """Name, tensor and blocks of every parameter and persistent buffer."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and not name.endswith("_extra_state"):
                yield self.rename(name), tensor, self._blocks(name, tensor)

    def _blocks(self, name: str, tensor: Tensor) -> list[Block]:
        local = plain(name, tensor.detach())
        attributes = vars(tensor)
        if not attributes.get("tensor_model_parallel", False):
            return [Block(tuple(local.shape), (0,) * local.ndim, local)]
        dim, stride = attributes["partition_dim"], attributes.get("partition_stride", 1)
        parts = _by_ending(self.parts, name)
        padded = local.shape[dim] * self.tp_size
        sizes = [padded // stride] * stride if parts is None else list(parts)
        if sum(sizes) != padded or any(size % self.tp_size for size in sizes):
            raise NotReshardable(
                f"{name}: dim {dim} has {padded} rows over {self.tp_size} ranks; parts {sizes} do not add up to that, "
                "or do not divide by the number of ranks"
            )
        length = _by_ending(self.lengths, name) or padded
        shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
        blocks: list[Block] = []
        for base, size, data in zip(
            accumulate(sizes, initial=0),
            sizes,
            local.split([size // self.tp_size for size in sizes], dim),
            strict=False,
        ):
            at = min(base + self.tp_rank * (size // self.tp_size), length)
            start = (0,) * dim + (at,) + (0,) * (len(shape) - dim - 1)
            blocks.append(Block(shape, start, data.narrow(dim, 0, min(data.shape[dim], length - at))))
        return blocks


def _by_ending(table: Mapping[str, _Value], name: str) -> _Value | None:
    return next((value for ending, value in table.items() if name.endswith(ending)), None)
