"""Buckets have every element of a sender's boxes once, and no bucket has too many bytes."""

import re
from collections import Counter
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.model.parameters import parameters
from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric.alignment import ALIGNMENT_BYTES
from ductile.messages.updates import Offer
from ductile.parallel.parts import SlotParts
from ductile.weights.buckets import OwnedTensor, num_bytes_of, offer_of, only

Element = tuple[str, tuple[int, ...]]
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float64)
NEVER = 1 << 60
"""Bytes that no bucket reaches."""


def elements(offer: Offer) -> Counter[Element]:
    return Counter(
        (box.name, index)
        for bucket in offer.buckets
        for box in bucket.boxes
        for index in product(*map(range, box.start, box.stop))
    )


@st.composite
def owned(draw: st.DrawFn) -> list[OwnedTensor]:
    """Tensors of which a sender has some rows each, in one or two boxes, or none."""
    found: list[OwnedTensor] = []
    for place in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        boxes = [((0,) * len(shape), shape)] if draw(st.booleans()) else []
        if boxes and shape:
            low, mid, high = sorted(draw(st.integers(0, shape[0])) for _ in range(3))
            rest = (0,) * (len(shape) - 1)
            boxes = [((low, *rest), (mid, *shape[1:])), ((mid, *rest), (high, *shape[1:]))]
        found.append(OwnedTensor(f"layers.{place}.weight", draw(st.sampled_from(DTYPES)), shape, boxes))
    return found


@given(owned(), st.one_of(st.integers(1, 300), st.just(NEVER)))
def test_every_element_is_in_one_bucket(tensors: list[OwnedTensor], bucket_bytes: int) -> None:
    offer = offer_of("slot-1", tensors, bucket_bytes)
    items = {tensor.name: tensor.dtype.itemsize for tensor in tensors}
    wanted = Counter(
        (tensor.name, index)
        for tensor in tensors
        for start, stop in tensor.boxes
        for index in product(*map(range, start, stop))
    )
    assert elements(offer) == wanted
    assert [bucket.index for bucket in offer.buckets] == list(range(len(offer.buckets)))
    assert {spec.name for spec in offer.tensors} == {name for name, _ in wanted}
    for bucket in offer.buckets:
        ends = [0]
        for box in bucket.boxes:
            sides = [high - low for low, high in zip(box.start, box.stop, strict=True)]
            assert box.num_bytes == torch.Size(sides).numel() * items[box.name]
            assert box.offset_bytes >= ends[-1]
            assert not box.offset_bytes % ALIGNMENT_BYTES
            ends.append(box.offset_bytes + box.num_bytes)
        assert bucket.num_bytes == ends[-1]
        is_row = len(bucket.boxes) == 1 and all(side == 1 for side in sides[: max(1, len(sides) - 1)])
        assert bucket.num_bytes <= bucket_bytes or is_row
    if bucket_bytes == NEVER:
        assert len(offer.buckets) <= 1


@pytest.mark.parametrize("bucket_bytes", [1, 200, 5000, NEVER])
@pytest.mark.parametrize(
    "dims", [{}, {"dp_replicate": 2}, {"dp_shard": 3}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2, "tp": 2, "pp": 2}], ids=str
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_ranks_of_a_layout_have_the_model_between_them(dims: dict[str, int], bucket_bytes: int, tied: bool) -> None:
    spec = ModelSpec("qwen2", 11, 8, 14, 2, 4, 2, 2, tie_embeddings=tied, attention_bias=True)
    layout = ParallelLayout.of(range(prod(dims.values())), (), **dims)
    total: Counter[Element] = Counter()
    for slot in layout.slots:
        parts = SlotParts.of(spec, layout, slot)
        ours = [OwnedTensor(each.name, torch.bfloat16, each.shape, parts.owned(each.name)) for each in parameters(spec)]
        total += elements(offer_of(f"slot-{slot}", ours, bucket_bytes))
    whole = Counter((each.name, index) for each in parameters(spec) for index in product(*map(range, each.shape)))
    assert total == whole


def test_what_servers_fuse_stays_together_where_it_fits() -> None:
    names = [f"layers.0.{each}.weight" for each in ("norm", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")]
    rows = dict(zip(names, (40, 32, 16, 16, 100, 100), strict=True))
    tensors = [OwnedTensor(name, torch.uint8, (rows[name], 8), [((0, 0), (rows[name], 8))]) for name in names]
    buckets = offer_of("slot-0", tensors, 600).buckets
    assert [re.findall(r"(\w+)\.weight", " ".join(box.name for box in bucket.boxes)) for bucket in buckets] == [
        ["norm"], ["q_proj", "k_proj", "v_proj"],
        ["gate_proj"], ["gate_proj"], ["up_proj"], ["up_proj"],
    ]  # fmt: skip


def test_a_matrix_of_each_expert_is_cut_along_its_rows() -> None:
    experts = OwnedTensor("experts.down_proj", torch.bfloat16, (4, 6, 8), [((1, 0, 0), (3, 6, 8))])
    boxes = [bucket.boxes[0] for bucket in offer_of("slot-0", [experts], 64).buckets]
    assert [(box.start, box.stop) for box in boxes] == [
        ((expert, row, 0), (expert + 1, min(row + 4, 6), 8)) for expert in (1, 2) for row in (0, 4)
    ]


def test_only_what_is_wanted_is_packed_anew() -> None:
    tensors = [OwnedTensor(f"layers.{n}.weight", torch.float32, (4, 4), [((0, 0), (4, 4))]) for n in range(5)]
    offer = offer_of("slot-0", tensors, 128)
    assert len(offer.buckets) == 3
    less = only(offer, 128, lambda box: box.name in ("layers.1.weight", "layers.4.weight"))
    assert [[box.name for box in bucket.boxes] for bucket in less.buckets] == [["layers.1.weight", "layers.4.weight"]]
    assert [spec.name for spec in less.tensors] == ["layers.1.weight", "layers.4.weight"]
    assert num_bytes_of(less) == 128
    assert only(offer, 128, lambda _: False) == Offer("slot-0", (), ())


def test_a_bucket_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte, not 0"):
        offer_of("slot-0", [], 0)
