"""Nobody can talk through the default group, and nobody waits for it either."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ductile.fabric import universe
from tests.ranks import run_alone

ONE = torch.ones(1)

COLLECTIVES = {
    "all_reduce": lambda: dist.all_reduce(ONE),
    "all_reduce_async": lambda: dist.all_reduce(ONE, async_op=True).wait(),
    "barrier": dist.barrier,
    "monitored_barrier": dist.monitored_barrier,
    "broadcast": lambda: dist.broadcast(ONE, src=7),
    "reduce": lambda: dist.reduce(ONE, dst=7),
    "gather": lambda: dist.gather(ONE, [ONE] * universe.MAX_SLOTS, dst=7),
    "scatter": lambda: dist.scatter(ONE, [ONE] * universe.MAX_SLOTS, src=7),
    "all_gather": lambda: dist.all_gather([ONE] * universe.MAX_SLOTS, ONE),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(universe.MAX_SLOTS), ONE),
    "reduce_scatter": lambda: dist.reduce_scatter(ONE, [ONE] * universe.MAX_SLOTS),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ONE, torch.ones(universe.MAX_SLOTS)),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(universe.MAX_SLOTS), torch.ones(universe.MAX_SLOTS)),
    "send": lambda: dist.send(ONE, dst=3),
    "recv": lambda: dist.recv(ONE, src=3),
    "isend": lambda: dist.isend(ONE, dst=3),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, ONE, 3)]),
    "all_gather_object": lambda: dist.all_gather_object([None] * universe.MAX_SLOTS, "x"),
    "broadcast_object_list": lambda: dist.broadcast_object_list(["x"], src=7),
    "functional": lambda: functional.all_reduce(ONE, "sum", dist.group.WORLD).wait(),
}


def outcomes() -> dict[str, str]:
    universe.enter(7)
    said: dict[str, str] = {}
    for name, collective in COLLECTIVES.items():
        try:
            collective()
        except (RuntimeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "did nothing, silently"
    return said


def test_every_collective_on_the_default_group_raises() -> None:
    said = run_alone(outcomes)
    assert [name for name, outcome in said.items() if "silently" in outcome] == []
    assert "pass group=" in said["all_reduce"]
    assert sum(outcome.startswith("StrayCollective") for outcome in said.values()) >= len(COLLECTIVES) - 2


def coordinates() -> tuple[int, int]:
    universe.enter(12)
    universe.enter(12)  # again, as the next role of the same slot does
    return dist.get_rank(), dist.get_world_size()


def test_a_slots_rank_is_its_id() -> None:
    assert run_alone(coordinates) == (12, universe.MAX_SLOTS)


def enter_twice() -> str:
    universe.enter(1)
    with pytest.raises(RuntimeError) as caught:
        universe.enter(2)
    return str(caught.value)


def test_a_process_is_one_slot() -> None:
    assert "already is rank 1" in run_alone(enter_twice)


def test_a_slot_outside_the_universe_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 16384 is outside 0 to 16383"):
        universe.enter(universe.MAX_SLOTS)
