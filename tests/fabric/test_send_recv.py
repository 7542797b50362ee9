"""Messages through a gloo group: torch's own functions take it, and a wait ends when the group's timeout says so."""

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ductile.fabric.groups import Groups
from ductile.fabric.send_recv import GlooSendRecv
from tests.ranks import run_ranks


def around(groups: Groups, members: tuple[int, ...]) -> list[float]:
    """Each slot sends two numbers to the next one, and gets two from the one before."""
    groups.group(members)
    group = groups.send_recv_group(members)
    assert isinstance(group, GlooSendRecv)
    assert groups.send_recv_group(members) is group
    here = members.index(groups.slot)
    after, before = members[(here + 1) % len(members)], members[here - 1]
    arriving = [torch.empty(1) for _ in range(2)]
    leaving = torch.tensor([[1.0 * groups.slot, 0.0], [0.5 + groups.slot, 0.0]])[:, 0]  # not one after the other
    messages = [dist.P2POp(dist.isend, leaving[index : index + 1], after, group) for index in range(2)]
    messages += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in arriving]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [tensor.item() for tensor in arriving]


def test_each_gets_what_was_sent_to_it_in_order() -> None:
    assert run_ranks(3, around, slots=(4, 1, 6)) == [[6.0, 6.5], [4.0, 4.5], [1.0, 1.5]]


def wait_in_vain(groups: Groups, members: tuple[int, ...]) -> str:
    groups.group(members)
    groups.set_timeout(0.2)
    if groups.slot != members[0]:
        groups._store.wait(["done"])
        return ""
    try:
        dist.irecv(torch.empty(1), members[1], group=groups.send_recv_group(members)).wait()
    except RuntimeError as error:
        return str(error)
    finally:
        groups._store.set("done", "")
    return "it came"


def test_a_wait_ends_by_the_timeout_that_was_set_last() -> None:
    """By itself gloo would wait for as long as a group has to be made: longer than the test does."""
    found, _ = run_ranks(2, wait_in_vain, timeout_s=300.0)
    assert "Timed out waiting 200ms" in found


def make_and_destroy(groups: Groups, members: tuple[int, ...]) -> int:
    groups.group(members)
    groups.send_recv_group(members)
    groups.destroy()
    return sum(isinstance(group, GlooSendRecv) for group in distributed_c10d._world.pg_group_ranks)


def test_nothing_is_left_of_it() -> None:
    assert run_ranks(2, make_and_destroy) == [0, 0]
