"""What keeps a slot from the attention kernel that its config names. The kernels of other packages run on GPUs alone;
here the choice among them is tested."""

import pytest
import torch
from torch.nn import attention

from ductile.config.checks.exclusions import IN_16_BITS, ON_GPU_ALONE
from ductile.kernels import flash_attention
from ductile.kernels.flash_attention import FLEX, KERNELS, use_kernel, why_unavailable

CPU, A100, H100, B200 = None, (8, 0), (9, 0), (10, 0)
BF16, FP32 = torch.bfloat16, torch.float32
INSTALLED = ("flash_attn_interface", "flash_attn.cute")


def test_the_config_knows_the_same_names() -> None:
    assert set(ON_GPU_ALONE) == {*KERNELS, FLEX}
    assert set(IN_16_BITS) == KERNELS.keys()


@pytest.mark.parametrize(
    ("attn", "dtype", "head_size", "capability", "installed", "reason"),
    [
        ("auto", FP32, 7, CPU, (), ""),
        ("sdpa", FP32, 7, CPU, (), ""),
        ("flash_attention_2", BF16, 64, CPU, INSTALLED, "the kernel is for NVIDIA devices"),
        ("flash_attention_2", BF16, 64, (7, 5), (), "the kernel needs compute capability 8.0, and this device has 7.5"),
        ("flash_attention_2", FP32, 64, A100, (), "the kernel computes in float16 and bfloat16, not in float32"),
        ("flash_attention_2", BF16, 64, A100, (), ""),
        ("fa3", BF16, 64, CPU, INSTALLED, "the kernel is for NVIDIA devices"),
        ("fa3", BF16, 64, A100, INSTALLED, "the kernel needs compute capability 9, and this device has 8.0"),
        ("fa3", BF16, 64, H100, (), "the package flash_attn_interface is not installed"),
        ("flash_attention_3", BF16, 64, H100, INSTALLED, ""),
        ("fa4", BF16, 64, A100, INSTALLED, "the kernel needs compute capability 9 or 10, and this device has 8.0"),
        ("fa4", BF16, 64, B200, (), "the package flash_attn.cute is not installed"),
        ("flash_attention_4", BF16, 64, B200, INSTALLED, ""),
        ("flash_attention_4", BF16, 300, B200, INSTALLED, "the kernel takes heads of a multiple of 8 up to 256"),
        ("flex", FP32, 300, A100, ("triton",), ""),
        ("flex", FP32, 8, A100, ("triton",), "torch's FlexAttention takes heads of at least 16, and these have 8"),
        ("flex", BF16, 64, H100, (), "the package triton is not installed, by which torch compiles FlexAttention"),
        ("flex", BF16, 64, CPU, ("triton",), "torch's FlexAttention has a backward pass on NVIDIA devices alone"),
    ],
)
def test_what_keeps_a_slot_from_a_kernel(
    attn: str,
    dtype: torch.dtype,
    head_size: int,
    capability: tuple[int, int] | None,
    installed: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "_is_installed", lambda package: package in installed)
    monkeypatch.setattr(flash_attention, "_known_to_torch", lambda: ["FA3", "FA4"])
    found = why_unavailable(attn, dtype, head_size, capability)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_torch_that_cannot_call_a_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_is_installed", lambda package: True)
    monkeypatch.setattr(flash_attention, "_known_to_torch", lambda: ["FA4"])
    assert why_unavailable("fa3", BF16, 64, H100) == f"torch {torch.__version__} cannot call it"
    assert why_unavailable("flash_attention_2", BF16, 64, H100) == ""


@pytest.mark.parametrize(("package", "is_there"), [("nowhere", False), ("nowhere.below", False), ("torch.nn", True)])
def test_a_package_is_looked_for(package: str, is_there: bool) -> None:
    assert flash_attention._is_installed(package) == is_there


@pytest.mark.parametrize(("attn", "activated"), [("auto", []), ("flash_attention_2", []), ("fa3", ["FA3"])])
def test_torch_is_asked_once_for_a_kernel_that_it_does_not_run_anyway(
    attn: str, activated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(flash_attention, "why_unavailable", lambda *of_slot: "")
    monkeypatch.setattr(attention, "activate_flash_attention_impl", asked.append)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: asked[-1] if asked else None)
    for _ in range(2):  # a trainer is made anew by each resize
        use_kernel(attn, BF16, 64, torch.device("cuda"))
    assert asked == activated


@pytest.mark.parametrize("attn", [*KERNELS, FLEX])
def test_a_slot_on_a_cpu_refuses(attn: str) -> None:
    said = "torch's FlexAttention" if attn == FLEX else "the kernel is for"
    with pytest.raises(ValueError, match=f'^trainer.model.attn = "{attn}" cannot be had on this slot: {said}'):
        use_kernel(attn, BF16, 64, torch.device("cpu"))
