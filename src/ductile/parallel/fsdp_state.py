"""Parts of FSDP2 that have no public name: its state of a module's parameters, and how it makes a shard.
`tests/fabric/test_private_torch.py` holds it."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor


def parameter_groups(state: Any) -> Sequence[Any]:
    """Return what FSDP2 sums and reshards together in one module; torch 2.11 has one group for it, or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def fsdp_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that FSDP2 has for a model's parameters: shards with their padding, gathered ones, and whole
    gradients that are not summed yet (`trainer.model.reduce_every`). Empty ones come, too."""
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in parameter_groups(fully_shard.state(module))
    ]
    for group in groups:
        for parameter in group.fsdp_params:
            for value in vars(parameter).values():
                for each in cast(Sequence[object], value) if isinstance(value, list | tuple) else (value,):
                    if isinstance(each, Tensor):
                        yield each


def shard_like(parameter: DTensor, local: Tensor) -> DTensor:
    """Return a tensor in the layout of a parameter, whose part on this rank is `local`, of that part's shape.

    `DTensor.from_local` would move a part in host memory to the device of the mesh.
    """
    return cast(DTensor, _from_local_no_grad(local, parameter._spec))
