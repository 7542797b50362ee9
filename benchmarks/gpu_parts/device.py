"""Is there a GPU, and which?"""

import os
import sys
from typing import Any

import torch

from gpu_parts.part import Setting, Skipped


def run(setting: Setting) -> dict[str, Any]:
    if torch.version.cuda is None:
        raise Skipped(f"torch {torch.__version__} is built without CUDA ({sys.executable})")
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        raise Skipped(f"torch {torch.__version__} finds no CUDA device{shown}")
    torch.zeros(1, device="cuda").add_(1)  # a driver that is too old shows here
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_gib": properties.total_memory / 2**30,
        "capability": f"{properties.major}.{properties.minor}",
        "count": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "sentence": properties.name,
    }
