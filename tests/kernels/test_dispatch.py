"""The dispatch picks what its table says, and whatever it picks the numbers are the same, gradients too."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ductile.kernels import cpu_attention, dispatch, heads, norm, plain, products, swiglu
from ductile.kernels.partial_attention import ChunkedAttention, VarlenPartialAttention
from ductile.kernels.trees import Tree
from ductile.kernels.varlen_attention import VarlenAttention
from ductile.model.attention import PackedAttention

HEADS, HEAD_DIM, EPS = (4, 2, 2), 16, 1e-3
TREES = (Tree(0, 20, (30, 31)), Tree(31, 40))
Operation = Callable[..., Tensor | tuple[Tensor, ...]]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def angles() -> tuple[Tensor, Tensor]:
    half = 7 * torch.rand(40, 1, HEAD_DIM // 2, dtype=torch.float64)
    return torch.cat((half.cos(), half.cos()), dim=-1), torch.cat((-half.sin(), half.sin()), dim=-1)


def outputs_and_gradients(operation: Operation, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = operation(*inputs)
    outputs = (found,) if isinstance(found, Tensor) else found
    upstream = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in outputs]
    return *outputs, *torch.autograd.grad(outputs, inputs, upstream)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cpu_attention.attend(q, k, v, list(cpu_attention.calls(TREES)))


def cases() -> list[Any]:
    """Each operation as it is written here and in plain torch, and inputs."""
    cos, sin = angles()
    x, w, bias = (draw(*shape, dtype=torch.float32) for shape in ((47, 64), (90, 64), (90,)))
    qkv, weight = draw(40, sum(HEADS) * HEAD_DIM), draw(HEADS[0] + HEADS[1], HEAD_DIM)
    of_heads = {"eps": EPS, "cos": cos, "sin": sin}
    return [
        pytest.param(products.linear, F.linear, [x, w, bias], id="linear"),
        pytest.param(
            partial(norm.add_norm, eps=EPS),
            partial(plain.add_norm, eps=EPS),
            [draw(40, 24), draw(40, 24), draw(24)],
            id="add_norm",
        ),
        pytest.param(
            lambda x, weight: norm.add_norm(x, None, weight, EPS)[1],
            lambda x, weight: plain.add_norm(x, None, weight, EPS)[1],
            [draw(40, 24), draw(24)],
            id="rms_norm",
        ),
        pytest.param(
            lambda qkv, weight: heads.split_heads(qkv, HEADS, weight, **of_heads),
            lambda qkv, weight: plain.split_heads(qkv, HEADS, weight, **of_heads),
            [qkv, weight],
            id="split_heads with norm",
        ),
        pytest.param(
            lambda qkv: heads.split_heads(qkv, HEADS, None, **of_heads),
            lambda qkv: plain.split_heads(qkv, HEADS, None, **of_heads),
            [qkv],
            id="split_heads",
        ),
        pytest.param(swiglu.swiglu, plain.swiglu, [draw(40, 64)], id="swiglu"),
        pytest.param(
            fused, partial(plain.attention, TREES), [draw(40, num, HEAD_DIM) for num in HEADS], id="attention"
        ),
    ]


@pytest.mark.parametrize(("by_hand", "in_plain_torch", "inputs"), cases())
def test_both_sides_give_the_same_numbers(by_hand: Operation, in_plain_torch: Operation, inputs: list[Tensor]) -> None:
    tolerance = 1e-10 if inputs[0].dtype == torch.float64 else 1e-4
    found, expected = (outputs_and_gradients(side, inputs) for side in (by_hand, in_plain_torch))
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_plain_heads_turn_in_fp32_and_come_back_in_the_type_of_the_projection() -> None:
    qkv, weight = (draw(40, num * HEAD_DIM, dtype=torch.bfloat16) for num in (sum(HEADS), HEADS[0] + HEADS[1]))
    cos, sin = (x.float() for x in angles())
    each = weight[0].unflatten(0, (-1, HEAD_DIM))
    for ours, theirs in zip(
        heads.split_heads(qkv, HEADS, each, EPS, cos, sin),
        plain.split_heads(qkv, HEADS, each, EPS, cos, sin),
        strict=True,
    ):
        assert theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=2**-7)  # at most the last bit


@pytest.fixture
def picked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Implementations that the dispatch has called; none of them computes."""
    names: list[str] = []

    def replace(owner: Any, name: str, label: str) -> None:
        monkeypatch.setattr(owner, name, lambda *_: names.append(label) or ("", ""))

    replace(products, "linear", "by hand")
    replace(norm, "add_norm", "by hand")
    replace(dispatch, "split_heads_by_hand", "by hand")
    replace(dispatch, "swiglu_by_hand", "by hand")
    replace(F, "linear", "plain")
    for name in ("add_norm", "split_heads", "swiglu"):
        replace(plain, name, "plain")
    monkeypatch.setattr(dispatch, "onednn_is_faster", lambda: True)
    return names


GPU = "meta"
"""Stands for every device that is no CPU."""
LARGE, SMALL = (64, 1 << 15), (4, 64)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    ("operation", "device", "dtype", "wants_gradient", "shape", "by_hand"),
    [
        ("linear", "cpu", torch.float32, True, LARGE, True),
        ("linear", "cpu", torch.float32, False, LARGE, True),
        ("linear", "cpu", torch.float32, True, SMALL, False),
        ("linear", "cpu", torch.bfloat16, True, LARGE, False),
        ("linear", GPU, torch.float32, True, LARGE, False),
        ("add_norm", "cpu", torch.float32, True, SMALL, True),
        ("add_norm", "cpu", torch.bfloat16, True, SMALL, True),
        ("add_norm", "cpu", torch.float32, False, SMALL, False),
        ("add_norm", GPU, torch.bfloat16, True, SMALL, False),
        ("rms_norm", "cpu", torch.float32, True, SMALL, True),
        ("rms_norm", GPU, torch.float32, True, SMALL, False),
        ("split_heads", "cpu", torch.float32, True, SMALL, True),
        ("split_heads", "cpu", torch.float32, False, SMALL, True),
        ("split_heads", GPU, torch.bfloat16, True, SMALL, True),
        ("swiglu", "cpu", torch.float32, True, SMALL, True),
        ("swiglu", "cpu", torch.float32, False, SMALL, True),
        ("swiglu", GPU, torch.bfloat16, True, SMALL, True),
    ],
)
def test_which_side_runs(
    picked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    device: str,
    dtype: torch.dtype,
    wants_gradient: bool,
    shape: tuple[int, int],
    by_hand: bool,
    compiles: bool,
) -> None:
    monkeypatch.setattr(dispatch, "is_compiling", lambda: compiles)
    x = torch.empty(shape, device=device, dtype=dtype, requires_grad=wants_gradient)
    more: dict[str, tuple[Any, ...]] = {
        "linear": (x,),
        "add_norm": (x, x[0], EPS),
        "rms_norm": (x[0], EPS),
        "split_heads": (HEADS, None, EPS, x, x),
        "swiglu": (),
    }
    dispatch.__dict__[operation](x, *more[operation])
    assert picked == ["by hand" if by_hand and not compiles else "plain"]


def test_a_processor_on_which_mkl_is_as_fast_and_autocast_leave_products_to_torch(
    picked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(LARGE)
    with torch.autocast("cpu"):
        dispatch.linear(x, x)
    monkeypatch.setattr(dispatch, "onednn_is_faster", lambda: False)
    dispatch.linear(x, x)
    assert picked == ["plain", "plain"]


ONE_CALL = "one call a document and layer: "


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "compiles", "choice"),
    [
        ("cpu", torch.float32, None, False, "torch's fused kernel, on a CPU"),
        ("cpu", torch.float32, None, True, ONE_CALL + "torch compiles"),
        (GPU, torch.bfloat16, (9, 0), False, "one variable-length kernel a layer"),
        (GPU, torch.bfloat16, (9, 0), True, ONE_CALL + "torch compiles"),
        (GPU, torch.bfloat16, None, False, ONE_CALL + "the kernel is for NVIDIA devices"),
        (GPU, torch.float32, (9, 0), False, ONE_CALL + "the kernel computes in float16 and bfloat16, not in float32"),
    ],
)
def test_which_attention_runs(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    compiles: bool,
    choice: str,
) -> None:
    monkeypatch.setattr(dispatch, "is_compiling", lambda: compiles)
    monkeypatch.setattr(dispatch.varlen_attention, "capability_of", lambda device: capability)
    run, said = dispatch.packed_attention(TREES, torch.empty(40, 4, 8, device=device, dtype=dtype))
    assert said == choice
    kinds = {"torch's fused kernel": cpu_attention.attend, "one call": plain.attention}
    if isinstance(run, partial):
        assert run.func is next(kind for beginning, kind in kinds.items() if choice.startswith(beginning))
    else:
        assert isinstance(run, VarlenAttention)
        assert choice.startswith("one variable-length kernel")


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.bfloat16, ChunkedAttention),
        (GPU, torch.bfloat16, VarlenPartialAttention),
        (GPU, torch.float32, ChunkedAttention),
    ],
)
def test_which_partial_attention_runs(monkeypatch, device: str, dtype: torch.dtype, expected: type) -> None:
    monkeypatch.setattr(dispatch.varlen_attention, "capability_of", lambda device: (9, 0))
    assert type(dispatch.partial_attention((3, 5), torch.empty(8, 4, 8, device=device, dtype=dtype))) is expected


def test_torch_compiles_what_is_picked_for_it() -> None:
    """Whole graphs, without a break, and to the same numbers."""
    cos, sin = angles()

    def layer(x: Tensor, weight: Tensor, of_heads: Tensor) -> tuple[Tensor, ...]:
        total, normed = dispatch.add_norm(x, dispatch.swiglu(dispatch.linear(x, weight)), weight[0], EPS)
        return total, *dispatch.split_heads(normed, HEADS, of_heads, EPS, cos, sin)

    size = sum(HEADS) * HEAD_DIM
    inputs = [draw(40, size), draw(2 * size, size), draw(HEADS[0] + HEADS[1], HEAD_DIM)]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    found, expected = (outputs_and_gradients(each, inputs) for each in (compiled, layer))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_torch_compiles_packed_attention() -> None:
    inputs = [draw(40, num, HEAD_DIM) for num in HEADS]
    compiled = torch.compile(lambda *qkv: PackedAttention([20, 9], [[10, 1], []])(0, *qkv), backend="eager")
    found = outputs_and_gradients(compiled, inputs)
    torch.testing.assert_close(found, outputs_and_gradients(fused, inputs), atol=1e-10, rtol=1e-10)
