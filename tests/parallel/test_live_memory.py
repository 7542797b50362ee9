"""What lives is counted once, by pool, as long as it lives; torch's own tracker finds the same."""

import gc
from collections.abc import Callable
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from ductile.parallel.host_memory import host_like, is_host, mark_host, plain_tensors
from ductile.parallel.live_memory import MemoryCounter, counted_as, watched_thread
from tests.ranks import run_ranks

KB = 1024
"""Bytes of `kb(1)`."""


def kb(size: int) -> Tensor:
    return torch.zeros(size * 256)


def freed() -> None:
    kb(4)


def an_older_one_goes() -> Tensor:
    first = kb(4)
    second = kb(1)
    del first
    return second


def resized_away() -> Tensor:
    whole = kb(4)
    whole.untyped_storage().resize_(0)
    return whole


def resized_and_back() -> Tensor:
    whole = resized_away()
    whole.untyped_storage().resize_(3 * KB)
    return whole


def replaced() -> Tensor:
    tensor = kb(2)
    tensor.data = kb(3)
    return tensor


def shared_by_parameter() -> nn.Parameter:
    return nn.Parameter(kb(2))


CASES: dict[str, tuple[Callable[[], object], int, int]] = {
    "one": (lambda: kb(1), 1, 1),
    "two": (lambda: (kb(1), kb(2)), 3, 3),
    "a view": (lambda: kb(2)[:8].view(2, 4), 2, 2),
    "views that share": (lambda: kb(4).split(256), 4, 4),
    "in place": (lambda: kb(2).add_(1).mul_(2), 2, 2),
    "to the same device": (lambda: kb(2).to("cpu"), 2, 2),
    "out of place": (lambda: kb(2) + 1, 2, 4),
    "into what is there": (lambda: torch.add(kb(2), 1, out=kb(2)), 2, 4),
    "contiguous already": (lambda: kb(2).contiguous(), 2, 2),
    "a copy": (lambda: kb(2).clone(), 2, 4),
    "several results": (lambda: torch.zeros(4, 128).sort(), 6, 8),
    "a list of results": (lambda: torch._foreach_add([kb(1), kb(2)], 1.0), 3, 6),
    "expanded": (lambda: torch.zeros(256).expand(1000, 256), 1, 1),
    "freed": (freed, 0, 4),
    "an older one goes": (an_older_one_goes, 1, 5),
    "grown": (lambda: kb(1).resize_(1024), 4, 4),
    "resized away": (resized_away, 0, 4),
    "resized and back": (resized_and_back, 3, 4),
    "with other data": (replaced, 3, 5),
    "a parameter": (shared_by_parameter, 2, 2),
    "detached": (lambda: shared_by_parameter().detach(), 2, 2),
    "made of a list": (lambda: torch.tensor([0.0] * 256), 1, 1),
    "on the meta device": (lambda: torch.zeros(1024, device="meta"), 0, 0),
    "a host tensor": (lambda: host_like(kb(1)), 0, 1),
}
"""By what is made: who makes it, and the KiB that live then and at most."""


@pytest.mark.parametrize("case", CASES)
def test_what_lives_now_and_at_most(case: str) -> None:
    make, now, most = CASES[case]
    counter = MemoryCounter()
    with counter.watch():
        made = make()
    assert (counter.current_bytes("device"), counter.peak_bytes("device")) == (now * KB, most * KB)
    del made
    assert counter.current_bytes("device") == 0, "what is gone is not counted, also when nobody watches"
    assert sum(counter.peak_parts("device").values()) == most * KB


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["make", "view", "grow", "shrink", "free", "host"]), st.integers(0, 9))))
def test_any_story_ends_with_what_storages_hold(story: list[tuple[str, int]]) -> None:
    counter, alive = MemoryCounter(), list[Tensor]()
    most = 0
    with counter.watch():
        for what, which in story:
            if what == "make" or not alive:
                alive.append(kb(1 + which))
                continue
            tensor = alive[which % len(alive)]
            if what == "view":
                alive.append(tensor[: which + 1])
            elif what in ("grow", "shrink"):
                storage = tensor.untyped_storage()
                storage.resize_(max(0, storage.nbytes() + {"grow": 512, "shrink": -512}[what]))
                del storage
            elif what == "free":
                alive.pop(which % len(alive))
            else:
                mark_host(tensor)
            del tensor
            most = max(most, held(alive, host=False))
    for pool in ("device", "host"):
        assert counter.current_bytes(pool) == held(alive, host=pool == "host")
    assert counter.peak_bytes("device") >= most


def held(tensors: list[Tensor], host: bool) -> int:
    """Bytes of one pool, by a walk over all storages."""
    storages = {id(each.untyped_storage()): each for each in tensors if is_host(each) == host}
    return sum(each.untyped_storage().nbytes() for each in storages.values())


def test_host_memory_is_a_pool_of_its_own() -> None:
    counter = MemoryCounter()
    with counter.watch():
        device = kb(2)
        host = host_like(device, torch.bfloat16)
        host.copy_(device)
        half = host[:256]
    assert (host.dtype, host.shape) == (torch.bfloat16, device.shape)
    assert is_host(half)
    assert not is_host(device)
    assert (counter.peak_bytes("device"), counter.peak_bytes("host")) == (2 * KB, KB), "not even for a moment"
    del host
    assert counter.current_bytes("host") == KB, "a view keeps it"
    del half
    assert counter.current_bytes("host") == 0


def test_what_is_marked_later_moves() -> None:
    counter = MemoryCounter()
    with counter.watch():
        tensor = kb(2)
        mark_host(tensor[:1])
        mark_host(tensor)
    assert (counter.current_bytes("device"), counter.current_bytes("host")) == (0, 2 * KB)
    assert (counter.peak_bytes("device"), counter.peak_bytes("host")) == (2 * KB, 2 * KB)
    assert counter.peak_parts("host") == {"aten::zeros": 2 * KB}


def test_what_was_there_before_is_added_once() -> None:
    there, counter = kb(2), MemoryCounter()
    counter.add([there, there[:8], there.view(2, -1)], "parameters")
    with counter.watch():
        there.add_(1)
        there[:8].mul_(2)
    assert counter.current_bytes("device") == 2 * KB
    assert counter.peak_parts("device") == {"parameters": 2 * KB}


def test_a_storage_that_is_resized_by_an_operator_of_another_is_one() -> None:
    """FSDP2's gathered parameters: one storage, freed and allocated again, behind the same views."""
    counter = MemoryCounter()
    with counter.watch():
        whole = kb(4)
        views = whole.split(256)
        for _ in range(3):
            whole.untyped_storage().resize_(0)
            assert counter.current_bytes("device") == 0
            whole.untyped_storage().resize_(4 * KB)
            torch._foreach_add_(list(views), 1.0)
    assert (counter.current_bytes("device"), counter.peak_bytes("device")) == (4 * KB, 4 * KB)


def test_resizing_is_torchs_own_again_when_nobody_watches() -> None:
    plain, counter, other = torch.UntypedStorage.resize_, MemoryCounter(), MemoryCounter()
    with counter.watch(), other.watch():
        assert torch.UntypedStorage.resize_ is not plain
        tensor = kb(1)
        tensor.untyped_storage().resize_(0)
    assert torch.UntypedStorage.resize_ is plain
    assert counter.current_bytes("device") == other.current_bytes("device") == 0


def test_other_threads_are_seen_when_they_are_watched() -> None:
    counter, made = MemoryCounter(), list[Tensor]()

    def unseen() -> None:
        made.append(kb(1))

    def by_the_counter() -> None:
        with counter.watch():
            made.append(kb(2))

    def by_the_product() -> None:
        with watched_thread():
            made.append(kb(4))

    with counter.watch():
        for work in (unseen, by_the_counter, by_the_product):
            thread = Thread(target=work)
            thread.start()
            thread.join()
    assert counter.current_bytes("device") == 6 * KB
    made.clear()
    assert counter.current_bytes("device") == 0
    by_the_product()
    assert counter.current_bytes("device") == 0, "nobody watches"


def test_threads_at_once_lose_nothing() -> None:
    counter, kept = MemoryCounter(), list[Tensor]()

    def work() -> None:
        with watched_thread():
            for _ in range(200):
                kept.append(kb(1)[:8] + 1)

    with counter.watch():
        threads = [Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
    assert counter.current_bytes("device") == 5 * 200 * 8 * 4


def test_a_backward_pass_is_seen() -> None:
    counter = MemoryCounter()
    with counter.watch():
        weight = kb(4).requires_grad_()
        squared = weight * weight
        counter.reset_peak()
        squared.sum().backward()
    assert weight.grad is not None
    assert counter.current_bytes("device") == 3 * 4 * KB, "weight, square, gradient"
    assert counter.peak_bytes("device") >= 4 * 4 * KB, "each factor has a gradient for a moment"


def test_a_peak_begins_anew() -> None:
    counter = MemoryCounter()
    with counter.watch():
        kept, gone = kb(1), kb(8)
        del gone
        counter.reset_peak()
        assert counter.peak_bytes("device") == KB
        del kept
    assert counter.peak_bytes("device") == KB


def test_a_peak_has_parts() -> None:
    counter = MemoryCounter()
    with counter.watch():
        with counted_as("weights"):
            weights = kb(4)
        doubled = weights * 2
        del doubled
        del weights
        kb(1)
    assert counter.peak_parts("device") == {"weights": 4 * KB, "aten::mul": 4 * KB}


def test_two_counters_count_apart() -> None:
    outer, inner = MemoryCounter(), MemoryCounter()
    with outer.watch():
        first = kb(1)
        with inner.watch():
            second = kb(2)
    assert (outer.current_bytes("device"), inner.current_bytes("device")) == (3 * KB, 2 * KB)
    del first, second
    assert (outer.current_bytes("device"), inner.current_bytes("device")) == (0, 0)


def test_a_counter_that_is_gone_is_told_nothing() -> None:
    counter = MemoryCounter()
    with counter.watch():
        tensor = kb(1)
    del counter
    gc.collect()
    mark_host(tensor)
    assert is_host(tensor)


def test_a_tensor_whose_memory_cannot_be_counted_is_refused() -> None:
    with MemoryCounter().watch(), pytest.raises(ValueError, match=r"aten::.* made a tensor whose memory cannot be"):
        torch.eye(4).to_sparse()


class Block(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self._again = again

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self._inside, x, use_reentrant=False) if self._again else self._inside(x))

    def _inside(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_torchs_tracker_finds_the_same(again: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(again) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    counter, x = MemoryCounter(), torch.randn(512, 64)
    counter.add([*model.parameters(), x])
    with counter.watch():
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x)
        with tracker:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    cpu = torch.device("cpu")
    theirs = [tracker.get_tracker_snapshot(when)[cpu]["Total"] for when in ("peak", "current")]
    ours = [counter.peak_bytes("device"), counter.current_bytes("device")]
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours[0] > 4 * 512 * 256 * 4 * (0.5 if again else 2), "activations are among it"


def sharded_step(groups: object, members: tuple[int, ...]) -> dict[str, float]:
    """A step of a model that FSDP2 shards over two ranks: bytes by what was found when."""
    from torch.distributed.fsdp import fully_shard

    from ductile.core.layout.geometry.parallel_layout import ParallelLayout
    from ductile.parallel.parallel_context import ParallelContext

    context = ParallelContext(groups, ParallelLayout.of(members))  # pyright: ignore[reportArgumentType]
    counter, x = MemoryCounter(), torch.randn(64, 64)
    counter.add([x])
    with counter.watch():
        model = nn.Sequential(*(Block(again=False) for _ in range(3)))
        whole = sum(parameter.nbytes for parameter in model.parameters())
        for block in model:
            fully_shard(block, mesh=context.mesh)
        fully_shard(model, mesh=context.mesh)
        for module in model.modules():
            if isinstance(module, nn.Module) and hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_gradient_divide_factor(1.0)  # pyright: ignore
                module.set_force_sum_reduction_for_comms(True)  # pyright: ignore
        gc.collect()
        sharded = counter.current_bytes("device") - x.nbytes
        model(x).sum().backward()
        gc.collect()
        after = counter.current_bytes("device") - x.nbytes
    held = sum(part.untyped_storage().nbytes() for each in model.parameters() for part in plain_tensors(each))
    return {"whole": whole, "held": held, "sharded": sharded, "after": after, "peak": counter.peak_bytes("device")}


def test_gathered_parameters_come_and_go() -> None:
    for found in run_ranks(2, sharded_step):
        assert found["sharded"] == found["held"], "whole parameters are gone"
        assert found["held"] <= 0.55 * found["whole"]
        assert found["after"] < found["sharded"] + 0.6 * found["whole"], "shards and their gradients, nothing gathered"
        assert found["peak"] >= found["whole"]
