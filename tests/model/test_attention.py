"""Packed attention against softmax with a T x T mask, written out."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ductile.kernels import cpu_attention, plain, varlen_attention
from ductile.kernels.flex_attention import FlexAttention, sequences_of_tokens
from ductile.kernels.varlen_attention import VarlenAttention, sequences, torch_kernel, why_not
from ductile.model.attention import PackedAttention, Tree
from tests.nightly import examples

Trees = list[tuple[int, list[int]]]
"""Lengths of each stem and of its branches."""


def sees(trees: Trees) -> Tensor:
    """[T, T]: a token sees itself and what precedes it in its own branch and in the stem."""
    num_tokens = sum(stem + sum(branches) for stem, branches in trees)
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    start = 0
    for stem, branches in trees:
        first = start
        for length in (stem, *branches):
            rows = slice(start, start + length)
            seen[rows, rows] = torch.ones(length, length, dtype=torch.bool).tril()
            if start > first:
                seen[rows, first : first + stem] = True
            start += length
    return seen


def dumb(trees: Trees, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All pairs at once."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~sees(trees), float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


lengths = st.integers(0, 40)
tree_lists = st.lists(
    st.tuples(lengths, st.one_of(st.just([]), st.lists(lengths, max_size=4), lengths.map(lambda n: [n] * 3))),
    max_size=5,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    trees=tree_lists,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    key_rows=st.sampled_from([1, 50, 200, cpu_attention.KEY_ROWS]),
    mask_elements=st.sampled_from([1, 300, cpu_attention.MASK_ELEMENTS]),
    heads_last=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_its_dumb_twin_forward_and_backward(
    trees: Trees, heads: tuple[int, int], key_rows: int, mask_elements: int, heads_last: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(stem + sum(branches) for stem, branches in trees)

    def draw(num_heads: int) -> Tensor:
        drawn = torch.randn(num_tokens, num_heads, 8, generator=generator)
        return (drawn.mT.contiguous().mT if heads_last else drawn).requires_grad_()

    inputs = q, k, v = draw(heads[0]), draw(heads[1]), draw(heads[1])
    attend = PackedAttention([stem for stem, _ in trees], [branches for _, branches in trees])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "KEY_ROWS", key_rows)
        patch.setattr(cpu_attention, "MASK_ELEMENTS", mask_elements)
        ours, expected = attend(0, q, k, v), dumb(trees, q, k, v)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(ours.shape, generator=generator)
    if num_tokens:
        gradients = torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream)
        for gradient, expected_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_near_to_float32_as_its_rounding() -> None:
    q, k, v = (torch.randn(50, 2, 16).bfloat16() for _ in range(3))
    ours = PackedAttention([50])(0, q, k, v)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), dumb([(50, [])], q.float(), k.float(), v.float()), atol=2e-2, rtol=2e-2)


def forward_and_backward(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor, Tensor], upstream: Tensor
) -> tuple[Tensor, ...]:
    """The output, and the gradients of queries, keys and values."""
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, upstream)


def varlen_by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    most_queries: int,
    most_keys: int,
) -> Tensor:
    """What torch says that its kernel does: each sequence alone, its last query before its last key."""
    assert query_offsets.dtype == key_offsets.dtype == torch.int32
    sizes = [offsets.diff().tolist() for offsets in (query_offsets, key_offsets)]
    assert (most_queries, most_keys) == tuple(map(max, sizes))
    assert all(0 < num_queries <= num_keys for num_queries, num_keys in zip(*sizes, strict=True))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    outputs = []
    for q, k, v in zip(query.split(sizes[0]), key.split(sizes[1]), value.split(sizes[1]), strict=True):
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        outputs.append(torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v))
    return torch.cat(outputs)


@settings(max_examples=examples(60), deadline=None)
@given(
    trees=tree_lists.filter(lambda trees: any(stem or any(branches) for stem, branches in trees)),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    seed=st.integers(0, 1000),
)
@example(trees=[(3, [0, 1, 0, 2]), (0, [1, 1]), (1, [])], heads=(4, 2), seed=0)
def test_what_a_gpu_runs_equals_what_a_cpu_runs(trees: Trees, heads: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(stem + sum(branches) for stem, branches in trees)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, 8, generator=generator).requires_grad_()

    inputs, upstream = (draw(heads[0]), draw(heads[1]), draw(heads[1])), draw(heads[0]).detach()
    packed = PackedAttention([stem for stem, _ in trees], [branches for _, branches in trees])
    varlen = VarlenAttention(packed.trees, torch.device("cpu"), varlen_by_hand)
    expected = forward_and_backward(partial(packed, 0), inputs, upstream)
    for attend in (varlen, partial(plain.attention, packed.trees)):
        found = forward_and_backward(attend, inputs, upstream)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("trees", [[(9, [])], [(3, [0, 1, 0, 2]), (0, [1, 1]), (1, [])], [(100, [50, 30]), (20, [])]])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_equals_its_dumb_twin(trees: Trees, heads: tuple[int, int]) -> None:
    """Forward alone: torch has no gradient of it on a CPU."""
    packed = PackedAttention([stem for stem, _ in trees], [branches for _, branches in trees])
    num_tokens = packed.trees[-1].end
    q, k, v = (torch.randn(num_tokens, num, 16) for num in (heads[0], heads[1], heads[1]))
    found = FlexAttention(packed.trees, torch.device("cpu"))(q, k, v)
    torch.testing.assert_close(found, dumb(trees, q, k, v), atol=1e-5, rtol=1e-5)


def test_which_sequence_a_token_is_of() -> None:
    own, stem = sequences_of_tokens([Tree(0, 2, (3, 5)), Tree(5, 6)])
    assert own.tolist() == [0, 0, 1, 2, 2, 3]
    assert stem.tolist() == [0, 0, 0, 0, 0, 3]


def test_where_the_kernel_finds_queries_and_keys() -> None:
    lies = sequences([Tree(0, 2, (3, 5)), Tree(5, 6)])
    assert lies.query_offsets.tolist() == [0, 2, 3, 5, 6]
    assert lies.key_offsets.tolist() == [0, 2, 5, 9, 10]
    assert lies.key_rows is not None
    assert lies.key_rows.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    assert (lies.most_queries, lies.most_keys) == (2, 4)


@pytest.mark.parametrize("trees", [[Tree(0, 3), Tree(3, 4)], [Tree(0, 0, (2, 3))], [Tree(0, 3, (3,))]])
def test_nothing_is_gathered_where_nothing_is_shared(trees: list[Tree]) -> None:
    assert sequences(trees).key_rows is None


def test_the_kernel_never_gets_one_tensor_for_both_offsets() -> None:
    """torch 2.15 would take another kernel then."""
    given: list[Tensor] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *lies: Any) -> Tensor:
        given.extend(lies[:2])
        return query

    x = torch.randn(4, 1, 8)
    VarlenAttention([Tree(0, 3), Tree(3, 4)], torch.device("cpu"), kernel)(x, x, x)
    assert given[0].equal(given[1])
    assert given[0] is not given[1]


def test_a_stem_of_many_branches_gets_its_gradient_in_fp32() -> None:
    trees = [Tree(0, 1, tuple(range(2, 600)))]
    x = torch.randn(599, 1, 8).bfloat16().requires_grad_()
    attend = VarlenAttention(trees, torch.device("cpu"), lambda q, k, v, *lies: v[: len(q)] + 0 * (q + k[: len(q)]))
    attend(x, x, x).sum().backward()
    assert x.grad is not None
    # Rows are: the stem, then stem and branch in turns. The first 599 of them have the stem 300 times, more than the
    # 256 at which ones added up in bfloat16 come to a halt.
    assert x.grad[0].unique().tolist() == [300.0]


@pytest.mark.parametrize(
    ("dtype", "head_size", "capability", "reason"),
    [
        (torch.bfloat16, 128, (9, 0), ""),
        (torch.float16, 8, (8, 0), ""),
        (torch.bfloat16, 256, (12, 0), ""),
        (torch.float32, 128, (9, 0), "the kernel computes in float16 and bfloat16, not in float32"),
        (torch.bfloat16, 4, (9, 0), "the kernel takes heads of a multiple of 8 up to 256, and these have 4"),
        (torch.bfloat16, 264, (9, 0), "a multiple of 8 up to 256, and these have 264"),
        (torch.float16, 64, (7, 5), "the kernel needs compute capability 8.0, and this device has 7.5"),
        (torch.bfloat16, 64, None, "the kernel is for NVIDIA devices"),
    ],
)
def test_which_heads_the_kernel_takes(
    dtype: torch.dtype, head_size: int, capability: tuple[int, int] | None, reason: str
) -> None:
    said = why_not(dtype, head_size, capability)
    assert said.endswith(reason)
    assert bool(said) == bool(reason)


def test_torch_has_the_kernel_with_the_arguments_that_it_is_called_with() -> None:
    kernel = torch_kernel()
    assert isinstance(kernel, partial)
    inspect.signature(kernel.func).bind(*range(7), **kernel.keywords)
    assert kernel.keywords["window_size"] == (-1, 0)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (("query", "window_size"), {"window_size": (-1, 0)}),  # torch 2.11
        (("query", "window_size", "enable_gqa", "block_table"), {"window_size": (-1, 0), "enable_gqa": True}),
    ],
)
def test_arguments_follow_the_version_of_torch(parameters: tuple[str, ...], expected: dict[str, object]) -> None:
    assert varlen_attention._options(parameters) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize(
    "trees",
    [[(300, [])], [(200, []), (1, []), (77, [])], [(130, [1, 40, 0, 300]), (5, []), (0, [3, 2]), (64, [64] * 8)]],
    ids=["one document", "documents", "trees"],
)
def test_the_kernel_of_a_gpu_equals_one_call_a_document(trees: Trees, head_size: int, heads: tuple[int, int]) -> None:
    num_tokens = sum(stem + sum(branches) for stem, branches in trees)

    def draw(num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, head_size, device="cuda", dtype=torch.bfloat16).requires_grad_()

    inputs, upstream = (draw(heads[0]), draw(heads[1]), draw(heads[1])), draw(heads[0]).detach()
    packed = PackedAttention([stem for stem, _ in trees], [branches for _, branches in trees])
    found = forward_and_backward(partial(packed, 0), inputs, upstream)
    assert isinstance(packed._attend, VarlenAttention)
    assert packed.choice == "one variable-length kernel a layer"
    exact = tuple(x.detach().float().requires_grad_() for x in inputs)
    expected = forward_and_backward(partial(plain.attention, packed.trees), exact, upstream.float())
    other = forward_and_backward(partial(plain.attention, packed.trees), inputs, upstream)
    for ours, theirs, true in zip(found, other, expected, strict=True):
        near = (theirs.float() - true).norm()
        assert (ours.float() - true).norm() <= 1.5 * near + 0.01 * true.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp32_on_a_gpu_is_one_call_a_document() -> None:
    q, k, v = (torch.randn(13, heads, 8) for heads in (4, 2, 2))
    found = PackedAttention([5, 4], [[3, 1], []])(0, q.cuda(), k.cuda(), v.cuda())
    torch.testing.assert_close(found.cpu(), dumb([(5, [3, 1]), (4, [])], q, k, v), atol=1e-4, rtol=1e-4)


def test_a_batch_says_what_it_has_chosen() -> None:
    packed = PackedAttention([3, 2])
    assert packed.choice == "", "no layer has asked yet"
    packed(0, *(torch.randn(5, 2, 8) for _ in range(3)))
    assert packed.choice == "torch's fused kernel, on a CPU"
    elsewhere = PackedAttention([3, 2])
    elsewhere(0, *(torch.randn(5, 2, 8, device="meta") for _ in range(3)))
    assert elsewhere.choice == "one call a document and layer: the kernel is for NVIDIA devices"
