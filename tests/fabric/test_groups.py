"""Groups come and go among any slots, work with what torch builds on groups, and let nobody hang."""

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, Shard

from ductile.core.layout.geometry.mesh import Mesh
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric import groups as groups_module
from ductile.fabric.backend import SETTINGS, Backend
from ductile.fabric.groups import Groups
from ductile.roles import RoleAssignment
from tests.ranks import run_ranks


def sum_and_coordinates(groups: Groups, members: tuple[int, ...]) -> tuple[float, int, int, int]:
    group = groups.group(members)
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return (
        value.item(),
        dist.get_rank(group),
        dist.get_world_size(group),
        groups.mesh(Mesh.of(members, dp_shard=len(members))).get_local_rank(),
    )


def test_slot_ids_may_be_any_numbers_in_any_order() -> None:
    results = run_ranks(3, sum_and_coordinates, slots=(501, 7, 30))
    assert results == [(538.0, 0, 3, 0), (538.0, 1, 3, 1), (538.0, 2, 3, 2)]


def gathered(groups: Groups, members: tuple[int, ...]) -> list[float]:
    mesh = groups.mesh(Mesh.of(members, dp_shard=len(members)))
    rank = mesh.get_local_rank()
    local = torch.arange(2.0) + 2 * rank if rank < 2 else torch.empty(0)
    tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size([4]), stride=(1,))
    return tensor.full_tensor().tolist()


def test_dtensor_works_on_a_group() -> None:
    assert run_ranks(3, gathered, slots=(4, 9, 2)) == [[0.0, 1.0, 2.0, 3.0]] * 3


def subgroups(groups: Groups, members: tuple[int, ...]) -> tuple[bool, float]:
    pair = members[:2] if dist.get_rank() in members[:2] else members[2:]
    whole, half = groups.group(members), groups.group(pair)
    value = torch.ones(1)
    dist.all_reduce(value, group=half)
    dist.all_reduce(value, group=whole)
    return groups.group(members) is whole and half is not whole, value.item()


def test_groups_are_kept_by_member_list_and_overlap() -> None:
    assert run_ranks(4, subgroups) == [(True, 8.0)] * 4


def create_and_destroy(groups: Groups, members: tuple[int, ...]) -> tuple[list[int], list[int], int]:
    store, slot = groups._store, dist.get_rank()
    num_fds, num_threads = [], []
    for _ in range(50):
        cycle = Groups(slot, 1, "cpu", store, 20.0)  # the same name every time
        value = torch.ones(1)
        dist.all_reduce(value, group=cycle.group(members))
        assert value.item() == len(members)
        cycle.destroy()
        num_fds.append(len(os.listdir("/proc/self/fd")))
        num_threads.append(len(os.listdir("/proc/self/task")))
    groups.group(members)  # all have left the cycles
    return num_fds, num_threads, len(store.list_keys())


def test_fifty_groups_come_and_go_without_a_trace() -> None:
    for num_fds, num_threads, num_keys in run_ranks(2, create_and_destroy):
        assert max(num_fds[10:]) <= num_fds[10] + 1
        assert max(num_threads[10:]) <= num_threads[10] + 1
        assert num_keys == 0


def die_or_be_told(groups: Groups, members: tuple[int, ...]) -> tuple[str, float]:
    group = groups.group(members)
    if dist.get_rank() == members[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000), group=group)
    except RuntimeError as error:
        text = str(error)
        del group
        groups.abandon(error)
    else:
        text = "nobody told me"
    next_epoch = Groups(dist.get_rank(), 1, "cpu", groups._store, 20.0)
    value = torch.ones(1)
    dist.all_reduce(value, group=next_epoch.group(members[:-1]))
    next_epoch.destroy()
    return text, value.item()


def test_a_death_frees_everybody_long_before_the_timeout_and_survivors_regroup() -> None:
    *told, _ = run_ranks(4, die_or_be_told, timeout_s=300.0, mourned=[3])  # above what the harness waits
    for text, regrouped in told:
        assert text != "nobody told me"
        assert "Timed out" not in text
        assert regrouped == 3.0


def join_late(groups: Groups, members: tuple[int, ...]) -> str:
    if dist.get_rank() == members[0]:
        return "stayed away"
    with pytest.raises(RuntimeError) as caught:
        groups.group(members)
    return type(caught.value).__name__


def test_a_member_that_never_comes_is_waited_for_no_longer_than_the_timeout() -> None:
    away, *came = run_ranks(2, join_late, timeout_s=2.0)
    assert away == "stayed away"
    assert came[0].endswith("Error")


def test_several_members_need_a_rendezvous() -> None:
    with pytest.raises(ValueError, match=r"slots \(0, 1\) cannot find each other"):
        Groups.at(RoleAssignment(0, ParallelLayout.of((0, 1)), 0, "cpu"), 5.0)


def ask_as_a_stranger(groups: Groups, members: tuple[int, ...]) -> str:
    with pytest.raises(ValueError, match="is not among the members") as caught:
        groups.group((88, 89))
    return str(caught.value)


def test_only_members_ask_for_a_group() -> None:
    assert run_ranks(1, ask_as_a_stranger, slots=(5,)) == ["slot 5 is not among the members (88, 89)"]


def abandon_after_a_failure(groups: Groups) -> None:
    groups.abandon(RuntimeError("nothing came from slot 2"))


def join_aborts() -> None:
    for thread in threading.enumerate():
        if thread.name == "abort a group":
            thread.join(10)


def closed_as_if_nccl(groups: Groups, members: tuple[int, ...], close: Callable[[Groups], None]) -> tuple[int, int]:
    """How many groups are aborted, and destroyed."""
    group = groups.group(members)
    with (
        patch.object(dist, "get_backend", return_value="nccl"),
        patch.object(c10d, "_abort_process_group", wraps=c10d._abort_process_group) as aborted,
        patch.object(dist, "destroy_process_group", wraps=dist.destroy_process_group) as destroyed,
    ):
        close(groups)
        join_aborts()
    assert group not in c10d._world.pg_map
    return aborted.call_count, destroyed.call_count


@pytest.mark.parametrize(
    ("close", "expected"),
    [
        (Groups.destroy, (0, 1)),
        (Groups.abort, (1, 0)),
        (Groups.abort_idle, (1, 0)),
        (abandon_after_a_failure, (1, 0)),
    ],
)
def test_of_nccls_groups_only_destroying_waits_for_others(
    close: Callable[[Groups], None], expected: tuple[int, int]
) -> None:
    assert run_ranks(1, closed_as_if_nccl, close) == [expected]


def waits_for_a_stuck_member(groups: Groups, members: tuple[int, ...]) -> tuple[tuple[timedelta, ...], int]:
    meeting = Mock()
    meeting.wait.side_effect = RuntimeError("Work timed out in blocking wait")
    with (
        patch.object(dist, "get_backend", return_value="nccl"),
        patch.object(dist, "barrier", return_value=meeting),
        patch.object(c10d, "_abort_process_group", wraps=c10d._abort_process_group) as aborted,
        pytest.raises(RuntimeError, match="timed out"),
    ):
        groups.group(members)
    return meeting.wait.call_args.args, aborted.call_count


def goes_on_while_nccl_aborts(groups: Groups, members: tuple[int, ...], close: Callable[[Groups], None]) -> list[bool]:
    """Whether the group is still there when `close` has returned, and once NCCL has ended it."""
    group, may_end, ends = groups.group(members), threading.Event(), c10d._abort_process_group

    def abort_slowly(one: dist.ProcessGroup) -> None:
        may_end.wait(2)
        ends(one)

    with (
        patch.object(dist, "get_backend", return_value="nccl"),
        patch.object(c10d, "_abort_process_group", abort_slowly),
    ):
        close(groups)
        meanwhile = group in c10d._world.pg_map
        may_end.set()
        join_aborts()
    return [meanwhile, group in c10d._world.pg_map]


@pytest.mark.parametrize(("close", "meanwhile"), [(Groups.abort_idle, True), (Groups.abort, False)])
def test_only_of_a_group_that_is_idle_nobody_waits_until_nccl_has_aborted_it(
    close: Callable[[Groups], None], meanwhile: bool
) -> None:
    assert run_ranks(1, goes_on_while_nccl_aborts, close) == [[meanwhile, False]]


def test_a_member_that_nccl_has_connected_is_waited_for_no_longer_than_the_timeout() -> None:
    assert run_ranks(1, waits_for_a_stuck_member, timeout_s=2.0) == [((timedelta(seconds=2.0),), 1)]


def settings_of_nccl(groups: Groups, members: tuple[int, ...]) -> dict[str, str | None]:
    """What torch finds in the environment when it makes a group."""
    found: dict[str, str | None] = {}

    def make(**arguments: object) -> None:
        found.update({variable: os.environ.get(variable) for variable in SETTINGS["nccl"]})
        raise RuntimeError("there is no GPU")

    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    with (
        patch.object(groups_module, "choose_backend", return_value=Backend("nccl")),
        patch.object(c10d, "_new_process_group_helper", make),
        pytest.raises(RuntimeError, match="there is no GPU"),
    ):
        groups.group(members)
    return found


def test_before_nccls_first_group_its_watchdog_is_told_to_leave_errors_alone() -> None:
    (found,) = run_ranks(1, settings_of_nccl)
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert found["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1", "what the user has set stays"


def test_a_group_that_cannot_be_closed_keeps_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: object) -> None:
        closed.append(group)
        if len(closed) == 1:
            raise RuntimeError("its peer is gone")

    closed: list[object] = []
    groups = Groups(0, 0, "cpu", None, 5.0)
    groups._groups = {(0, 1): "first", (0, 2): "second"}  # type: ignore[assignment]
    monkeypatch.setattr("ductile.fabric.groups._abort", refuse)
    with pytest.raises(RuntimeError, match="its peer is gone"):
        groups.abort()
    assert closed == ["first", "second"]
    assert not groups._groups
