"""Data parallelism: every rank has its own micro-batches and a shard of each parameter (FSDP2, HSDP).

A parameter's rows are dealt out in equal chunks, rounded up, so that the last ranks may have fewer or none. With
several copies of the state, each deals them out among its own ranks. Gradients are summed over all ranks, never
averaged: the loss is a sum as well, and is divided once, at the optimizer step.
"""

from collections.abc import Collection, Iterable, MutableMapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ductile.core.layout.geometry.holdings import volume
from ductile.model.transformer import Transformer
from ductile.parallel.fsdp_collectives import DirectAllGather, DirectReduceScatter
from ductile.parallel.fsdp_state import shard_like
from ductile.parallel.host_memory import mark_host
from ductile.parallel.parts import SlotParts


def shard(
    model: Transformer,
    mesh: DeviceMesh,
    compute: torch.dtype,
    reduce: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
) -> None:
    """Wrap each layer, then what is left (embeddings, last norm, head): the units that are gathered at once.

    The model of one rank that computes in what it stores stays as it is: there is nothing to gather, and FSDP2 would
    copy every weight and every gradient.

    With `cpu_offload` shards of parameters and gradients lie in host memory, and each unit is gathered from there.
    """
    is_plain = mesh.size() == 1 and {compute, reduce} == {parameter.dtype for parameter in model.parameters()}
    if is_plain and not cpu_offload:
        return
    # Activations have the weights' dtype as it is; cos and sin stay fp32, as in the generator.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    wrap = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for layer in model.layers.values():
        wrap(layer, reshard_after_forward=reshard_after_forward)
    # The root's parameters are needed again as soon as the backward pass starts.
    wrap(model, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            if mesh.device_type == "cpu":
                module.set_custom_all_gather(DirectAllGather())
                module.set_custom_reduce_scatter(DirectReduceScatter(cpu_offload))


def mark_host_shards(model: nn.Module) -> None:
    """Have this rank's parts of the parameters, and of gradients that are there, counted as host memory, also where the
    device is a CPU."""
    for parameter in model.parameters():
        for tensor in (parameter.detach(), parameter.grad):
            if tensor is not None:
                mark_host(tensor)


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward pass without a backward one has left: they are shards again, as all that
    reads or changes them takes them to be."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fill(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], parts: SlotParts, may_lack: Collection[str] = ()
) -> None:
    """Copy this slot's part out of full tensors; those of which it has none may come too. Every parameter of the model
    must come exactly once, but that those of `may_lack` may stay as they are."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            if tensor.shape != parts.shape(name):
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model wants {list(parts.shape(name))}")
            if name not in parameters:
                continue
            local, held = flat_shard(parameters.pop(name)), parts.held(name)
            if local.numel() > sum(map(volume, held)):
                local.zero_()  # rows of padding
            for box in held:
                parts.view(name, local, box).copy_(tensor[tuple(map(slice, *box))])
    if missing := parameters.keys() - {*may_lack}:
        raise ValueError(f"no values came for {', '.join(sorted(missing))}")


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
    return shard_like(parameter, local.view(parameter.to_local().shape))


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def flat_shard(tensor: Tensor) -> Tensor:
    """`local_shard`, flat: what a `Layout` describes."""
    return local_shard(tensor).view(-1)


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every accumulated gradient, sharded as its parameter is. Empty before the first backward pass."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
