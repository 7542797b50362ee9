"""Keys of the trainer that exclude each other, each with the reason: where its state lies, and which kernel it runs."""

from collections.abc import Iterator

from ductile.config.checks.device_kind import device_kind
from ductile.config.checks.on_disk import read_spec
from ductile.config.checks.trainer_layout import TrainingConfig
from ductile.config.finding import Finding
from ductile.config.schema.model import TrainerModelConfig, excluded_pairs, why_not_selective
from ductile.config.schema.run import RLConfig, SFTConfig
from ductile.config.schema.trainer import MuonConfig, OptimConfig, SGDConfig, SignSGDConfig
from ductile.core.layout.choice.layout_text import LayoutTextError, parse_sizes

IN_16_BITS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "fa3", "fa4")
"""Values of `attn` whose kernels run on GPUs, and on numbers of 16 bits."""
ON_GPU_ALONE = (*IN_16_BITS, "flex")
"""Values of `attn` whose kernels run on GPUs."""


def exclusion_findings(config: TrainingConfig) -> Iterator[Finding]:
    """Yield a finding for each pair that cannot be together, on whatever machine."""
    trainer, root = (config.trainer, "trainer.") if isinstance(config, RLConfig) else (config, "")
    runs = 1 if isinstance(trainer, SFTConfig) else trainer.max_concurrent_runs
    yield from _offloads(trainer.model, trainer.optim, runs, root)
    yield from _kernels(trainer.model, config.cluster.device, root)
    yield from _products(trainer.model, config.cluster.device, root)
    has_stages = trainer.model.pp != 1 or any(map(_has_stages, trainer.resize.layouts))
    if has_stages and (why := why_not_selective(trainer.model)):
        yield Finding((f"{root}model.ac.mode", f"{root}model.pp_schedule"), why)
    for key, other, why in excluded_pairs(trainer.model, has_stages):
        yield Finding((f"{root}model.{key}", f"{root}model.{other}"), why)


def exclusion_warnings(config: TrainingConfig) -> Iterator[str]:
    """Yield a sentence for each key that is written and has no effect on this machine."""
    model, root = (config.trainer.model, "trainer.") if isinstance(config, RLConfig) else (config.model, "")
    offloading, on_cpu = model.ac_offloading, device_kind(config.cluster.device) == "cpu"
    if offloading is not None and "pin_memory" in offloading.model_fields_set and offloading.pin_memory and on_cpu:
        at = f"{root}model.ac_offloading.pin_memory"
        yield f"{at} = true has no effect on a CPU: page-locked memory is for copies from and to a GPU"
    trainer = config.trainer if isinstance(config, RLConfig) else config
    yield from _without_effect(model, trainer.optim, root)
    if on_cpu and not isinstance(trainer, SFTConfig) and trainer.memory_profiler_path is not None:
        yield f"{root}memory_profiler_path has no effect on a CPU: it records what is allocated on a GPU"


def _without_effect(model: TrainerModelConfig, optim: OptimConfig, root: str) -> Iterator[str]:
    """Keys of memory that do nothing beside others, on whatever machine."""
    keeps_none = isinstance(optim, SignSGDConfig) or (isinstance(optim, SGDConfig) and not optim.momentum)
    if model.optim_cpu_offload and keeps_none:
        which = f'optim.type = "{optim.type}"' + (" without momentum" if optim.type == "sgd" else "")
        yield f"{root}model.optim_cpu_offload = true has no effect: {root}{which} keeps nothing that could be offloaded"
    if (ac := model.ac) is None:
        return
    if ac.mode == "full" and ac.targets != type(ac)().targets:
        yield f'{root}model.ac.targets has no effect beside ac.mode = "full", which computes all of a layer again'
    spec = read_spec(model.name)
    num_layers = None if spec is None else min(model.debug.num_layers or spec.num_layers, spec.num_layers)
    if num_layers is not None and ac.freq > num_layers:
        what = "the first layer alone is computed again, as every n-th is from there"
        yield f"{root}model.ac.freq = {ac.freq} is more than the model's {num_layers} layers: {what}"


def _offloads(model: TrainerModelConfig, optim: OptimConfig, runs: int, root: str) -> Iterator[Finding]:
    everything, moments = f"{root}model.fsdp_cpu_offload", f"{root}model.optim_cpu_offload"
    if model.fsdp_cpu_offload and model.optim_cpu_offload:
        what = (
            "contradicts fsdp_cpu_offload, which keeps the optimizer's state in host memory already, and has the "
            "optimizer step there. Leave one of them out"
        )
        yield Finding((moments, everything), what)
    if model.fsdp_cpu_offload and isinstance(optim, MuonConfig):
        what = (
            'cannot be with optim.type = "muon": it orthogonalizes whole matrices on the device, and this leaves '
            f"parameters and gradients in host memory. Write {moments}, which leaves them on the device"
        )
        yield Finding((everything, f"{root}optim.type"), what)
    if model.optim_cpu_offload and runs > 1:
        what = (
            f"cannot be with max_concurrent_runs = {runs}: it moves the moments of one optimizer, and each of several "
            "runs has an optimizer of its own. Leave one of them out"
        )
        yield Finding((moments, f"{root}max_concurrent_runs"), what)


def _kernels(model: TrainerModelConfig, device: str, root: str) -> Iterator[Finding]:
    key = f"{root}model.attn"
    if model.attn not in ON_GPU_ALONE:
        return
    if device == "cpu":
        what = 'is a kernel for GPUs, and cluster.device is "cpu". Write "auto"'
        yield Finding((key, "cluster.device"), what)
    if model.compute_dtype == "float32" and model.attn in IN_16_BITS:
        what = f'computes in numbers of 16 bits, and {root}model.compute_dtype is "float32". Write "auto"'
        yield Finding((key, f"{root}model.compute_dtype"), what)


def _products(model: TrainerModelConfig, device: str, root: str) -> Iterator[Finding]:
    if not model.multiplies_8_bits:
        return
    key = f"{root}model.{model.key_of_8_bits}"
    if device == "cpu":
        yield Finding((key, "cluster.device"), 'multiplies on a GPU, and cluster.device is "cpu". Leave it out')
    if model.compute_dtype == "float32":
        dtype = f"{root}model.compute_dtype"
        yield Finding((key, dtype), f'needs bfloat16 around it, and {dtype} is "float32". Leave one of them out')


def _has_stages(layout: str) -> bool:
    """Return whether a listed layout has a pipeline."""
    try:
        return parse_sizes(layout).get("pp", 1) > 1
    except LayoutTextError:
        return False  # told by who reads the layouts
