"""Attention kernels that `trainer.model.attn` names. On a GPU attention is torch's operators
`_flash_attention_forward` and `_flash_attention_backward`; these are the kernels that may run in them:

| `attn` | kernel | package | compute capability |
|---|---|---|---|
| flash_attention_2 | torch's own, which is FlashAttention-2 | | 8.0 and later |
| flash_attention_3, fa3 | FlashAttention-3 | flash_attn_interface | 9 |
| flash_attention_4, fa4 | FlashAttention-4 | flash_attn.cute | 9 and 10 |

"flex" is none of them, but `kernels.flex_attention`.

torch itself puts FlashAttention-3 and 4 in the place of its own (`torch.nn.attention.activate_flash_attention_impl`),
in the whole process. They have not been run.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn import attention

from ductile.kernels import varlen_attention
from ductile.kernels.dispatch import CHOICE


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """A kernel, and what it needs."""

    name: str = ""
    """Name by which torch knows the kernel; "" for torch's own."""
    package: str = ""
    """Package that has the kernel; "" for torch."""
    generations: tuple[int, ...] = ()
    """Major compute capabilities of its devices; empty where `varlen_attention.CAPABILITY` says all."""


_FA2 = FlashKernel()
_FA3 = FlashKernel("FA3", "flash_attn_interface", (9,))
_FA4 = FlashKernel("FA4", "flash_attn.cute", (9, 10))
FLEX = "flex"
"""Value of `trainer.model.attn` for torch's FlexAttention."""
LEAST_FLEX_HEAD = 16
"""Least head size that torch's FlexAttention takes on a GPU."""
KERNELS = {
    "flash_attention_2": _FA2,
    "flash_attention_3": _FA3,
    "fa3": _FA3,
    "flash_attention_4": _FA4,
    "fa4": _FA4,
}
"""Kernels by value of `trainer.model.attn`. Other values than these and FLEX name none: attention is what `dispatch`
chooses then."""


def use_kernel(attn: str, dtype: torch.dtype, head_size: int, device: torch.device) -> None:
    """Have attention of such heads on the device run the kernel that `trainer.model.attn` names, if it names one.

    Raises ValueError, a sentence, where the device, torch or the package for it is missing.
    """
    reason = why_unavailable(attn, dtype, head_size, varlen_attention.capability_of(device))
    if reason:
        raise ValueError(f'trainer.model.attn = "{attn}" cannot be had on this slot: {reason}. Write "auto".')
    CHOICE.choose(flex=attn == FLEX)
    name = KERNELS[attn].name if attn in KERNELS else ""
    if name and attention.current_flash_attention_impl() != name:  # it stays until the process ends
        attention.activate_flash_attention_impl(name)


def why_unavailable(attn: str, dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None) -> str:
    """Return what keeps the kernel that `attn` names from such heads on a device of such a compute capability; "" if
    nothing does, or if it names none. `capability` is None on a device that is not NVIDIA's."""
    if attn == FLEX:
        return _why_not_flex(head_size, capability)
    kernel = KERNELS.get(attn)
    if kernel is None:
        return ""
    if reason := varlen_attention.why_not(dtype, head_size, capability):
        return reason
    assert capability is not None, "the kernels are for NVIDIA devices"
    if kernel.generations and capability[0] not in kernel.generations:
        needed = " or ".join(map(str, kernel.generations))
        return f"the kernel needs compute capability {needed}, and this device has {'.'.join(map(str, capability))}"
    if kernel.package and not _is_installed(kernel.package):
        return f"the package {kernel.package} is not installed"
    if kernel.name and kernel.name not in _known_to_torch():
        return f"torch {torch.__version__} cannot call it"
    return ""


def _why_not_flex(head_size: int, capability: tuple[int, int] | None) -> str:
    if capability is None:
        return "torch's FlexAttention has a backward pass on NVIDIA devices alone"
    if head_size < LEAST_FLEX_HEAD:
        return f"torch's FlexAttention takes heads of at least {LEAST_FLEX_HEAD}, and these have {head_size}"
    if not _is_installed("triton"):
        return "the package triton is not installed, by which torch compiles FlexAttention"
    return ""


def _is_installed(package: str) -> bool:
    """Return whether the package can be found. Packages that it lies in are imported, it itself is not."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _known_to_torch() -> list[str]:
    """Return the names of kernels that this version of torch can put in the place of its own."""
    names = getattr(attention, "list_flash_attention_impls", None)  # earlier versions have none
    return names() if names else []
