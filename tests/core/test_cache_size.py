"""Sizes of KV caches, with numbers of real models and machines."""

import pytest

from ductile.core.cache_size import cpu_cache_bytes, gpu_cache_bytes, num_blocks, token_bytes
from ductile.core.layout.model.spec import ModelSpec

GIB = 2**30
QWEN3_8B = ModelSpec("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, max_position=40960)


def test_a_token_of_qwen3_8b_takes_144_kib_in_bf16() -> None:
    assert token_bytes(QWEN3_8B, itemsize=2) == 144 * 1024


SHARE, MOST = "a sixteenth of this machine's memory", "the default of 4 GiB"


@pytest.mark.parametrize(
    ("memory_gib", "cache_gib", "why"), [(8, 0.5, SHARE), (16, 1, SHARE), (64, 4, MOST), (1024, 4, MOST)]
)
def test_on_a_cpu_it_is_a_bounded_share(memory_gib: int, cache_gib: float, why: str) -> None:
    assert cpu_cache_bytes(memory_gib * GIB) == (cache_gib * GIB, why)


@pytest.mark.parametrize(
    ("total", "free", "weights", "utilization", "cache"),
    [
        (140, 124, 16, 0.9, (0.9 * 140 - 16) / 1.5),  # alone on the GPU: room for windows beside the cache
        (140, 30, 16, 0.9, 30 / 1.5),  # others are there already
        (140, 124, 16, 0.4, (0.4 * 140 - 16) / 1.5),
        (24, 8, 16, 0.4, 0),  # the weights alone are more than the share
    ],
)
def test_on_a_gpu_it_is_what_is_left(total: int, free: int, weights: int, utilization: float, cache: float) -> None:
    found = gpu_cache_bytes(total * GIB, free * GIB, weights * GIB, utilization)
    assert found == pytest.approx(cache * GIB, abs=1)


def test_no_more_blocks_than_are_of_use() -> None:
    assert num_blocks(100, 10, wanted=4) == 4
    assert num_blocks(100, 30, wanted=4) == 3
