"""Training goes on after a move as it does after loading a checkpoint in the new layout: every state tensor and every
later loss has the same bits."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ductile
from tests.nightly import mostly_nightly
from tests.resharding.world import run_world

Trained = tuple[nn.Module, torch.optim.Optimizer]
Spread = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(kind, mesh shape, ranks)"""


class Model(nn.Module):
    """Odd sizes: on three or more ranks some have no part of a bias, and the last chunks are short."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 5)
        self.head = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.register_buffer("num_batches", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches += 1
        return self.head(self.down(torch.relu(self.up(x))).bfloat16()).float()


def build(spread: Spread, mesh: DeviceMesh, seed: int) -> Trained:
    kind, _, _ = spread
    torch.manual_seed(seed)
    model = Model()
    if kind == "fsdp on tp":
        parallelize_module(model, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["a"]
    for part in (model.head, model):
        fully_shard(part, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(trained: Trained, first: int, num_steps: int) -> list[float]:
    model, optimizer = trained
    losses: list[float] = []
    for step in range(first, first + num_steps):
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bits(trained: Trained) -> dict[str, list[int]]:
    """This rank's memory of everything."""
    model, optimizer = trained
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict(model.state_dict())
    for parameter, state in optimizer.state.items():
        found |= {f"{key}/{names[id(parameter)]}": value for key, value in state.items()}
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.detach().contiguous().view(-1).view(torch.uint8).tolist() for name, value in local.items()}


def load(trained: Trained, folder: Path, group: dist.ProcessGroup) -> None:
    model, optimizer = trained
    for parameter in model.parameters():  # what a fresh AdamW would have after its first step
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter.detach()),
            "exp_avg_sq": torch.zeros_like(parameter.detach()),
        }
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def save(trained: Trained, folder: Path, group: dist.ProcessGroup) -> None:
    weights, moments = get_state_dict(*trained)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder, process_group=group)


def mesh_of(spread: Spread) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    _, shape, ranks = spread
    group = dist.new_group(sorted(ranks))
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=("a", "b")[: len(shape)]), group


def move_and_go_on(rank: int, before: Spread, after: Spread, folder: Path) -> int:
    old = new = twin = None
    source_mesh, source_group = mesh_of(before)
    target_mesh, target_group = mesh_of(after)
    if rank in before[2]:
        old = build(before, source_mesh, seed=1)
        train(old, 0, 3)
        save(old, folder, source_group)
    dist.barrier()
    if rank in after[2]:
        new = build(after, target_mesh, seed=2)  # other weights, and an optimizer that has not stepped
        twin = build(after, target_mesh, seed=3)
        load(twin, folder, target_group)
    ductile.reshard(old, new, timeout_s=20.0)
    if new is None:
        return 0
    assert bits(new) == bits(twin)
    assert train(new, 3, 3) == train(twin, 3, 3)
    assert bits(new) == bits(twin)
    return len(bits(new))


CASES: dict[str, tuple[Spread, Spread]] = {
    "2 to 3": (("fsdp", (2,), (0, 1)), ("fsdp", (3,), (0, 1, 2))),
    "4 to 1": (("fsdp", (4,), (0, 1, 2, 3)), ("fsdp", (1,), (3,))),
    "3 to 4, some without any part": (("fsdp", (3,), (1, 2, 3)), ("fsdp", (4,), (0, 1, 2, 3))),
    "disjoint": (("fsdp", (2,), (0, 1)), ("fsdp", (2,), (2, 3))),
    "hybrid to plain": (("hsdp", (2, 2), (0, 1, 2, 3)), ("fsdp", (3,), (0, 1, 2))),
    "plain to fsdp on tp": (("fsdp", (3,), (0, 1, 2)), ("fsdp on tp", (2, 2), (0, 1, 2, 3))),
    "fsdp on tp to hybrid": (("fsdp on tp", (2, 2), (0, 1, 2, 3)), ("hsdp", (2, 2), (0, 1, 2, 3))),
}


@pytest.mark.parametrize("case", mostly_nightly(CASES, "3 to 4, some without any part", "plain to fsdp on tp"))
def test_training_goes_on_as_from_a_checkpoint(case: str, tmp_path: Path) -> None:
    before, after = CASES[case]
    counts = run_world(4, move_and_go_on, before, after, tmp_path / "checkpoint")
    # 6 parameters, each with two moments and a step count, and one buffer
    assert counts == [6 * 4 + 1 if rank in after[2] else 0 for rank in range(4)]
