"""Which library carries the collectives of a group, and what each member's device is.

NCCL takes one rank a GPU and refuses a second one. gloo does not ask: it has the collectives that FSDP2 and HSDP call
on CUDA tensors (all-gather, reduce-scatter and all-reduce of `torch.distributed`), and takes them through pinned memory
of the host. It does not have all: its coalesced all-gather, which DTensor uses, takes a GPU's addresses for the host's
(`ductile.parallel.gathered.full` gathers by itself), and it sends no CUDA tensor from rank to rank
(`ductile.fabric.p2p` stages them).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch._C._distributed_c10d import Store


@dataclass(frozen=True, slots=True)
class Backend:
    name: Literal["gloo", "nccl"]
    stands_in: str = ""
    """Why this backend stands in for a faster one; "" where it is the fastest."""


SETTINGS: dict[str, dict[str, str]] = {
    "gloo": {"GLOO_SOCKET_IFNAME": "lo"},
    "nccl": {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    },
}
"""Variables of the environment that a slot sets before it makes a group of the backend, unless they are set.

Without its own, gloo listens wherever the host's name points. By default torch's watchdog over NCCL ends the process
when a collective of any group fails or is late, also the slot of an old trainer when only a joiner was late; and it
does so for what an abort has ended. With 0 it leaves errors alone: every wait has a deadline. Nor does it write a
report before, or keep an abort waiting for one."""


def choose_backend(device_type: str, devices: Sequence[str]) -> Backend:
    """The backend of a group whose rank i has the device `devices[i]`, a `device_id`."""
    if device_type == "cpu":
        return Backend("gloo")
    first: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if first.setdefault(device, rank) != rank:
            what = f"ranks {first[device]} and {rank} share a GPU, and NCCL takes one rank a GPU"
            return Backend("gloo", f"{what}: collectives go through gloo and the host's memory")
    return Backend("nccl")


def device_id(device: torch.device) -> str:
    """Name of a device, equal for all slots on one GPU, whatever number each of them knows it by.
    `fabric.device.name_of` says its kind."""
    return str(torch.cuda.get_device_properties(device).uuid)


def tell_devices(store: Store, prefix: str, slot: int, members: Sequence[int], device: str) -> list[str]:
    """The `device_id` of each member, in this order, as they tell each other under `prefix`. Collective."""
    store.set(f"{prefix}device/{slot}", device)
    return [store.get(f"{prefix}device/{member}").decode() for member in members]


def why_not_beside(device_type: str, devices: Collection[str]) -> str:
    """Why slots with these `device_id`s may not make groups while they run collectives of older ones; "" if they may.

    gloo's groups know nothing of each other. NCCL's share each GPU: what one of them waits for can stand behind the
    other on a peer, unless both are used in the same order on every rank.
    """
    if device_type == "cpu" or len({*devices}) == 1:
        return ""
    return "NCCL's groups are not made beside its collectives"
