"""The count of pairs against a mask that is written out; sizes of known models; whole steps against torch's own count.

torch's counter counts what is multiplied. A model that computes whole squares of attention multiplies twice as much as
a causal one needs, so transformers' is compared with a count of whole squares, and ours with an attention that
multiplies each token with what it sees and nothing else.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ductile.core.layout.model.flops import ForwardWork, forward_flops, layer_matrix_parameters, training_flops
from ductile.core.layout.model.lora import PROJECTIONS, LoraSpec
from ductile.core.layout.model.spec import Family, ModelSpec
from ductile.model.checkpoint import load_model
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.records import Sample
from tests.tiny import make_hf_model, make_model_folder

QWEN3_4B = ModelSpec(
    "qwen3", 151_936, 2560, 9728, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, tie_embeddings=True
)

lengths = st.integers(0, 9)


def seen(stems: list[int], branches: list[list[int]]) -> np.ndarray:
    """[T, T]: which token sees which, the stem and then its branches, document by document."""
    documents = []
    for stem, of_stem in zip(stems, branches, strict=True):
        ends = np.cumsum([stem, *of_stem]).tolist()
        mask = np.tril(np.ones((ends[-1], ends[-1]), dtype=bool))
        for start, end in pairwise(ends):
            mask[start:end, stem:start] = False  # other branches
        documents.append(mask)
    total = sum(map(len, documents))
    whole, at = np.zeros((total, total), dtype=bool), 0
    for mask in documents:
        whole[at : at + len(mask), at : at + len(mask)] = mask
        at += len(mask)
    return whole


@given(st.lists(st.tuples(lengths, st.lists(lengths, max_size=3)), max_size=4))
def test_pairs_are_the_trues_of_a_mask(trees: list[tuple[int, list[int]]]) -> None:
    stems, branches = [stem for stem, _ in trees], [of_stem for _, of_stem in trees]
    mask = seen(stems, branches)
    assert ForwardWork.of(stems, branches, 0) == ForwardWork(len(mask), int(mask.sum()))


def test_a_shared_prompt_is_run_once() -> None:
    shared, apart = ForwardWork.of([100], [[10] * 8], 80), ForwardWork.of([110] * 8, [()] * 8, 80)
    assert (shared.num_tokens, apart.num_tokens) == (180, 880)
    assert shared.num_scored == apart.num_scored
    # Each completion's tokens see the same in both; the prompt's own pairs are there once and not eight times.
    assert apart.num_pairs - shared.num_pairs == 7 * 100 * 101 // 2


def test_work_adds_up() -> None:
    one, other = ForwardWork.of([3], [[2, 1]], 3), ForwardWork.of([5], [()], 4)
    assert one == ForwardWork(6, 6 + (3 * 2 + 3) + (3 * 1 + 1), 3)
    assert one + other == ForwardWork.of([3, 5], [[2, 1], ()], 7)
    assert forward_flops(QWEN3_4B, one + other) == forward_flops(QWEN3_4B, one) + forward_flops(QWEN3_4B, other)


def test_six_operations_a_parameter_and_token() -> None:
    """Without attention, and with every token scored: 6 N D, where N has the output embeddings and no norms."""
    spec = replace(QWEN3_4B, tie_embeddings=False)
    matrices = spec.num_layers * layer_matrix_parameters(spec) + spec.vocab_size * spec.hidden_size
    norms = spec.num_layers * 2 * spec.hidden_size + spec.hidden_size
    assert matrices == spec.num_parameters - spec.vocab_size * spec.hidden_size - norms
    assert training_flops(spec, ForwardWork(1000, 0, 1000)) == 6 * matrices * 1000


def test_attention_of_a_long_document() -> None:
    """12 L H D S^2 for a whole square; the causal half of it, and the diagonal's other half."""
    work, spec = ForwardWork.of([4096], [()], 0), QWEN3_4B
    attention = training_flops(spec, work) - training_flops(spec, replace(work, num_pairs=0))
    square = 12 * spec.num_layers * spec.num_heads * spec.head_dim * 4096**2
    assert 2 * attention == square + square // 4096


# -- Against torch's own counter


def samples(prompt: int, *completions: int, first: int = 5) -> list[Sample]:
    """Samples that begin with the same `prompt` tokens; all tokens but those, and the first one, are scored."""
    begin = list(range(first, first + prompt))
    return [
        Sample((*begin, *(40 + place + number for number in range(length))), (False,) * prompt + (True,) * length)
        for place, length in enumerate(completions)
    ]


STEPS = {
    "dense": samples(1, 30),
    "packed": [*samples(3, 9), *samples(7, 1, first=20), *samples(1, 17, first=30)],
    "shared prompts": [*samples(12, 5, 9, 3), *samples(4, 6, 6, first=25), *samples(2, 8, first=35)],
}


def only_what_is_seen(packed: PackedSamples):
    """Attention that multiplies the query of each token with the keys that it sees."""
    mask = seen(list(packed.stems), [list(of_stem) for of_stem in packed.branches])
    others = [torch.from_numpy(np.flatnonzero(row)) for row in mask]

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # [T, H, D]
        outputs: list[Tensor] = []
        for query, places in zip(q, others, strict=True):
            weights = torch.bmm(query[:, None], k[places].permute(1, 2, 0)).softmax(-1)  # [H, 1, places]
            outputs.append(torch.bmm(weights, v[places].transpose(0, 1))[:, 0])
        return torch.stack(outputs)

    return attention


def of_norms(spec: ModelSpec, num_tokens: int) -> int:
    """`kernels.norm` takes the gradient of a norm's weight, a sum over rows, as a product with a vector."""
    return 2 * num_tokens * spec.hidden_size * (2 * spec.num_layers + 1)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", get_args(Family))
def test_a_step_is_what_torch_counts(family: Family, step: str, tmp_path: Path) -> None:
    """To the last operation, with fewer heads of keys than of queries, and heads of a size of their own."""
    head_dim = {} if family == "qwen2" else {"head_dim": 16}
    model = load_model(make_model_folder(tmp_path, family, tie_word_embeddings=step == "packed", **head_dim))
    packed = PackedSamples.of(STEPS[step])
    head = LogprobHead(packed.rows, packed.targets)
    with FlopCounterMode(display=False) as forward:
        logprobs, _ = model(packed.token_ids, packed.positions, only_what_is_seen(packed), head)
    assert forward.get_total_flops() == forward_flops(model.spec, packed.work)
    with FlopCounterMode(display=False) as backward:
        logprobs.sum().backward()
    counted = forward.get_total_flops() + backward.get_total_flops() - of_norms(model.spec, packed.work.num_tokens)
    assert counted == training_flops(model.spec, packed.work)


@pytest.mark.parametrize("family", get_args(Family))
def test_transformers_model_is_counted_by_whole_squares(family: Family, tmp_path: Path) -> None:
    """Its rotary angles are products, too: they are within the percent."""
    num_tokens = 48
    spec = load_model(make_model_folder(tmp_path, family, hidden_size=64, intermediate_size=192)).spec
    model = make_hf_model(family, hidden_size=64, intermediate_size=192).train()
    with FlopCounterMode(display=False) as counted:
        model(torch.arange(num_tokens)[None]).logits.sum().backward()
    expected = training_flops(spec, ForwardWork(num_tokens, num_tokens**2, num_tokens))
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.01)


def whole_square(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees every one: what an implementation multiplies that computes full squares."""
    groups = q.shape[1] // k.shape[1]
    queries, keys, values = (x.transpose(0, 1) for x in (q, *(x.repeat_interleave(groups, dim=1) for x in (k, v))))
    return torch.bmm(torch.bmm(queries, keys.transpose(1, 2)).softmax(-1), values).transpose(0, 1)


@pytest.mark.parametrize(
    "targets",
    [("o_proj", "down_proj"), ("down_proj",), PROJECTIONS, ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("gate_proj",)],
    ids=str,
)
def test_weights_that_are_not_trained_have_no_gradient(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Below the first adapter nothing has one. Bs of fused projections are one matrix, with zeros in it."""
    model = load_model(make_model_folder(tmp_path, num_hidden_layers=3), lora=LoraSpec(4, 8.0, targets))
    num = 11
    tokens, positions, rows = torch.arange(num), torch.arange(num), torch.arange(4)
    with FlopCounterMode(display=False) as counted:
        logprobs, _ = model(tokens, positions, whole_square, LogprobHead(rows, rows))
        logprobs.sum().backward()
    assert counted.get_total_flops() == training_flops(model.spec, ForwardWork(num, num * num, 4))
    full = training_flops(model.spec.base, ForwardWork(num, num * num, 4))
    assert counted.get_total_flops() < (0.8 if len(targets) < 3 else 1.0) * full
