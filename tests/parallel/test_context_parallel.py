"""A micro-batch that slots along cp run together has the scores, the loss and the gradients of one that a single slot
runs, in both styles."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ductile.core.layout.geometry.context_parallel import CpStyle, token_multiple, tokens_of_slots
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.model.attention import Attend, PackedAttention
from ductile.model.checkpoint import load_model
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel import data
from ductile.parallel.context_parallel import aligned, split
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.ring import BACK, FRONT, RingAttention, seen
from ductile.parallel.scoring import HeadOptions, score
from ductile.parallel.ulysses import UlyssesAttention, key_heads
from ductile.records import Sample
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

TOLERANCE = 1e-4
NO_GRADIENT = 1e-6
"""Largest gradient that only rounding can make."""

PROMPT = (10, 11, 12, 13, 14)
SHARED = [
    Sample((*PROMPT, 30, 31, 32), (False,) * 5 + (True,) * 3),
    Sample((20, 40), (False, True)),
    Sample((*PROMPT, 33), (False,) * 5 + (True,), temperature=0.5),
    Sample((*PROMPT, 30, 34, 35, 36), (False,) * 5 + (True, False, True, False)),
    Sample((20, 41, 42), (False, True, True)),
    Sample((50, 51, 52), (False, False, False)),
]
BATCHES = {
    "uneven lengths, one of one token": make_samples((20, 2, 9, 31, 8), temperatures=(1.0, 0.6)),
    "shared prompts": SHARED,
    "one token, fewer than slots": SHARED[1:2],
    "empty": [],
}


@dataclass
class Found:
    logprobs: Tensor
    entropies: Tensor
    loss: float
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Key heads: as many as query heads, fewer than slots, and a number that divides nothing."""
    root = tmp_path_factory.mktemp("models")
    twelve = {"num_attention_heads": 12, "num_key_value_heads": 3, "num_hidden_layers": 1}
    return {
        "llama": make_model_folder(root / "llama", "llama", tie_word_embeddings=False, num_key_value_heads=4),
        "qwen3, 1 key head": make_model_folder(root / "qwen3", "qwen3", num_key_value_heads=1),
        "qwen3, 3 key heads": make_model_folder(root / "twelve", "qwen3", **twelve),
    }


def loss_of(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """A loss in which the weight of each score depends on all of them."""
    if not len(logprobs):
        return logprobs.sum()
    weights = torch.linspace(-1.0, 1.0, len(logprobs))
    return (logprobs * weights).sum() + logprobs.square().mean().sqrt() + 0.1 * entropies.sum()


def run_back(model: Transformer, logprobs: Tensor, entropies: Tensor) -> Found:
    loss = loss_of(logprobs, entropies)
    loss.backward()
    gradients = {name: data.local_shard(gradient) for name, gradient in data.named_gradients(model).items()}
    return Found(logprobs.detach(), entropies.detach(), loss.item(), gradients)


def on_many(
    groups: Groups, members: tuple[int, ...], folder: Path, batches: list[list[Sample]], style: CpStyle, cp: int
) -> Found:
    """Each slot's shard of the gradients; each data-parallel rank has a micro-batch of its own."""
    context = ParallelContext(groups, ParallelLayout.of(members, cp=cp))
    model = load_model(folder)
    data.shard(model, context.mesh, torch.float32, torch.float32, reshard_after_forward=True)
    packed = PackedSamples.of(batches[context.data_parallel_rank])
    return run_back(model, *score(model, packed, context, HeadOptions(3), style))


def compare(found: Sequence[Found], folder: Path, batches: list[list[Sample]], cp: int) -> None:
    """What slots found against one slot that runs one batch after the other."""
    model, gradients = load_model(folder), dict[str, Tensor]()
    for index, samples in enumerate(batches):
        expected = run_back(model, *PackedSamples.of(samples).score(model))
        gradients = expected.gradients
        for of_slot in found[index * cp : (index + 1) * cp]:
            torch.testing.assert_close(of_slot.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(of_slot.entropies, expected.entropies, atol=TOLERANCE, rtol=0)
            assert of_slot.loss == pytest.approx(expected.loss, abs=TOLERANCE)
    for name, theirs in gradients.items():
        ours = torch.cat([of_slot.gradients[name] for of_slot in found])
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max() + NO_GRADIENT, name


@pytest.mark.parametrize("style", ["ulysses", "ring"])
@pytest.mark.parametrize("cp", mostly_nightly([2, 4], 4))
@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("family", mostly_nightly(["llama", "qwen3, 1 key head"], "qwen3, 1 key head"))
def test_parity_with_one_slot(folders, family: str, batch: str, cp: int, style: CpStyle) -> None:
    batches = [BATCHES[batch]]
    compare(run_ranks(cp, on_many, folders[family], batches, style, cp), folders[family], batches, cp)


@pytest.mark.parametrize("cp", [2, 4])
def test_parity_where_slots_need_the_same_key_head_for_several_heads(folders, cp: int) -> None:
    folder, batches = folders["qwen3, 3 key heads"], [SHARED]
    compare(run_ranks(cp, on_many, folder, batches, "ulysses", cp), folder, batches, cp)


@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_parity_with_data_parallel_ranks_beside_it(folders, style: CpStyle) -> None:
    """FSDP2 shards over dp_shard and cp together, and its sum over both is that over all tokens."""
    folder, batches = folders["llama"], [BATCHES["uneven lengths, one of one token"], SHARED]
    compare(run_ranks(4, on_many, folder, batches, style, 2), folder, batches, 2)


def parts(
    groups: Groups, members: tuple[int, ...], style: CpStyle, filled_to: int
) -> tuple[list[int], list[int], tuple[Tensor, Tensor], list[float]]:
    """Tokens, what is scored, what is gathered, and the gradient that comes back of it."""
    packed = aligned(PackedSamples.of(SHARED), style, len(members))
    part = split(packed.padded(filled_to), style, groups.group(members))
    own = part.scored.float().requires_grad_()
    gathered = part.gather(own, own * 10)
    values = gathered[0].detach().clone(), gathered[1].detach()
    gathered[0].mul_(torch.arange(9)).sum().backward()  # in place, as a loss may
    assert own.grad is not None
    return part.token_ids.tolist(), part.scored.tolist(), values, (own.grad - own.detach()).tolist()


@pytest.mark.parametrize("style", ["ulysses", "ring"])
@pytest.mark.parametrize("filled_to", [0, 96])
def test_scores_come_back_in_the_order_of_the_samples(style: CpStyle, filled_to: int) -> None:
    """Also when a pipeline has filled the micro-batch up to the size of its buckets."""
    fewest = len(aligned(PackedSamples.of(SHARED), style, 3).token_ids)
    assert fewest % token_multiple(style, 3) == 0
    found = run_ranks(3, parts, style, filled_to or fewest)
    assert {len(tokens) for tokens, *_ in found} == {(filled_to or fewest) // 3}
    assert sorted(index for _, scored, *_ in found for index in scored) == list(range(9))
    for _, scored, (logprobs, entropies), other_than_own in found:
        assert logprobs.tolist() == list(range(9))
        assert entropies.tolist() == [10.0 * index for index in range(9)]
        assert other_than_own == [0.0] * len(scored), "a slot's gradient is that of its own scores"


def test_scores_are_dealt_out_evenly() -> None:
    long = [Sample((*range(5, 45), *range(50, 66)), (False,) * 40 + (True,) * 16)]
    assert [len(scored) for _, scored, *_ in run_ranks(4, scored_by, long)] == [4] * 4


def scored_by(groups: Groups, members: tuple[int, ...], samples: list[Sample]) -> tuple[None, list[int]]:
    packed = aligned(PackedSamples.of(samples), "ulysses", len(members))
    return None, split(packed, "ulysses", groups.group(members)).scored.tolist()


LENGTHS = (8, 4, 4, 24)
"""Documents, each a multiple of twice the number of slots."""


def attends(
    groups: Groups, members: tuple[int, ...], style: CpStyle, num_kv_heads: int, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients of attention over `LENGTHS`, of all tokens."""
    group = groups.group(members)
    whole = [x.to(dtype) for x in draw(num_kv_heads)]
    tokens = slots_tokens(style)[group.rank()]
    attend: Attend = UlyssesAttention(PackedAttention(LENGTHS), group)
    if style == "ring":
        attend = RingAttention([length // 4 for length in LENGTHS], group)
    q, k, v = (x[tokens].requires_grad_() for x in whole[:3])
    out = attend(0, q, k, v)
    own = [out, *torch.autograd.grad(out, (q, k, v), whole[3][tokens])]
    for x, of_slot in zip(whole, (own[1], own[2], own[3], own[0]), strict=True):
        x.zero_()
        x[tokens] = of_slot.detach()
        dist.all_reduce(x, group=group)
    return [whole[3], *whole[:3]]


def slots_tokens(style: CpStyle) -> Tensor:
    return torch.from_numpy(tokens_of_slots(style, LENGTHS, 2))


def draw(num_kv_heads: int) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    random = torch.Generator().manual_seed(5)
    return [torch.randn((sum(LENGTHS), heads, 8), generator=random) for heads in (4, num_kv_heads, num_kv_heads, 4)]


@pytest.mark.parametrize("style", ["ulysses", "ring"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_attention_is_that_of_one_slot(style: CpStyle, num_kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v, grad = draw(num_kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = PackedAttention(LENGTHS)(0, q, k, v)
    expected = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    for found in run_ranks(2, attends, style, num_kv_heads, dtype):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == dtype
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "cp", "expected"),
    [
        (8, 4, 2, [0, 1, 2, 3]),
        (8, 2, 4, [0, 0, 1, 1]),
        (8, 1, 2, [0, 0]),
        (12, 3, 2, [0, 0, 1, 1, 2, 2]),
        (4, 4, 4, [0, 1, 2, 3]),
    ],
)
def test_a_slot_gets_the_key_heads_of_its_query_heads(num_heads, num_kv_heads, cp, expected) -> None:
    found = key_heads(num_heads, num_kv_heads, cp)
    assert found == expected
    spread = [key for key in found for _ in range(num_heads // len(found))]
    assert spread == [head * num_kv_heads // num_heads for head in range(num_heads)]
    assert len(found) % cp == 0


def test_a_chunk_sees_earlier_ones_whole_and_itself_causally() -> None:
    own = [(FRONT, FRONT, True), (BACK, FRONT, False), (BACK, BACK, True)]
    assert seen(1, 1, 3) == own
    assert seen(1, 0, 3) == [(FRONT, FRONT, False), (BACK, FRONT, False)]
    assert seen(1, 2, 3) == [(BACK, FRONT, False), (BACK, BACK, False)]
    assert {len(seen(rank, source, 5)) for rank in range(5) for source in range(5) if rank != source} == {2}


def meets_a_death(groups: Groups, members: tuple[int, ...], style: CpStyle) -> str:
    group = groups.group(members)
    part = split(aligned(PackedSamples.of(SHARED), style, len(members)), style, group)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    qkv = [torch.zeros(len(part.token_ids), 2, 8) for _ in range(3)]
    try:
        part.attend(0, *qkv)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_a_slot_that_dies_is_an_error_for_the_others(style: CpStyle) -> None:
    survivor, _ = run_ranks(2, meets_a_death, style, mourned=(1,))
    assert survivor
