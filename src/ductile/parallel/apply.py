"""How a textbook model becomes a parallel one. The order of things, on one page:

1. describe it on the meta device, where it takes no memory
2. shard its parameters over the ranks (`parallel.data`)
3. give memory to this rank's shards alone
4. fill them from the full tensors, one at a time, so that no rank ever holds the whole model

Where somebody else has the shards already, or brings them later, 3 and 4 are theirs: `build_over`.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ductile.config.model import TrainerModelConfig
from ductile.core.layout.peak import compute_dtype
from ductile.core.layout.spec import ModelSpec
from ductile.model.transformer import Transformer
from ductile.parallel import data


@dataclass(frozen=True, slots=True)
class Precision:
    """`parameters` is what the optimizer updates, `compute` what forward and backward see, `reduce` what travels."""

    parameters: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, config: TrainerModelConfig, device: str | torch.device) -> "Precision":
        return cls(
            _DTYPES[config.optimization_dtype],
            _DTYPES[compute_dtype(config.compute_dtype, str(device))],
            _DTYPES[config.reduce_dtype],
        )


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    mesh: DeviceMesh,
    device: str | torch.device,
    precision: Precision,
    reshard_after_forward: bool = True,
) -> Transformer:
    """The model of `spec`, spread over `mesh`, with the values of `tensors` (our names, full, every parameter once)."""
    model = _describe(spec, mesh, precision, reshard_after_forward)
    model.to_empty(device=device)
    data.fill(model, tensors)
    return model


def build_over(
    spec: ModelSpec,
    shards: MutableMapping[str, Tensor],
    mesh: DeviceMesh,
    precision: Precision,
    reshard_after_forward: bool = True,
) -> Transformer:
    """The model of `spec`, spread over `mesh`, over memory that is there already: this rank's part of every parameter,
    flat. `shards` is emptied.

    A part that has fewer rows than the first rank's is copied into padded memory, as FSDP2 needs it.
    """
    model = _describe(spec, mesh, precision, reshard_after_forward)
    data.assign(model, shards)
    return model


def _describe(spec: ModelSpec, mesh: DeviceMesh, precision: Precision, reshard_after_forward: bool) -> Transformer:
    with torch.device("meta"):
        model = Transformer(spec).to(precision.parameters)
    data.shard(model, mesh, precision.compute, precision.reduce, reshard_after_forward)
    return model
