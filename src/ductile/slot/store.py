"""The process that hosts the run's rendezvous store, and the one that counts devices; both forked like a slot."""

import signal
from typing import Any

import torch

from ductile.fabric.rendezvous import host_store
from ductile.slot.forkserver import Say


def host(arguments: dict[str, Any], say: Say) -> None:
    """Say the store's port on the address `host` and serve until killed."""
    store = host_store(arguments["host"])
    say(str(store.port))
    while True:
        signal.pause()


def count_devices(arguments: dict[str, Any], say: Say) -> None:
    """Say how many CUDA devices there are. In a process of its own: counting may initialise CUDA, which forks badly."""
    say(str(torch.cuda.device_count()))
