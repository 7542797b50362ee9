"""All slots choose the same carrier, say why, and find each other by store or by group."""

import pytest
import torch
import torch.distributed as dist

from ductile.core.layout.geometry.layout import Layout, Tensor
from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.sharding import Shard, place
from ductile.core.transfer.planning import Planner
from ductile.fabric import choice
from ductile.fabric.choice import choose
from ductile.fabric.exchange import GroupExchange, StoreExchange
from ductile.fabric.groups import Groups
from ductile.fabric.transfer import Transfer
from tests.ranks import run_ranks


def line(mesh: Mesh, *shards: Shard) -> Layout:
    return Layout([Tensor("w", "float32", place((8,), mesh, shards))], mesh.slots)


def choose_apart(groups: Groups, members: tuple[int, ...], spoil: str) -> tuple[str, str]:
    slot = dist.get_rank()
    if slot == 1 and spoil == "host":
        choice.host = lambda: "another one"
    if slot == 1 and spoil == "permission":
        choice.read = refuse
    exchange = StoreExchange(groups._store, "exchange", slot, members, 20.0)
    carrier, reason = choose(exchange, "cpu", lambda: groups.group(members))
    dist.barrier(group=groups.group(members))
    return carrier.name, f"{reason}; {len(groups._store.list_keys())} keys left"


def refuse(*arguments: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        ("", "peer_memory: all 3 slots are processes of this host, and a trial read worked"),
        ("host", "p2p: slots 0 and 1 are on different hosts, or in containers that do not see each other"),
        ("permission", "p2p: slot 1 may not read the memory of slot 0 (Operation not permitted)"),
    ],
)
def test_all_slots_choose_the_same_carrier_and_say_why(spoil: str, expected: str) -> None:
    name = expected.partition(":")[0]
    assert run_ranks(3, choose_apart, spoil) == [(name, f"{expected}; 0 keys left")] * 3


def through_a_group(groups: Groups, members: tuple[int, ...]) -> tuple[str, list[float]]:
    slot = dist.get_rank()
    group = groups.group(members)
    carrier, _ = choose(GroupExchange(group, slot, members, "cpu", 20.0), "cpu", lambda: group)
    plan = Planner(relays=False).plan(line(Mesh.of((0, 1), dp_shard=2), Shard("dp_shard")), line(Mesh.of((2,))))
    old = {"w": torch.arange(4.0) + 4 * slot} if slot < 2 else {}
    transfer = Transfer(plan, slot, old, {"w": torch.zeros(8)} if slot == 2 else {}, carrier)
    transfer.run()
    dist.barrier(group=group)
    return carrier.name, transfer.buffers.get("w", torch.zeros(0)).tolist()


def test_a_group_of_ones_own_will_do() -> None:
    found = run_ranks(3, through_a_group)
    assert found == [("peer_memory", []), ("peer_memory", []), ("peer_memory", [0.0, 1, 2, 3, 4, 5, 6, 7])]
