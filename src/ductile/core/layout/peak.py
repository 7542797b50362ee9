"""How fast devices multiply matrices at best, by their data sheets: what utilisation is measured against.

All figures are of dense products (a data sheet's "with sparsity" is twice that), accumulated in fp32.
"""

import re
from dataclasses import dataclass
from typing import Literal

Arithmetic = Literal["bfloat16", "tf32", "float32"]
"""Number format in which a device multiplies matrices."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Floating-point operations a second, and where the figure is from."""

    flops_per_s: float
    source: Literal["known", "measured"]
    """Source of the figure: "known" from the table below, "measured" by timing a product on the device itself."""


@dataclass(frozen=True, slots=True)
class _Device:
    words: frozenset[str]
    """Words that are all in the device's name."""
    flops_per_s: dict[Arithmetic, float]


def _device(words: str, bfloat16: float, tf32: float | None = None, float32: float | None = None) -> _Device:
    """A row of the table, given in units of 10^12 operations a second."""
    given: dict[Arithmetic, float | None] = {"bfloat16": bfloat16, "tf32": tf32, "float32": float32}
    return _Device(frozenset(words.split()), {name: value * 1e12 for name, value in given.items() if value is not None})


_DEVICES = (
    _device("B200", 2250),
    _device("H200 NVL", 835),
    _device("H200", 989, 494, 67),
    _device("GH200", 989, 494, 67),
    _device("H100 NVL", 835),
    _device("H100 PCIE", 756, 378, 51),
    _device("H100", 989, 494, 67),
    _device("A100", 312, 156, 19.5),
    _device("A40", 149.7, 74.8, 37.4),
    _device("A10", 125, 62.5, 31.2),
    _device("L40S", 362, 183, 91.6),
    _device("L40", 181, 90.5, 90.5),
    _device("L4", 121, 60, 30.3),
    _device("RTX 4090", 165, 82.6, 82.6),
    _device("RTX 3090", 71, 35.6, 35.6),
)
"""Known devices. If several fit a name, the first counts. H100 and H200 without a further word are the SXM modules."""

_SLOWER = frozenset({"MIG", "LAPTOP", "D", "MAX"})
"""Words in the names of parts of a device, and of slower chips than the number in the name says: such a device is not
known."""
_VIRTUAL = re.compile(r"\d+[ABCQ]")
"""A word of a vGPU's name: the GiB that it has of a device, and its kind ("GRID A100-10C")."""


def known_peak(device_name: str, arithmetic: Arithmetic) -> float | None:
    """Operations a second of the device that torch calls so ("NVIDIA H100 80GB HBM3"); None where it is not known."""
    words = set(re.split(r"[\s-]+", device_name.upper()))
    if words & _SLOWER or any(map(_VIRTUAL.fullmatch, words)):
        return None
    found = next((device for device in _DEVICES if device.words <= words), None)
    return found.flops_per_s.get(arithmetic) if found else None


def compute_dtype(configured: Literal["float32", "bfloat16"] | None, device: str) -> Literal["float32", "bfloat16"]:
    """The dtype that forward and backward passes compute in: the configured one, else the device's default."""
    return configured or ("bfloat16" if device.startswith("cuda") else "float32")


def arithmetic_of(compute: Literal["float32", "bfloat16"], matmul_precision: str, device: str) -> Arithmetic:
    """The format in which products are made: `trainer.matmul_precision` allows fp32 products in TF32, on a GPU."""
    if compute == "float32" and device.startswith("cuda") and matmul_precision != "highest":
        return "tf32"
    return compute
