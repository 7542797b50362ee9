"""How large a generator's KV cache may be, in plain numbers: the same for `ductile check` and for the engine."""

from ductile.core.layout.model.spec import ModelSpec

CPU_SHARE = 1 / 16
"""Share of the machine's memory that a KV cache may have: several slots share the memory, and a cache takes up what it
uses, when it first uses it."""
CPU_MOST_BYTES = 4 * 2**30
GPU_UTILIZATION = 0.9
"""Share of a GPU's memory that a generator may use, weights included, when its slot only generates; as in vLLM."""
GPU_UTILIZATION_SHARED = 0.4
"""Share of a GPU's memory that a generator may use, weights included, when its slot trains or scores as well."""
WINDOWS = 0.5
"""Most memory for the copies that attention keeps of what it reads, as a share of the cache."""


def token_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def cpu_cache_bytes(memory_bytes: int) -> tuple[int, str]:
    """Bytes of memory that a cache on a CPU gets when the configuration does not say how many, and what decided it."""
    share_bytes = int(memory_bytes * CPU_SHARE)
    if share_bytes < CPU_MOST_BYTES:
        return share_bytes, "a sixteenth of this machine's memory"
    return CPU_MOST_BYTES, f"the default of {CPU_MOST_BYTES // 2**30} GiB"


def gpu_cache_bytes(total_bytes: int, free_bytes: int, weights_bytes: int, utilization: float) -> int:
    """Bytes that a cache on a GPU gets: what is left of the generator's share when its weights are there, and at most
    what is free."""
    room_bytes = min(utilization * total_bytes - weights_bytes, free_bytes)
    return max(0, int(room_bytes / (1 + WINDOWS)))


def num_blocks(cache_bytes: int, block_bytes: int, wanted: int) -> int:
    """Blocks of the cache: as many as there is memory for, and at most `wanted`."""
    return min(wanted, cache_bytes // block_bytes)
