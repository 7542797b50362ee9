"""What a train slot holds besides the trainer: a generator, a scorer, in bytes."""

from typing import Literal

from ductile import host
from ductile.config.checks.asked_placement import placement_of
from ductile.config.checks.on_disk import read_spec
from ductile.config.schema.inference import InferenceConfig
from ductile.config.schema.run import RLConfig
from ductile.config.schema.trainer import needs_reference
from ductile.core.cache_size import GPU_UTILIZATION_SHARED, cpu_cache_bytes, token_bytes
from ductile.core.layout.memory.options import DTYPE_BYTES
from ductile.core.layout.model.peak import compute_dtype

GIB = 2**30


def generator_bytes(config: RLConfig, device: Literal["cpu", "cuda"]) -> int:
    """Return the bytes of the generator that a train slot holds, or may come to hold; 0 where none may. Slots that
    train and score alone have one only where the config says that a device has memory for both: policies put it there
    then."""
    placement, cluster = placement_of(config), config.cluster
    may_come = cluster.auto_scheduler and cluster.share_devices is True and bool(placement.generate)
    if not (placement.shares or may_come):
        return 0
    inference = config.inference
    is_sized = inference.num_blocks is not None or inference.cache_memory_gib is not None
    if is_sized or device == "cpu":
        return _weights_and_cache(config, device)
    share = inference.gpu_memory_utilization or GPU_UTILIZATION_SHARED / cluster.slots_per_device
    return int((cluster.device_memory_gib or 0.0) * GIB * share)


def scorer_bytes(config: RLConfig, device: Literal["cpu", "cuda"]) -> int:
    """Return the bytes of the scorer that a train slot holds, its weights; 0 where none of them has one."""
    placement, model = placement_of(config), config.trainer.model
    spec = read_spec(model.name)
    if spec is None or not {*placement.train} & {*placement.score}:
        return 0
    each = DTYPE_BYTES[compute_dtype(model.compute_dtype, device)]
    num_models = 1 + needs_reference(config.trainer.loss)  # the policy and the reference
    return num_models * spec.num_parameters * each // config.scorer.tp


def _weights_and_cache(config: RLConfig, device: Literal["cpu", "cuda"]) -> int:
    spec, inference = read_spec(config.inference.model.name or config.trainer.model.name), config.inference
    if spec is None:
        return int((inference.cache_memory_gib or 0.0) * GIB)
    dtype = inference.model.dtype
    each = DTYPE_BYTES[compute_dtype(None if dtype == "auto" else dtype, device)]
    block = token_bytes(spec, each) * inference.block_size
    return spec.num_parameters * each // inference.parallel.tp + _num_blocks(inference, block) * block


def _num_blocks(inference: InferenceConfig, block_bytes: int) -> int:
    """Return the blocks of a KV cache whose size the config says, or of one on a CPU."""
    if inference.num_blocks is not None:
        return inference.num_blocks
    wanted = inference.max_num_seqs * -(-inference.model.max_model_len // inference.block_size)
    if inference.cache_memory_gib is not None:
        return min(wanted, int(inference.cache_memory_gib * GIB) // block_bytes)
    return min(wanted, cpu_cache_bytes(host.memory_bytes())[0] // block_bytes)
