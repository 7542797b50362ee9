"""Makes a textbook model a parallel one. The order of things, on one page:

1. refuse the axes whose keys the config marks as not built
2. describe it on the meta device, where it takes no memory: of the layers, those of this slot's stage
   (`parallel.pipeline`)
3. tp: keep this slot's part of each weight, and modules that compute with it (`parallel.tensor_parallel`)
4. cp: nothing; attention crosses the parts of a micro-batch (`parallel.context_parallel`)
5. fp8: layers multiply by 8 bits (`parallel.float8`)
6. compile: what layers run becomes compiled code, between attention and collectives (`parallel.compilation`); inside of
   checkpointing, as torch compiles nothing that is checkpointed as a whole and has such a cut in it
7. checkpointing: layers that compute again what they do not keep (`parallel.activation_checkpointing`)
8. offloading: what layers keep waits in host memory (`parallel.activation_offloading`)
9. FSDP: shard what that leaves over the ranks, around all of the above (`parallel.data`)
10. give memory to this rank's shards alone
11. fill them from the full tensors, one at a time, so that no rank ever holds the whole model (`parallel.parts`)

Where the caller has the shards already, 10 and 11 are theirs: `build_over`; where it brings values later, 11 is:
`build_empty`.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ductile.config.reading.key_tree import keys
from ductile.config.schema.model import ActivationCheckpointing, CompileConfig, TrainerModelConfig
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.model.peak import compute_dtype
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.transformer import Transformer
from ductile.parallel import activation_checkpointing, compilation, data, float8, pipeline, tensor_parallel
from ductile.parallel.activation_offloading import ActivationOffload
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parts import SlotParts


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


@dataclass(frozen=True, slots=True)
class ParallelizeOptions:
    """Options of `trainer.model` that decide how a model computes and where its memory lies, not what it computes."""

    precision: Precision
    reshard_after_forward: bool = True
    compile: CompileConfig | None = None
    """Layers run compiled code; None: none does."""
    checkpointing: ActivationCheckpointing | None = None
    """Layers that compute their activations again; None: none does."""
    offload: ActivationOffload | None = None
    """Has activations of layers wait in host memory; None: they stay."""
    fp8: bool = False
    """Layers multiply numbers of 8 bits."""
    cpu_offload: bool = False
    """Parameters and gradients lie in host memory, and are gathered on the device."""

    @classmethod
    def of(cls, config: TrainerModelConfig, device: str | torch.device) -> "ParallelizeOptions":
        """Return the options of a trainer on such a device."""
        return cls(
            Precision.of(config, device),
            config.reshard_after_forward,
            config.compile,
            config.ac,
            ActivationOffload.of(config.ac_offloading, torch.device(device)) if config.ac_offloading else None,
            config.multiplies_8_bits,
            config.fsdp_cpu_offload,
        )

    def device_of_shards(self, device: str | torch.device) -> str | torch.device:
        """Return the device that a rank's parts of the parameters lie on, where the model computes on `device`."""
        return "cpu" if self.cpu_offload else device


def build(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    context: ParallelContext,
    parts: SlotParts,
    device: str | torch.device,
    options: ParallelizeOptions,
) -> Transformer:
    """Return the model of `spec`, spread over the context's slots, with the values of `tensors` (our names, full, every
    parameter once), of which this slot has `parts`."""
    model = build_empty(spec, context, device, options)
    data.fill(model, tensors, parts)
    return model


def build_empty(
    spec: ModelSpec, context: ParallelContext, device: str | torch.device, options: ParallelizeOptions
) -> Transformer:
    """Return the same for values that come later: until then they are whatever lay in that memory."""
    model = _describe(spec, context, options).to_empty(device=options.device_of_shards(device))
    if options.cpu_offload:
        data.mark_host_shards(model)
    return model


def build_over(
    spec: ModelSpec, shards: MutableMapping[str, Tensor], context: ParallelContext, options: ParallelizeOptions
) -> Transformer:
    """Return the model of `spec`, spread over the context's slots, over memory that is there already: this rank's part
    of every parameter, flat. `shards` is emptied.

    A part that has fewer rows than the first rank's is copied into padded memory, as FSDP2 needs it.
    """
    model = _describe(spec, context, options)
    data.assign(model, shards)
    if options.cpu_offload:
        data.mark_host_shards(model)
    return model


def _describe(spec: ModelSpec, context: ParallelContext, options: ParallelizeOptions) -> Transformer:
    _refuse_unbuilt(context.layout.dims)
    layers, precision = pipeline.layers_of_slot(spec, context.layout, context.slot), options.precision
    with torch.device("meta"):
        model = Transformer(spec, layers).to(precision.parameters)
    if context.layout.dims.tp > 1:
        tensor_parallel.apply(model, context)
    if options.fp8:
        float8.apply(model)
    if options.compile is not None:
        compilation.apply(model, options.compile)
    if options.checkpointing is not None:
        activation_checkpointing.apply(model, options.checkpointing)
    if options.offload is not None:
        options.offload.apply(model)
    # All micro-batches of a pipeline's schedule need gathered parameters.
    reshard_after_forward = options.reshard_after_forward and len(layers) == spec.num_layers
    data.shard(model, context.mesh, precision.compute, precision.reduce, reshard_after_forward, options.cpu_offload)
    return model


def _refuse_unbuilt(dims: ParallelDims) -> None:
    """Raises ValueError for axes above 1 whose keys the config marks as not built."""
    known = keys(TrainerModelConfig)
    sizes = {axis: size for axis, size in asdict(dims).items() if size > 1 and axis in known}
    marks = {axis: known[axis].not_built for axis in sizes}
    refused = [f"trainer.model.{axis} = {sizes[axis]}. {mark.sentence()}" for axis, mark in marks.items() if mark]
    if refused:
        raise ValueError(" ".join(refused))
