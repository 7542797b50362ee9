"""The formula against torch's own count of what it multiplies, to the last operation."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ductile.core.layout.model.flops import ForwardWork, forward_flops, training_flops
from ductile.core.layout.model.lora import LoraSpec
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.checkpoint import load_model
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.records import Sample
from tests.tiny import make_model_folder


def values(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention at all, with every gradient in its place."""
    groups = q.shape[1] // k.shape[1]
    return q + (k + v).repeat_interleave(groups, dim=1)


def whole_square(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees every one: what an implementation multiplies that computes full squares."""
    groups = q.shape[1] // k.shape[1]
    queries, keys, values = (x.transpose(0, 1) for x in (q, *(x.repeat_interleave(groups, dim=1) for x in (k, v))))
    return torch.bmm(torch.bmm(queries, keys.transpose(1, 2)).softmax(-1), values).transpose(0, 1)


def of_norms(spec: ModelSpec, num_tokens: int) -> int:
    """`kernels.norm` takes the gradient of a norm's weight, a sum over rows, as a product with a vector."""
    return 2 * num_tokens * spec.hidden_size * (2 * spec.num_layers + 1)


def samples() -> list[Sample]:
    """Two that begin alike and one that does not."""
    mask = (False, False, False, True, True)
    return [
        Sample((5, 6, 7, 8, 9), mask),
        Sample((5, 6, 7, 10, 11, 12, 13), (*mask, False, True)),
        Sample((20, 21, 22), (False, True, True)),
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_and_head_without_attention(family: str, tied: bool, tmp_path: Path) -> None:
    model = load_model(make_model_folder(tmp_path, family, tie_word_embeddings=tied))
    packed = PackedSamples.of(samples())
    assert packed.work.num_tokens == len(packed.token_ids) == 3 + 1 + 3 + 2
    assert packed.work.num_scored == 2 + 3 + 2
    head = LogprobHead(packed.rows, packed.targets)
    work = ForwardWork(packed.work.num_tokens, 0, packed.work.num_scored)
    with FlopCounterMode(display=False) as forward:
        logprobs, _ = model(packed.token_ids, packed.positions, values, head)
    with FlopCounterMode(display=False) as backward:
        logprobs.sum().backward()
    assert forward.get_total_flops() == forward_flops(model.spec, work)
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total - of_norms(model.spec, work.num_tokens) == training_flops(model.spec, work)


def test_attention_over_a_whole_square(tmp_path: Path) -> None:
    model = load_model(make_model_folder(tmp_path, num_hidden_layers=3))
    num = 11
    tokens, positions, rows = torch.arange(num), torch.arange(num), torch.arange(4)
    with FlopCounterMode(display=False) as counted:
        logprobs, _ = model(tokens, positions, whole_square, LogprobHead(rows, rows))
        logprobs.sum().backward()
    total = counted.get_total_flops() - of_norms(model.spec, num)
    assert total == training_flops(model.spec, ForwardWork(num, num * num, 4))


@pytest.mark.parametrize("targets", [("o_proj", "down_proj"), ("down_proj",)])
def test_weights_that_are_not_trained_have_no_gradient(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Below the first adapter nothing has one."""
    model = load_model(make_model_folder(tmp_path, num_hidden_layers=3), lora=LoraSpec(4, 8.0, targets))
    num = 11
    tokens, positions, rows = torch.arange(num), torch.arange(num), torch.arange(4)
    with FlopCounterMode(display=False) as counted:
        logprobs, _ = model(tokens, positions, whole_square, LogprobHead(rows, rows))
        logprobs.sum().backward()
    assert counted.get_total_flops() == training_flops(model.spec, ForwardWork(num, num * num, 4))
    full = training_flops(model.spec.base, ForwardWork(num, num * num, 4))
    assert counted.get_total_flops() < 0.75 * full
