"""Activations that layers save wait in host memory, and no more of them than asked for are in flight."""

import random
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ductile.core.layout.memory.offloaded import LEAST_BYTES
from ductile.parallel.activation_offloading import ActivationOffload, HostPool
from ductile.parallel.host_copies import Copy, HostCopies, host_copies
from ductile.parallel.host_memory import is_host
from ductile.parallel.live_memory import MemoryCounter

CPU = torch.device("cpu")
WIDTH = 64


class LateCopy:
    def __init__(self, copies: "LateCopies") -> None:
        self._copies, self._number = copies, len(copies.begun)

    def wait(self) -> None:
        self._copies.run(self._number + 1)

    finish = wait


class LateCopies:
    """Copies that are made as late as a stream may make them: when somebody waits for them."""

    def __init__(self) -> None:
        self.begun: list[tuple[Tensor, Tensor]] = []
        self.num_done = 0

    def start(self, source: Tensor, target: Tensor) -> Copy:
        copy = LateCopy(self)
        self.begun.append((source, target))
        return copy

    def run(self, until: int) -> None:
        for source, target in self.begun[self.num_done : until]:
            target.copy_(source)
        self.num_done = max(self.num_done, until)


@pytest.fixture(params=["immediate", "late"])
def copies(request: pytest.FixtureRequest) -> HostCopies:
    return host_copies(CPU) if request.param == "immediate" else LateCopies()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(x * shared)))


def run(blocks: nn.ModuleList, offload: ActivationOffload | None) -> list[Tensor]:
    """Return the output of the blocks, and the gradients of the input and of all weights."""
    x = torch.linspace(-1, 1, 32 * WIDTH).view(32, WIDTH).requires_grad_()
    shared = torch.linspace(0, 1, 32 * WIDTH).view(32, WIDTH)
    hidden = x
    for block in blocks:
        hidden = offload.run(block, block, hidden, shared) if offload else block(hidden, shared)
    blocks.zero_grad()
    hidden.square().sum().backward()
    return [hidden.detach(), *(parameter.grad.clone() for parameter in (x, *blocks.parameters()))]  # pyright: ignore


@pytest.mark.parametrize("in_flight", [1, 2, 5, 100])
def test_gradients_keep_every_bit_and_no_more_are_in_flight(copies: HostCopies, in_flight: int) -> None:
    torch.manual_seed(1)
    blocks = nn.ModuleList(Block() for _ in range(4))
    plain = run(blocks, None)
    offload = ActivationOffload(in_flight, copies, CPU)
    for _ in range(2):
        for ours, theirs in zip(run(blocks, offload), plain, strict=True):
            assert torch.equal(ours, theirs)
    per_block = (
        3  # x * shared, what goes into sin and what comes out of it; x, as shared wants no gradient, is not kept
    )
    counters = offload.counters
    assert counters.num_offloaded == 2 * 4 * per_block
    assert counters.most_in_flight == min(in_flight, 4 * per_block)
    assert counters.num_returned == max(0, counters.num_offloaded - 2 * in_flight)


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_what_is_used_twice_is_bounded_too(copies: HostCopies, in_flight: int) -> None:
    def forward(x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.sin(x) * x.cos() + x * x
        return x

    x = torch.linspace(0, 1, 4096).requires_grad_()
    (expected,) = torch.autograd.grad(forward(x).sum(), x)
    offload = ActivationOffload(in_flight, copies, CPU)
    (found,) = torch.autograd.grad(offload.run(nn.Identity(), forward, x).sum(), x)
    assert torch.equal(found, expected)
    assert offload.counters.most_in_flight == in_flight


def test_what_is_small_or_shared_or_a_weight_stays() -> None:
    offload = ActivationOffload(1, host_copies(CPU), CPU)
    block = nn.Linear(WIDTH, WIDTH)
    few = torch.zeros(LEAST_BYTES // 4 // WIDTH - 1, WIDTH, requires_grad=True)
    offload.run(block, block, few).sum().backward()
    assert offload.counters.num_offloaded == 0
    many = torch.zeros(32, WIDTH, requires_grad=True)
    offload.run(block, lambda x, shared: block(x) * shared, many, torch.ones(32, WIDTH)).sum().backward()
    assert offload.counters.num_offloaded == 1, "the input of the product; neither its weight nor `shared`"


def test_buffers_are_host_memory_and_used_again() -> None:
    offload = ActivationOffload(1, copies := LateCopies(), CPU)
    block = Block()
    for _ in range(3):
        run(nn.ModuleList([block]), offload)
    hosts = [target for source, target in copies.begun if is_host(target)]
    assert len(hosts) == offload.counters.num_offloaded
    assert len({host.untyped_storage().data_ptr() for host in hosts}) == len(hosts) / 3


def test_memory_that_is_used_again_is_not_taken_for_what_it_held() -> None:
    """A tensor that has left, and another one at its address, are two activations."""
    offload = ActivationOffload(1, host_copies(CPU), CPU)

    def forward(x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.sin(x)  # saves its input, whose memory is free once it has left
        return x

    x = torch.linspace(0, 3, 4096).requires_grad_()
    offload.run(nn.Identity(), forward, x).sum().backward()
    ours, x.grad = x.grad, None
    forward(x).sum().backward()
    assert ours is not None
    assert x.grad is not None
    assert torch.equal(ours, x.grad)


def test_what_no_backward_pass_uses_any_more_is_kept_until_its_copy_is_done() -> None:
    offload = ActivationOffload(3, copies := LateCopies(), CPU)
    x = torch.linspace(0, 1, 4096).requires_grad_()
    middle = offload.run(nn.Identity(), lambda x: torch.sin(torch.sin(torch.sin(torch.sin(x)))), x)
    y = offload.run(nn.Identity(), lambda x: torch.sin(torch.sin(torch.sin(torch.sin(x)))), middle)
    torch.autograd.grad(y.sum(), middle)  # the last half alone: some of the first half come back ahead
    assert offload.counters.num_returned
    del y, middle
    assert copies.num_done < len(copies.begun)
    run(nn.ModuleList([Block()]), offload)
    assert copies.num_done == len(copies.begun), "copies to memory that was given up have been waited for"


@given(st.lists(st.lists(st.integers(1, 10_000), max_size=6), max_size=20))
def test_a_pool_has_no_more_buffers_than_were_used_at_a_time(passes: list[list[int]]) -> None:
    pool, seen = HostPool(CPU), WeakSet[torch.UntypedStorage]()
    for sizes in passes:
        buffers = [pool.take(size) for size in sizes]
        assert all(len(buffer) >= size for buffer, size in zip(buffers, sizes, strict=True))
        assert len({buffer.data_ptr() for buffer in buffers}) == len(buffers)
        for buffer in buffers:
            seen.add(buffer.untyped_storage())
            pool.put(buffer)
        del buffers[:]
        buffer = None
    assert len(seen) <= max(map(len, passes), default=0)


def test_micro_batches_that_vary_take_little_more_than_the_largest() -> None:
    pool, tensors, counter = HostPool(CPU), [1000, 4000, 1000, 2000] * 3, MemoryCounter()
    rng = random.Random(1)
    with counter.watch():
        for _ in range(50):
            scale = rng.uniform(0.1, 1)
            for buffer in [pool.take(int(scale * size)) for size in tensors]:
                pool.put(buffer)
    assert counter.peak_bytes("host") < 1.5 * sum(tensors)
