"""How large a generator's KV cache may be, in plain numbers: the same for `ductile check` and for the engine."""

from ductile.core.layout.spec import ModelSpec

CPU_SHARE = 1 / 16
"""Of the machine's memory: several slots share it, and a cache takes what it uses, when it first uses it."""
CPU_MOST_BYTES = 4 * 2**30
GPU_UTILIZATION = 0.9
"""Of a GPU that only generates, as in vLLM."""
GPU_UTILIZATION_SHARED = 0.4
"""Of a GPU whose slot trains or scores as well."""
WINDOWS = 0.5
"""Attention keeps copies of what it reads, at most this many times the cache."""


def token_bytes(spec: ModelSpec, itemsize: int) -> int:
    """The keys and values of one token in every layer."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def cpu_cache_bytes(memory_bytes: int) -> tuple[int, str]:
    """What a cache gets of a machine's memory when nobody said how much, and what decided it."""
    share_bytes = int(memory_bytes * CPU_SHARE)
    if share_bytes < CPU_MOST_BYTES:
        return share_bytes, "a sixteenth of this machine's memory"
    return CPU_MOST_BYTES, f"the default of {CPU_MOST_BYTES // 2**30} GiB"


def gpu_cache_bytes(total_bytes: int, free_bytes: int, weights_bytes: int, utilization: float) -> int:
    """What is left of the generator's share of a GPU when its weights are there, and of what nobody else has taken."""
    room_bytes = min(utilization * total_bytes - weights_bytes, free_bytes)
    return max(0, int(room_bytes / (1 + WINDOWS)))


def num_blocks(cache_bytes: int, block_bytes: int, wanted: int) -> int:
    """As many as there is memory for, and no more than are of use."""
    return min(wanted, cache_bytes // block_bytes)
