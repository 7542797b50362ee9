"""Which device of its node each slot has, by the name that the user knows it by.

Slots take the devices of their node in the order in which CUDA_VISIBLE_DEVICES lists them, all of them in their own
order where it is not set. Deployment numbers put the slots that generate first, then those that train; the score slots
of a placement (teacher or reference) come last where nobody says otherwise. So with CUDA_VISIBLE_DEVICES=4,5,6 and

    num_infer_gpus = 2, num_train_gpus = 1      generate on 4 and 5, train on 6
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ductile.core.instances.placement import Placement, Role


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device of a node, with the slots on it and what they do."""

    node: int
    device: str
    """A number, or a name such as "GPU-8f6d...", as CUDA_VISIBLE_DEVICES has it."""
    slots: tuple[int, ...]
    roles: tuple[Role, ...]


def visible_devices(num_devices: int, cuda_visible_devices: str | None = None) -> tuple[str, ...]:
    """Return the names of a node's devices, in the order in which slots take them.

    num_devices: used where the variable is not set. cuda_visible_devices: its value; CUDA ignores what follows an
    entry that is no device, such as -1.
    """
    if cuda_visible_devices is None:
        return tuple(map(str, range(num_devices)))
    names: list[str] = []
    for word in cuda_visible_devices.split(","):
        if not (name := word.strip()) or name.startswith("-") or name in names:
            break
        names.append(name)
    return tuple(names)


def device_uses(
    placement: Placement, devices: Sequence[str], num_nodes: int = 1, slots_per_device: int = 1
) -> list[DeviceUse]:
    """Return the use of every device that has slots, node by node; the nodes have the same devices.

    Raises ValueError where a slot has no device.
    """
    per_node = len(devices) * slots_per_device
    if placement.num_slots > per_node * num_nodes:
        raise ValueError(f"{placement.num_slots} slots have {len(devices)} devices on each of {num_nodes} nodes")
    held: dict[Role, frozenset[int]] = {role: frozenset(slots) for role, slots in placement.by_role.items()}
    uses: list[DeviceUse] = []
    for first in range(0, placement.num_slots, slots_per_device):
        slots = tuple(range(first, min(first + slots_per_device, placement.num_slots)))
        roles: tuple[Role, ...] = tuple(role for role, of_role in held.items() if not of_role.isdisjoint(slots))
        uses.append(DeviceUse(first // per_node, devices[first % per_node // slots_per_device], slots, roles))
    return uses
