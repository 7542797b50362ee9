"""The head and the embedding of a vocabulary that is dealt out, against those of a whole one."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ductile.fabric.groups import Groups
from ductile.model.logprobs import LogprobHead
from ductile.parallel.vocabulary_parallel import VocabularyParallelEmbedding, VocabularyParallelHead
from tests.ranks import run_ranks

T, M, N = 12, 8, 17


@dataclass(frozen=True)
class Case:
    vocab_size: int = 11
    num_scored: int = N
    chunk_tokens: int | None = None
    with_temperatures: bool = False
    scale: float = 1.0
    """What random logits are multiplied with: at 300 most probabilities are 0."""


CASES = [
    Case(),
    Case(chunk_tokens=5),
    Case(with_temperatures=True),
    Case(chunk_tokens=1, with_temperatures=True),
    Case(vocab_size=5),
    Case(vocab_size=1, chunk_tokens=4),
    Case(scale=300.0),
    Case(num_scored=0),
]


def results(head: LogprobHead, call: object, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    """Log-probs and entropies; gradients of each of them, and of both."""
    upstream = torch.randn(2, len(head.rows), generator=torch.Generator().manual_seed(1))
    logprobs, entropies = call(hidden, weight)
    found = [logprobs.detach(), entropies.detach()]
    for factors in ((1, 0), (0, 1), (1, -3)):
        loss = sum(
            factor * (values * row).sum()
            for factor, values, row in zip(factors, (logprobs, entropies), upstream, strict=True)
            if factor
        )
        found += torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    return found


def scores(groups: Groups, members: tuple[int, ...]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """For each case: what the slot has, of which it has a part of the tokens and of the rows; and all of it."""
    group = groups.group(members)
    rank, size = group.rank(), group.size()
    found = []
    for case in CASES:
        random = torch.Generator().manual_seed(0)
        hidden = torch.randn(T, M, generator=random).requires_grad_()
        weight = (torch.randn(case.vocab_size, M, generator=random) * case.scale).requires_grad_()
        rows = torch.randint(0, T, (case.num_scored,), generator=random)
        targets = torch.randint(0, case.vocab_size, (case.num_scored,), generator=random)
        temperatures = torch.rand(case.num_scored, generator=random) + 0.3 if case.with_temperatures else None
        head = LogprobHead(rows, targets, temperatures, case.chunk_tokens)
        whole = results(head, head, hidden, weight)
        num_rows = -(-case.vocab_size // size)
        padded = F.pad(weight.detach(), (0, 0, 0, num_rows * size - case.vocab_size), value=torch.nan)
        of_slot = (
            part.detach().clone().requires_grad_() for part in (hidden.chunk(size)[rank], padded.chunk(size)[rank])
        )
        found.append((results(head, VocabularyParallelHead(head, case.vocab_size, group), *of_slot), whole))
    return found


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_the_head_of_a_part_gives_what_the_whole_one_gives(num_slots: int) -> None:
    by_slot = run_ranks(num_slots, scores)
    for case, *of_case in zip(CASES, *by_slot, strict=True):
        whole = of_case[0][1]
        parts = [part for part, _ in of_case]
        for part in parts:
            assert all(torch.equal(mine, first) for mine, first in zip(part[:2], parts[0][:2], strict=True)), case
        joined = parts[0][:2] + [torch.cat(each) for each in list(zip(*parts, strict=True))[2:]]
        for ours, theirs in zip(joined, whole, strict=True):
            assert not ours[len(theirs) :].any(), "rows of padding have a gradient"
            torch.testing.assert_close(ours[: len(theirs)], theirs, rtol=1e-3, atol=2e-4, msg=str(case))


def embeddings(groups: Groups, members: tuple[int, ...], vocab_size: int) -> tuple[Tensor, Tensor]:
    """The slot's tokens, and the gradient of its rows."""
    group = groups.group(members)
    weight = torch.arange(vocab_size * M, dtype=torch.float32).view(vocab_size, M)
    num_rows = -(-vocab_size // group.size())
    padded = F.pad(weight, (0, 0, 0, num_rows * group.size() - vocab_size), value=torch.nan)
    whole = nn.Embedding(num_rows, M, _weight=padded.chunk(group.size())[group.rank()].clone())
    embedding = VocabularyParallelEmbedding(whole, group)
    out = embedding(torch.arange(T) % vocab_size)
    (out * (1 + group.rank())).sum().backward()
    return out.detach(), embedding.weight.grad


@pytest.mark.parametrize(("num_slots", "vocab_size"), [(2, 7), (3, 12), (4, 5)])
def test_embeddings(num_slots: int, vocab_size: int) -> None:
    weight = torch.arange(vocab_size * M, dtype=torch.float32).view(vocab_size, M).requires_grad_()
    expected = weight[torch.arange(T) % vocab_size]
    (expected * (1 + torch.arange(T) // (T // num_slots))[:, None]).sum().backward()
    parts = run_ranks(num_slots, embeddings, vocab_size)
    assert torch.equal(torch.cat([tokens for tokens, _ in parts]), expected)
    gradient = torch.cat([grad for _, grad in parts])
    assert torch.equal(gradient[:vocab_size], weight.grad)
    assert not gradient[vocab_size:].any()
