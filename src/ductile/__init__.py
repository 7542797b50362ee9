"""ductile: elastic RL post-training for language models, native to PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ductile.core.transfer.cells import NotReshardable
    from ductile.fabric.carrier import TransferFailed
    from ductile.orchestrator.control import Run
    from ductile.parallel.blocks import Block
    from ductile.parallel.megatron import MegatronModule
    from ductile.parallel.reshard import Resharder, reshard

__version__ = "0.1.0"
__all__ = ["Block", "MegatronModule", "NotReshardable", "Resharder", "Run", "TransferFailed", "reshard"]

_HOMES = {
    "Block": "ductile.parallel.blocks",
    "MegatronModule": "ductile.parallel.megatron",
    "NotReshardable": "ductile.core.transfer.cells",
    "Resharder": "ductile.parallel.reshard",
    "Run": "ductile.orchestrator.control",
    "TransferFailed": "ductile.fabric.carrier",
    "reshard": "ductile.parallel.reshard",
}


def __getattr__(name: str) -> Any:
    """The library's words, fetched when first asked for: they need torch, which the command line must not wait for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ductile' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
