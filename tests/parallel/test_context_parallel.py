"""A micro-batch that slots along cp run together has the scores, the loss and the gradients of one that a single slot
runs, in both styles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ductile.core.layout.context_parallel import CPStyle
from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.model.checkpoint import load_model
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel import data
from ductile.parallel.context_parallel import aligned, split
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import Sample
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

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
    "fewer tokens than slots": SHARED[1:2],
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
    """Key heads: as many as query heads, fewer than slots, and a number that does not divide those of a slot."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_model_folder(root / "llama", "llama", tie_word_embeddings=False, num_key_value_heads=4),
        "qwen3": make_model_folder(root / "qwen3", "qwen3", num_key_value_heads=1),
        "qwen3 of 12 heads": make_model_folder(
            root / "12", "qwen3", num_attention_heads=12, num_key_value_heads=3, num_hidden_layers=1
        ),
    }


def loss_of(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """A loss that needs the whole: each score's weight depends on all of them."""
    weights = torch.linspace(-1.0, 1.0, len(logprobs))
    return (logprobs * weights).sum() + logprobs.square().mean().sqrt() + 0.1 * entropies.sum()


def on_one_slot(folder: Path, samples: Sequence[Sample]) -> Found:
    model = load_model(folder)
    logprobs, entropies = PackedSamples.of(samples).score(model)
    return found(model, logprobs, entropies)


def found(model: Transformer, logprobs: Tensor, entropies: Tensor) -> Found:
    loss = loss_of(logprobs, entropies) if len(logprobs) else logprobs.sum()
    loss.backward()
    grads = {name: data.full(parameter.grad) for name, parameter in model.named_parameters()}
    return Found(logprobs.detach(), entropies.detach(), loss.item(), grads)


def on_many(
    groups: Groups, members: tuple[int, ...], folder: Path, batches: list[list[Sample]], style: CPStyle, cp: int
) -> Found:
    """Each copy along dp_shard has a micro-batch of its own."""
    context = ParallelContext(groups, ParallelLayout.of(members, cp=cp))
    model = load_model(folder)
    data.shard(model, context.mesh, torch.float32, torch.float32, reshard_after_forward=True)
    packed = aligned(PackedSamples.of(batches[context.data_parallel_rank]), style, cp)
    part = split(packed, style, context.group("cp"))
    assert len(part.token_ids) * cp == len(packed.token_ids)
    head = LogprobHead(part.rows, part.targets, part.temperatures)
    return found(model, *part.gather(*model(part.token_ids, part.positions, part.attend, head)))
