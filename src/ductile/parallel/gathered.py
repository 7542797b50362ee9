"""The whole of each parameter, from its parts on several slots, one parameter at a time.

1. its rows from the slots that FSDP2 has dealt them to
2. its columns, rows or vocabulary from the slots of tp
3. all of it from the stage that has it to the other stages of pp

All slots take part, and each ends with the whole parameter.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.model.parameters import Parameter, parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.transformer import Transformer
from ductile.parallel.data import local_shard
from ductile.parallel.parallel_context import ParallelContext


def full_tensors(model: Transformer, context: ParallelContext, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in `dtype`, gathered one at a time, in the order of `parameters(spec)`. All slots must run it to
    its end."""
    ours = dict(model.named_parameters())
    for parameter in parameters(model.spec):
        part = full(ours[parameter.name].detach().to(dtype)) if parameter.name in ours else None
        yield parameter.name, _whole(parameter, part, dtype, model, context)


def gathered_tensors(
    model: Transformer, context: ParallelContext, compute: torch.dtype, with_frozen: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as the forward pass computes with it, in `compute`, in the order of `parameters(spec)`. All slots
    must run it to its end. with_frozen: those that are not trained, too.

    What FSDP2 gathers at once for a forward pass, a layer say, is gathered at once. So a tensor is there until the next
    one is asked for, and its memory must not be held: `Tensor.numpy` would keep FSDP2 from freeing it.
    """
    ours = dict(model.named_parameters())
    with _unsharded(model):
        for owner, of_owner in groupby(parameters(model.spec), key=lambda parameter: _unit_of(parameter.name)):
            unit = model.get_submodule(owner) if owner and any(name.startswith(f"{owner}.") for name in ours) else None
            with _unsharded(unit) if unit is not None else nullcontext():
                for parameter in (each for each in of_owner if with_frozen or each.is_trained):
                    name = parameter.name
                    part = model.get_parameter(name).detach() if name in ours else None
                    yield name, _whole(parameter, part, compute, model, context)


def full(tensor: Tensor) -> Tensor:
    """What FSDP2 has dealt out, whole and without gradient; all slots of its mesh must ask for it.

    DTensor's own way asks gloo for a collective that it does not have for what lies on a GPU.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, local = tensor.device_mesh, local_shard(tensor)
    num_shards = mesh.size(mesh.ndim - 1)
    num_rows = -(-len(tensor) // num_shards)  # of a slot that has as many as one can have
    chunk = local.contiguous().to(mesh.device_type)
    if len(local) < num_rows:
        chunk = chunk.new_zeros((num_rows, *tensor.shape[1:]))
        chunk[: len(local)] = local
    whole = chunk.new_empty((num_shards * num_rows, *tensor.shape[1:]))
    dist.all_gather_into_tensor(whole, chunk, group=mesh.get_group(mesh.ndim - 1))
    return whole[: len(tensor)]


def _whole(
    parameter: Parameter, part: Tensor | None, dtype: torch.dtype, model: Transformer, context: ParallelContext
) -> Tensor:
    """The whole parameter, of which a tp slot of a stage that has it has `part`; on other stages that is None."""
    dims = context.layout.dims
    whole = part
    if dims.tp > 1 and part is not None:
        whole = _joined(parameter, part, model.spec, context)
    if dims.pp > 1:
        if whole is None:
            whole = torch.empty(parameter.shape, dtype=dtype, device=context.mesh.device_type)
        stage = int(_over_stages(model.spec, context.layout)[parameter.name].holdings.slots[0])
        in_stages = context.layout.group(context.slot, ("pp",))
        whole = whole.contiguous()
        dist.broadcast(whole, in_stages[stage], group=context.group("pp"))
    assert whole is not None, "a layout without stages has every parameter on every slot"
    return whole


def _joined(parameter: Parameter, part: Tensor, spec: ModelSpec, context: ParallelContext) -> Tensor:
    """The parts of all tp slots, put where they belong."""
    tp = context.layout.dims.tp
    holdings = _over_tp(spec, tp)[parameter.name].holdings
    most = max(size for _, _, size in holdings.sizes)
    flat = part.reshape(-1)
    if flat.numel() < most:
        flat = torch.cat((flat, flat.new_zeros(most - flat.numel())))
    parts = flat.new_empty(tp * most)
    dist.all_gather_into_tensor(parts, flat.contiguous(), group=context.group("tp"))
    whole = part.new_empty(parameter.shape)
    for rank in range(tp):
        for start, stop, offset, strides, _ in holdings.rows_of(rank):
            box = whole[tuple(map(slice, start, stop))]
            box.copy_(parts.as_strided(box.shape, strides, rank * most + offset))
    return whole


@lru_cache(maxsize=8)
def _over_tp(spec: ModelSpec, tp: int) -> Layout:
    """The model over the slots of tp alone, which are 0 to tp - 1 here."""
    return model_layout(spec, ParallelLayout.of(range(tp), tp=tp))


@lru_cache(maxsize=8)
def _over_stages(spec: ModelSpec, parallel: ParallelLayout) -> Layout:
    """The model over stages alone, which are slots 0 to pp - 1 here."""
    pp = parallel.dims.pp
    return model_layout(spec, ParallelLayout.of(range(pp), parallel.stages, pp=pp))


def _unit_of(name: str) -> str:
    """The module that `data.shard` has wrapped for this parameter; "" is the model itself."""
    first, number, *_ = name.split(".")
    return f"{first}.{number}" if first == "layers" else ""


@contextmanager
def _unsharded(module: nn.Module) -> Iterator[None]:
    """The module has the whole of the parameters that are its own, and not of another unit. Collective."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
