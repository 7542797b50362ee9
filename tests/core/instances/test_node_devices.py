"""Which device of its node each slot has: inference first, then the trainer, the teacher last."""

import pytest

from ductile.core.instances.node_devices import DeviceUse, device_uses, visible_devices
from ductile.core.instances.placement import Placement, place


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        (None, ("0", "1", "2", "3")),
        ("0,1", ("0", "1")),
        ("6,4,5", ("6", "4", "5")),
        (" 2 , 3 ", ("2", "3")),
        ("GPU-8f6d,GPU-11aa", ("GPU-8f6d", "GPU-11aa")),
        ("", ()),
        ("-1", ()),
        ("0,-1,2", ("0",)),
        ("0,0,1", ("0",)),
    ],
)
def test_devices_come_in_the_order_of_the_variable(variable: str | None, devices: tuple[str, ...]) -> None:
    assert visible_devices(4, variable) == devices


INFER_AND_TRAIN = place(None, num_train=2, num_generate=6)
WITH_TEACHER = place({"rollout": "0-1", "actor": "2-4", "inference": 5}, needs=("train", "generate", "score"))


@pytest.mark.parametrize(
    ("placement", "devices", "num_nodes", "each", "shown"),
    [
        (INFER_AND_TRAIN, "0 1 2 3 4 5 6 7", 1, 1, "generate 0 1 2 3 4 5, train 6 7"),
        (INFER_AND_TRAIN, "7 6 5 4 3 2 1 0", 1, 1, "generate 7 6 5 4 3 2, train 1 0"),
        (WITH_TEACHER, "0 1 2 3 4 5 6 7", 1, 1, "generate 0 1, train 2 3 4, score 5"),
        (WITH_TEACHER, "2 3 4 5 6 7", 1, 1, "generate 2 3, train 4 5 6, score 7"),
        (place(None, num_train=1, num_generate=1), "2 3", 1, 1, "generate 2, train 3"),
        (place({"actor,rollout": "0-1"}), "0 1", 1, 1, "train+generate 0 1"),
        (place(None, num_train=2, num_generate=2), "0 1", 1, 2, "generate 0, train 1"),
        (place(None, num_train=1, num_generate=2), "0 1", 1, 3, "train+generate 0"),
        (place(None, num_train=4, num_generate=2), "0 1", 3, 1, "generate 0 1 | train 0 1 | train 0 1"),
        (place(None, num_train=3, num_generate=3), "4 5", 3, 1, "generate 4 5 | generate 4, train 5 | train 4 5"),
    ],
)
def test_devices_of_a_node(placement: Placement, devices: str, num_nodes: int, each: int, shown: str) -> None:
    uses = device_uses(placement, devices.split(), num_nodes, each)
    assert " | ".join(on_node([use for use in uses if use.node == node]) for node in range(num_nodes)) == shown
    assert [slot for use in uses for slot in use.slots] == list(placement.slots)
    assert all({*use.roles} == {role for slot in use.slots for role in placement.roles(slot)} for use in uses)


def test_a_slot_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="8 slots have 2 devices on each of 3 nodes"):
        device_uses(INFER_AND_TRAIN, ("0", "1"), 3)


def on_node(uses: list[DeviceUse]) -> str:
    """Return "generate 0 1, train 2" of what is on one node."""
    devices: dict[str, list[str]] = {}
    for use in uses:
        devices.setdefault("+".join(use.roles), []).append(use.device)
    return ", ".join(" ".join([roles, *names]) for roles, names in devices.items())
