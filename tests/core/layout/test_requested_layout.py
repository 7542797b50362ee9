"""What somebody asks a live trainer for: which layout that is, on which slots, and what cannot be."""

import pytest

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import LayoutRules
from ductile.core.layout.choice.requested_layout import LayoutRequest, RequestError, requested_layout
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from tests.core.layout.test_planner import QWEN

NOW = ParallelLayout.of((2, 3, 4), dp_replicate=3)
RULES = LayoutRules(QWEN, AskedLayout(dp_replicate=3), listed=("pp=2,dp_shard=2,tp=2",))
MACHINE = range(16)
BUSY = (0, 1, 2, 3, 4, 15)


@pytest.mark.parametrize(
    ("request_", "slots", "dims"),
    [
        (LayoutRequest("pp=2,dp_shard=2,tp=2"), (2, 3, 4, 5, 6, 7, 8, 9), ParallelDims(pp=2, dp_shard=2, tp=2)),
        (LayoutRequest("tp=2"), (2, 3), ParallelDims(tp=2)),
        (LayoutRequest("tp=4"), (2, 3, 4, 5), ParallelDims(tp=4)),
        (LayoutRequest("dp_shard=1"), (2,), ParallelDims()),
        (LayoutRequest("tp=2", train=range(6)), (0, 1, 2, 3, 4, 5), ParallelDims(dp_shard=3, tp=2)),
        (LayoutRequest(train=range(8)), (0, 1, 2, 3, 4, 5, 6, 7), ParallelDims(pp=2, dp_shard=2, tp=2)),
        (LayoutRequest(train=(7, 1)), (7, 1), ParallelDims(dp_shard=2)),
        (LayoutRequest(train=range(6), sizes={"tp": 2}), (0, 1, 2, 3, 4, 5), ParallelDims(dp_replicate=3, tp=2)),
        (LayoutRequest(sizes={"dp_replicate": 1}), (2, 3, 4), ParallelDims(dp_shard=3)),
        (LayoutRequest(sizes={"tp": 2}), (2, 3, 4, 5, 6, 7), ParallelDims(dp_replicate=3, tp=2)),
        (LayoutRequest("dp_shard=13"), tuple(range(2, 15)), ParallelDims(dp_shard=13)),
        (LayoutRequest("tp=16", train=range(16)), tuple(range(16)), ParallelDims(tp=16)),
    ],
)
def test_what_is_asked_for(request_: LayoutRequest, slots: tuple[int, ...], dims: ParallelDims) -> None:
    layout = requested_layout(request_, NOW, RULES, MACHINE, BUSY)
    assert (layout.slots, layout.dims) == (slots, dims)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (LayoutRequest(), "neither slots nor a layout are asked for: write one of them, or both"),
        (LayoutRequest("dp=2"), "the layout 'dp=2': 'dp' is no axis: write dp_shard (shards of a copy) or"),
        (LayoutRequest("tp=2", sizes={"dp_replicate": 2}), "a whole layout and dp_replicate are asked for: write "
         "dp_replicate=2 in the layout"),
        (LayoutRequest(train=(0,), sizes={"ep": 2}), "ep is no axis: write sizes of pp, dp_replicate, dp_shard, cp"),
        (LayoutRequest(sizes={"dp_replicate": 0}), "dp_replicate = 0 is no size: write 1 or more"),
        (LayoutRequest("pp=2,tp=16"), "the layout needs 32 slots, and there are 16: write smaller sizes"),
        (LayoutRequest("tp=16"), "the layout needs 16 slots, and 3 train and 10 have nothing to do: write smaller "
         "sizes, or name the slots to train on, which may have other roles"),
        (LayoutRequest(sizes={"dp_replicate": 2}), "dp_replicate = 2 would leave 1 of the 3 slots that train without "
         "a part: write another size, or name the slots to train on"),
        (LayoutRequest(train=(1, 1)), "a layout has each of its slots once, and 1 several times"),
        (LayoutRequest("tp=2", train=(1, 1)), "a layout has each of its slots once, and 1 several times"),
        (LayoutRequest(train=()), "a layout needs at least one slot"),
        (LayoutRequest("tp=5,pp=29", train=range(4)),
         "tp = 5 makes 145 slots with pp 29, of which the number of train slots, 4, is no multiple: train on 145 "
         "slots, "
         "or write smaller sizes; tp = 5 leaves a slot without any of the model's 16 heads: write 1, 2, 4, 8 or 16; "
         "pp = 29 must be at most 28: the model has 28 layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_all_at_once(request_: LayoutRequest, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        requested_layout(request_, NOW, RULES, MACHINE, BUSY)
    assert str(caught.value).startswith(says)


def test_slots_that_are_no_layout_are_refused_with_what_to_write() -> None:
    rules = LayoutRules(QWEN, AskedLayout(tp=4))
    with pytest.raises(RequestError) as caught:
        requested_layout(LayoutRequest(train=range(6)), NOW, rules, MACHINE, BUSY)
    assert str(caught.value) == (
        "6 slots are no multiple of tp 4, which is asked for: train on 4 or 8, or write the layout itself, such as "
        "dp_shard=6"
    )
    by_hand = requested_layout(LayoutRequest("dp_shard=6", train=range(6)), NOW, rules, MACHINE, BUSY)
    assert by_hand.dims == ParallelDims(dp_shard=6)
