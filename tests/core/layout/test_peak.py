import pytest

from ductile.core.layout.model.peak import arithmetic_of, compute_dtype, known_peak


@pytest.mark.parametrize(
    ("name", "arithmetic", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H100 NVL", "float32", None),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H200", "float32", 67e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("GRID A100-10C", "bfloat16", None),
        ("NVIDIA A10-24Q", "bfloat16", None),
        ("NVIDIA L40S-8B", "bfloat16", None),
        ("NVIDIA A100-4-20C", "bfloat16", None),
        ("NVIDIA GeForce GTX 1080", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_known_devices(name, arithmetic, expected):
    assert known_peak(name, arithmetic) == expected


@pytest.mark.parametrize(
    ("configured", "precision", "device", "expected"),
    [
        (None, "high", "cpu", "float32"),
        (None, "high", "cuda:0", "bfloat16"),
        ("float32", "high", "cuda:1", "tf32"),
        ("float32", "highest", "cuda:1", "float32"),
        ("bfloat16", "highest", "cpu", "bfloat16"),
    ],
)
def test_what_products_are_made_in(configured, precision, device, expected):
    assert arithmetic_of(compute_dtype(configured, device), precision, device) == expected
