"""The count of pairs against a mask that is written out; sizes of known models."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.model.flops import ForwardWork, forward_flops, layer_matrix_parameters, training_flops
from ductile.core.layout.model.spec import ModelSpec

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
