"""Data parallelism: every rank has its own micro-batches and a shard of each parameter (FSDP2, HSDP).

A parameter's rows are dealt out in equal chunks, rounded up, so that the last ranks may have fewer or none. With
several copies of the state, each deals them out among its own ranks. Gradients are summed over all ranks, never
averaged: the loss is a sum as well, and is divided once, at the optimizer step.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from itertools import groupby
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ductile.core.layout.parameters import parameters
from ductile.model.transformer import Transformer
from ductile.parallel.exchange import DirectAllGather, DirectReduceScatter


def shard(
    model: Transformer, mesh: DeviceMesh, compute: torch.dtype, reduce: torch.dtype, reshard_after_forward: bool
) -> None:
    """Wrap each layer, then what is left (embeddings, last norm, head): the units that are gathered at once.

    The model of one rank that computes in what it stores stays as it is: there is nothing to gather, and FSDP2 would
    copy every weight and every gradient.
    """
    if mesh.size() == 1 and {compute, reduce} == {parameter.dtype for parameter in model.parameters()}:
        return
    # Activations have the weights' dtype as it is; cos and sin stay fp32, as in the generator.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root's parameters are needed again as soon as the backward pass starts.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            if mesh.device_type == "cpu":
                module.set_custom_all_gather(DirectAllGather())
                module.set_custom_reduce_scatter(DirectReduceScatter())


def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy this rank's rows out of full tensors. Every parameter must come exactly once."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            parameter = parameters.pop(name)
            if tensor.shape != parameter.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model wants {list(parameter.shape)}")
            local, rows = local_shard(parameter), _rows(parameter)
            local.copy_(tensor[rows])
    if parameters:
        raise ValueError(f"no values came for {', '.join(parameters)}")


def assign(model: nn.Module, shards: MutableMapping[str, Tensor]) -> None:
    """Make this memory the model's: this rank's part of each parameter, flat. It is taken out of `shards`, one after
    the other, so that a part which FSDP2 has to pad does not stay twice."""
    for name, parameter in list(model.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        local = {own_name: like(parameter, shards.pop(name))}
        model.get_submodule(owner).load_state_dict(local, strict=False, assign=True)


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor in the layout of a parameter, whose part on this rank is `local` (flat, not copied)."""
    if not isinstance(parameter, DTensor):
        return local.view(parameter.shape)
    shape = parameter.to_local().shape
    return DTensor.from_local(
        local.view(shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def num_copies(tensor: Tensor) -> int:
    """Slots that have the same part of the tensor as this one, itself among them."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate())


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, without gradient; all ranks must ask for it.

    DTensor's own way asks gloo for a collective that it does not have for what lies on a GPU.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, local = tensor.device_mesh, local_shard(tensor)
    chunk = local.contiguous()
    if len(local) < _chunk(tensor):
        chunk = local.new_zeros((_chunk(tensor), *tensor.shape[1:]))
        chunk[: len(local)] = local
    whole = chunk.new_empty((mesh.size(mesh.ndim - 1) * len(chunk), *tensor.shape[1:]))
    dist.all_gather_into_tensor(whole, chunk, group=mesh.get_group(mesh.ndim - 1))
    return whole[: len(tensor)]


def _rows(parameter: Tensor) -> slice:
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh = parameter.device_mesh
    num_rows, rank, chunk = len(parameter), mesh.get_local_rank(mesh.ndim - 1), _chunk(parameter)
    return slice(min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows))


def _chunk(parameter: DTensor) -> int:
    """Rows of a rank that has as many as a rank can have."""
    mesh = parameter.device_mesh
    return -(-len(parameter) // mesh.size(mesh.ndim - 1))


def gradients(model: nn.Module) -> list[Tensor]:
    """Every accumulated gradient, sharded as its parameter is. Empty before the first backward pass."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def full_tensors(model: Transformer, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter in `dtype`, gathered one at a time, in the order of `parameters(spec)`. All ranks must run it to
    its end."""
    ours = dict(model.named_parameters())
    for parameter in parameters(model.spec):
        local = ours[parameter.name].detach().to(dtype)
        yield parameter.name, full(local)


def gathered_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as the forward pass computes with it, in the order of `parameters(spec)`. All ranks must run it
    to its end.

    What FSDP2 gathers at once for a forward pass, a layer say, is gathered at once. So a tensor is there until the next
    one is asked for, and its memory must not be held: `Tensor.numpy` would keep FSDP2 from freeing it.
    """
    names = (parameter.name for parameter in parameters(model.spec))
    with _unsharded(model):
        for owner, of_owner in groupby(names, key=_unit_of):
            with _unsharded(model.get_submodule(owner)) if owner else nullcontext():
                for name in of_owner:
                    yield name, model.get_parameter(name).detach()


def _unit_of(name: str) -> str:
    """The module that `shard` has wrapped for this parameter; "" is the model itself."""
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
