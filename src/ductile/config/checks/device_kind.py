"""The kind of device that slots on this machine get."""

from pathlib import Path
from typing import Literal

DRIVER = Path("/dev/nvidiactl")
"""It is there where NVIDIA's driver is."""


def device_kind(device: str) -> Literal["cpu", "cuda"]:
    """Return what `cluster.device` means on this machine: "auto" is a GPU where there is one."""
    if device == "auto":
        return "cuda" if DRIVER.exists() else "cpu"
    return "cpu" if device == "cpu" else "cuda"
