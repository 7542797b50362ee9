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


_COLUMNS: tuple[Arithmetic, ...] = ("bfloat16", "tf32", "float32")
_DEVICES: dict[str, tuple[float, ...]] = {
    "B200": (2250,),
    "H200 NVL": (835,),
    "H200": (989, 494, 67),
    "GH200": (989, 494, 67),
    "H100 NVL": (835,),
    "H100 PCIE": (756, 378, 51),
    "H100": (989, 494, 67),
    "A100": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "RTX 4090": (165, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
}
"""Units of 10^12 operations a second by known device, whose words are all in its name: in bfloat16, and in tf32 and
fp32 where they are known. If several fit a name, the first counts. H100 and H200 without a further word are the SXM
modules."""

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
    found = next((figures for device, figures in _DEVICES.items() if words.issuperset(device.split())), ())
    return next((figure * 1e12 for column, figure in zip(_COLUMNS, found, strict=False) if column == arithmetic), None)


def compute_dtype(configured: Literal["float32", "bfloat16"] | None, device: str) -> Literal["float32", "bfloat16"]:
    """The dtype that forward and backward passes compute in: the configured one, else the device's default."""
    return configured or ("bfloat16" if device.startswith("cuda") else "float32")


def arithmetic_of(compute: Literal["float32", "bfloat16"], matmul_precision: str, device: str) -> Arithmetic:
    """The format in which products are made: `trainer.matmul_precision` allows fp32 products in TF32, on a GPU."""
    if compute == "float32" and device.startswith("cuda") and matmul_precision != "highest":
        return "tf32"
    return compute
