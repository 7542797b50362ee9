"""The collectives that FSDP2 uses on CPUs give what gloo's give, for any number of ranks."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ductile.core.layout.geometry.mesh import Mesh
from ductile.fabric.groups import Groups
from ductile.parallel import fsdp_collectives as exchange
from ductile.parallel.fsdp_collectives import DirectAllGather, DirectReduceScatter, FreshMemory
from ductile.parallel.gathered import full
from tests.ranks import run_ranks

PART = 5


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size) * (rank + 1) + rank / 4).to(dtype)


def gather_and_scatter(groups: Groups, members: tuple[int, ...], dtype: torch.dtype) -> None:
    group = groups.group(members)
    size, rank = group.size(), group.rank()
    whole, expected = torch.empty(2, size * PART, dtype=dtype)
    own = numbers(rank, PART, dtype)
    DirectAllGather()(output_tensor=whole, input_tensor=own, group=group)
    dist.all_gather_into_tensor(expected, own, group=group)
    assert torch.equal(whole, expected)

    in_place = torch.zeros(size * PART, dtype=dtype)
    place = in_place[rank * PART : (rank + 1) * PART]
    place.copy_(own)
    DirectAllGather()(output_tensor=in_place, input_tensor=place, group=group)
    assert torch.equal(in_place, expected)

    gradient = numbers(rank, size * PART, torch.float32)
    everyone = torch.stack([numbers(each, size * PART, torch.float32) for each in range(size)])
    part = torch.empty(PART)
    DirectReduceScatter()(output_tensor=part, input_tensor=gradient, group=group, op=dist.ReduceOp.SUM)
    assert torch.equal(part, everyone.sum(0)[rank * PART : (rank + 1) * PART])
    assert torch.equal(gradient, numbers(rank, size * PART, torch.float32)), "what was summed is as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_come_and_terms_are_added(num_ranks: int, dtype: torch.dtype) -> None:
    run_ranks(num_ranks, gather_and_scatter, dtype)


def meets_a_death(groups: Groups, members: tuple[int, ...]) -> str:
    group = groups.group(members)
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    gradient, part = torch.zeros(len(members) << 20), torch.empty(1 << 20)
    try:
        DirectReduceScatter()(output_tensor=part, input_tensor=gradient, group=group, op=dist.ReduceOp.SUM)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_dies_is_an_error_for_the_others() -> None:
    first, second, _ = run_ranks(3, meets_a_death, mourned=(2,))
    assert first
    assert second


class Never(FreshMemory, ReduceScatter):
    def __call__(self, *args: object, **named: object) -> None:
        raise AssertionError("FSDP2 reduces nothing where there is one rank")


def learns_alone(groups: Groups, members: tuple[int, ...]) -> None:
    layer = nn.Linear(3, 2)
    fully_shard(layer, mesh=groups.mesh(Mesh.of(members, dp_shard=len(members))))
    assert isinstance(layer, FSDPModule)
    layer.set_force_sum_reduction_for_comms(True)
    layer.set_custom_reduce_scatter(Never())
    layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(full(layer.weight.grad), torch.ones(2, 3))


def test_a_rank_that_is_alone_is_asked_nothing() -> None:
    run_ranks(1, learns_alone)


def averages(groups: Groups, members: tuple[int, ...]) -> None:
    DirectReduceScatter()(torch.empty(1), torch.zeros(1), groups.group(members), dist.ReduceOp.AVG)


def test_only_sums() -> None:
    with pytest.raises(AssertionError, match="add their gradients up"):
        run_ranks(1, averages)


SHORT_S, LONG_S = 0.25, 30.0


def comes_late(
    groups: Groups, members: tuple[int, ...], timeouts_s: tuple[float, ...], checked: bool = False
) -> list[float]:
    """Return what is there in the end; nothing after a timeout. Rank 1 comes late, and when the timeout is a short one,
    too late. checked: as under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    if checked:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = groups.group(members)
    for timeout_s in timeouts_s:
        groups.set_timeout(timeout_s)
    if group.rank() == 1 and timeouts_s[-1] == LONG_S:
        time.sleep(4 * SHORT_S)
    elif group.rank() == 1:
        groups._store.wait(["given up"], timedelta(seconds=LONG_S))
    whole = torch.empty(2)
    try:
        DirectAllGather()(output_tensor=whole, input_tensor=torch.tensor([float(group.rank())]), group=group)
    except RuntimeError:
        groups._store.set("given up", "")
        return []
    return whole.tolist()


class SlowGroup:
    """Rank 0 of three, whose every operation takes four seconds of a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits_s: list[float] = []

    def size(self) -> int:
        return 3

    def rank(self) -> int:
        return 0

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "SlowGroup":
        return self

    send = recv

    def wait(self, timeout: timedelta) -> None:
        self.waits_s.append(timeout.total_seconds())
        self.now_s += 4.0


def test_all_waits_together_have_the_group_s_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SlowGroup()
    monkeypatch.setattr(exchange, "monotonic", lambda: group.now_s)
    monkeypatch.setattr(exchange, "timeout_of", lambda _: timedelta(seconds=10))
    exchange.exchange([torch.zeros(1)] * 3, [torch.zeros(1)] * 3, group)
    assert group.waits_s == [10.0, 6.0, 2.0, 0.001]


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "torch checks collectives"])
def test_a_timeout_that_was_set_later_counts(checked: bool) -> None:
    """As after a resize, whose groups are made with another one."""
    assert run_ranks(2, comes_late, (SHORT_S, LONG_S), checked, timeout_s=2 * LONG_S) == [[0.0, 1.0]] * 2
    waited, _ = run_ranks(2, comes_late, (LONG_S, SHORT_S), checked, timeout_s=2 * LONG_S)
    assert waited == []
