"""ductile: elastic RL post-training for language models, native to PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ductile.core.transfer.cells import NotReshardable
    from ductile.fabric.carrier import TransferFailed
    from ductile.orchestrator.control.control import Run
    from ductile.resharding.blocks import Block
    from ductile.resharding.megatron import MegatronModule
    from ductile.resharding.reshard import Resharder, reshard

__version__ = "0.1.0"
__all__ = ["Block", "MegatronModule", "NotReshardable", "Resharder", "Run", "TransferFailed", "reshard"]

_HOMES = {
    "Block": "ductile.resharding.blocks",
    "MegatronModule": "ductile.resharding.megatron",
    "NotReshardable": "ductile.core.transfer.cells",
    "Resharder": "ductile.resharding.reshard",
    "Run": "ductile.orchestrator.control.control",
    "TransferFailed": "ductile.fabric.carrier",
    "reshard": "ductile.resharding.reshard",
}


def __getattr__(name: str) -> Any:
    """The library's words, fetched when first asked for: they need torch, which the command line must not wait for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ductile' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
