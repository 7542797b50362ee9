"""A version in any boxes, buckets and dtypes becomes the live one, whole, without a copy; or it does not at all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from ductile.messages.updates import Bucket, TensorBox, TensorSpec
from ductile.weights.buckets import OwnedTensor, offer_of
from ductile.weights.digest import whole_digest
from ductile.weights.live_weights import LiveWeights
from ductile.weights.staged_weights import StagedWeights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)


def live_of(tensors: dict[str, Tensor]) -> LiveWeights:
    """As an engine has them: matrices by columns."""
    return LiveWeights(
        {name: each.t().contiguous().t() if each.dim() == 2 else each for name, each in tensors.items()}, 0
    )


def buckets_of(tensors: dict[str, Tensor], bucket_bytes: int, offset: int = 0) -> list[tuple[Bucket, Tensor]]:
    whole = [OwnedTensor(n, t.dtype, tuple(t.shape), [((0,) * t.dim(), tuple(t.shape))]) for n, t in tensors.items()]
    found: list[tuple[Bucket, Tensor]] = []
    for bucket in offer_of("s", whole, bucket_bytes).buckets:
        buffer = torch.zeros(bucket.num_bytes + offset, dtype=torch.uint8)[offset:]
        for box in bucket.boxes:
            values = (
                tensors[box.name][tuple(map(slice, box.start, box.stop))].contiguous().reshape(-1).view(torch.uint8)
            )
            buffer[box.offset_bytes : box.offset_bytes + box.num_bytes] = values
        found.append((bucket, buffer))
    return found


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
    ]


def stage(
    live: LiveWeights, tensors: dict[str, Tensor], version: int, bucket_bytes: int = 64, **how: Any
) -> StagedWeights:
    staged = StagedWeights(live, version)
    buckets = buckets_of(tensors, bucket_bytes)
    staged.prepare(specs_of(tensors), [box for bucket, _ in buckets for box in bucket.boxes], **how)
    for bucket, buffer in reversed(buckets):
        staged.load(bucket, buffer)
    return staged


def drop(tensors: Any, version: int) -> None:
    """An engine that takes what it is given."""


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.tuples(st.sampled_from([(), (0,), (5,), (3, 0), (4, 3), (2, 3, 2)]), st.sampled_from(DTYPES)),
        min_size=1,
    ),
    st.integers(1, 200),
    st.integers(0, 3),
)
def test_any_tensors_in_any_buckets_arrive_bit_by_bit(
    model: dict[str, tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int, offset: int
) -> None:
    live = live_of({name: some(shape, dtype, 1) for name, (shape, dtype) in model.items()})
    new = {name: some(shape, dtype, 2) for name, (shape, dtype) in model.items()}
    staged = StagedWeights(live, 1)
    buckets = buckets_of(new, bucket_bytes, offset)
    staged.prepare(specs_of(new), [box for bucket, _ in buckets for box in bucket.boxes])
    for bucket, buffer in buckets:
        staged.load(bucket, buffer)
    assert staged.digest() == whole_digest(new.items())
    staged.commit(drop)
    for name, tensor in live.current.tensors.items():
        assert torch.equal(tensor, new[name])


def test_narrower_tensors_are_widened_and_have_the_digest_that_they_were_published_with() -> None:
    live = live_of({"w": torch.zeros(4, 3)})
    new = {"w": some((4, 3), torch.bfloat16, 3)}
    staged = stage(live, new, 1)
    assert staged.digest() == whole_digest(new.items())
    staged.commit(drop)
    assert live.current.tensors["w"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"comes in float32, and this server holds it in torch\.bfloat16"):
        stage(live_of(new), {"w": torch.zeros(4, 3)}, 1)


def test_memory_of_the_version_before_is_used_again_unless_somebody_reads_it() -> None:
    live = live_of({"w": torch.zeros(40, 30), "b": torch.zeros(7)})
    seen: list[int] = []
    for version in range(1, 21):
        staged = stage(
            live, {"w": some((40, 30), torch.float32, version), "b": some((7,), torch.float32, version)}, version
        )
        staged.commit(drop)
        staged.abort()  # as a server lets go of an update that is over
        seen.append(live.current.tensors["w"].data_ptr())
    assert len(set(seen)) == 2
    with live.pinned() as held:
        before = {name: each.clone() for name, each in held.tensors.items()}
        for version in (21, 22, 23):
            stage(live, {"w": torch.ones(40, 30) * version, "b": torch.ones(7)}, version).commit(drop)
        assert held.version == 20
        assert all(torch.equal(each, before[name]) for name, each in held.tensors.items())


def test_a_delta_keeps_what_it_leaves_out() -> None:
    first = {"w": some((6, 4), torch.float32, 1), "b": some((5,), torch.float32, 2), "c": some((3,), torch.float32, 3)}
    live = live_of({name: torch.zeros_like(each) for name, each in first.items()})
    stage(live, first, 1).commit(drop)
    for version in range(2, 6):  # the memory of each version before is used again
        first["w"] = torch.cat([some((2, 4), torch.float32, 10 * version), first["w"][2:]])
        first["b"] = some((5,), torch.float32, version)
        part = {"w": first["w"], "b": first["b"]}
        staged = StagedWeights(live, version)
        buckets = [
            (bucket, buffer)
            for bucket, buffer in buckets_of(part, 16)
            if bucket.boxes[0].name == "b" or bucket.boxes[0].start[0] < 2
        ]
        staged.prepare(specs_of(part), [box for bucket, _ in buckets for box in bucket.boxes], base_version=version - 1)
        for bucket, buffer in buckets:
            staged.load(bucket, buffer)
        assert staged.digest() == whole_digest(first.items())
        staged.commit(drop)
        assert all(torch.equal(live.current.tensors[name], each) for name, each in first.items())


BOX = TensorBox("w", (0, 0), (4, 3), 0, 48)
HALF = replace(BOX, stop=(2, 3), num_bytes=24)


@pytest.mark.parametrize(
    ("boxes", "sentence"),
    [
        ([HALF], "boxes of w have 6 of its 12 elements: some are missing"),
        ([BOX, HALF], r"two boxes of w overlap at \[0, 0\]"),
        (
            [HALF, replace(HALF, start=(1, 0), stop=(3, 3)), replace(HALF, start=(3, 0), stop=(4, 3), num_bytes=12)],
            "overlap",
        ),
        ([replace(BOX, stop=(5, 3), num_bytes=60)], r"a box of w is \[0, 0\] to \[5, 3\], and its shape \[4, 3\]"),
        ([replace(BOX, start=(0,), stop=(4,))], "a box of w is"),
        ([replace(BOX, num_bytes=40)], "a box of w has 40 bytes, and its shape 12 elements"),
        ([BOX, replace(BOX, name="x")], "a box of x, which is not among the tensors"),
    ],
)
def test_boxes_that_are_not_each_tensor_once_are_refused(boxes: list[TensorBox], sentence: str) -> None:
    staged = StagedWeights(live_of({"w": torch.zeros(4, 3)}), 1)
    with pytest.raises(ValueError, match=sentence):
        staged.prepare([TensorSpec("w", "float32", (4, 3))], boxes)


@pytest.mark.parametrize(
    ("box", "sentence"),
    [
        (replace(BOX, start=(1, 0), stop=(5, 3)), r"a box of w at \[1, 0\] is none of version 1"),
        (replace(BOX, stop=(8, 3)), r"a box of w at \[0, 0\] is none of version 1"),
        (replace(BOX, offset_bytes=8), r"a box of w at \[0, 0\] is none of version 1"),
        (BOX, "a box of w ends behind the 40 bytes of its bucket"),
    ],
)
def test_a_bucket_with_other_boxes_or_too_few_bytes_is_refused(box: TensorBox, sentence: str) -> None:
    staged = StagedWeights(live_of({"w": torch.zeros(4, 3)}), 1)
    staged.prepare([TensorSpec("w", "float32", (4, 3))], [BOX])
    with pytest.raises(ValueError, match=sentence):
        staged.load(Bucket(0, 48, (box,)), torch.ones(40, dtype=torch.uint8))


@pytest.mark.parametrize("end", [StagedWeights.abort, lambda staged: staged.commit(drop)])
def test_what_comes_after_the_end_is_refused(end: Callable[[StagedWeights], None]) -> None:
    new = {"w": torch.ones(4, 3)}
    live = live_of({"w": torch.zeros(4, 3)})
    staged = stage(live, new, 1)
    end(staged)
    before = live.current.tensors["w"].clone()
    with pytest.raises(ValueError, match="version 1 is not staged any more"):
        staged.load(*buckets_of(new, 64)[0])
    assert torch.equal(live.current.tensors["w"], before)
