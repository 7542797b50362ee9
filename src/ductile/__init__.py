"""ductile: elastic RL post-training for language models, native to PyTorch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ductile.parallel.blocks import Block
    from ductile.parallel.megatron import MegatronModule
    from ductile.parallel.reshard import Resharder, reshard

__version__ = "0.1.0"
__all__ = ["Block", "MegatronModule", "Resharder", "reshard"]

_HOMES = {"Block": "blocks", "MegatronModule": "megatron", "Resharder": "reshard", "reshard": "reshard"}


def __getattr__(name: str) -> Any:
    """The library's words, fetched when first asked for: they need torch, which the command line must not wait for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ductile' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"ductile.parallel.{_HOMES[name]}"), name)
