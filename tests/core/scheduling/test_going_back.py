"""Where a run goes on whose trainer has lost slots: a table of losses, and what is told in words."""

from dataclasses import replace

import pytest

from ductile.core.instances.placement import Placement
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules, choose_layout
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.scheduling.going_back import TrainerLoss, WayBack, sentence_of, way_back
from tests.core.layout.test_planner import QWEN


def loss_of(train=range(4), generate=(4, 5), score=(), lost=(), gone=(), **more) -> TrainerLoss:
    """gone: slots that cannot be started."""
    home = Placement(tuple(train), tuple(generate), tuple(score), "as the config says")
    startable = frozenset(home.slots).difference(gone)
    return TrainerLoss(home, home.train, frozenset(lost), startable, **more)


TP2 = LayoutRules(asked=AskedLayout(tp=2))


@pytest.mark.parametrize(
    ("loss", "rules", "train", "generate", "score", "dims"),
    [
        (loss_of(lost=[1]), NO_RULES, (0, 2, 3), (4, 5), (), ParallelDims(dp_shard=3)),
        (loss_of(lost=[2, 3], gone=[2, 3, 4]), NO_RULES, (0, 1), (5,), (), ParallelDims(dp_shard=2)),
        (loss_of(lost=[0, 1, 2]), NO_RULES, (3,), (4, 5), (), ParallelDims()),
        (loss_of(lost=[3]), TP2, (0, 1), (4, 5), (), ParallelDims(tp=2)),
        (loss_of(lost=[2, 3]), TP2, (0, 1), (4, 5), (), ParallelDims(tp=2)),
        (loss_of(generate=range(4), lost=[3]), NO_RULES, (0, 1, 2), (0, 1, 2), (), ParallelDims(dp_shard=3)),
        (loss_of(score=(6, 7), lost=[3], gone=[6]), NO_RULES, (0, 1, 2), (4, 5), (7,), ParallelDims(dp_shard=3)),
        (
            loss_of(score=(6, 7, 8, 9), lost=[3], gone=[6], slots_per_scorer=2),
            NO_RULES, (0, 1, 2), (4, 5), (7, 8), ParallelDims(dp_shard=3),
        ),
        (loss_of(lost=[3], gone=[4, 5], servers_generate=True), NO_RULES, (0, 1, 2), (), (), ParallelDims(dp_shard=3)),
        (
            loss_of(lost=[3], num_in_row=4), LayoutRules(asked=AskedLayout(dp_replicate=2)),
            (0, 1, 2), (4, 5), (), ParallelDims(dp_shard=3),
        ),
    ],
)  # fmt: skip
def test_the_slots_that_are_left_go_on(loss, rules, train, generate, score, dims):
    back = way_back(loss, rules)
    assert back.goes_on, back.reason
    assert (back.placement.train, back.placement.generate, back.placement.score) == (train, generate, score)
    assert (back.layout.slots, back.layout.dims) == (train, dims)
    assert not loss.lost.intersection(back.placement.slots), "a slot that was lost gets no role any more"
    assert loss.startable.issuperset(back.placement.slots)


@pytest.mark.parametrize(
    ("loss", "rules", "why"),
    [
        (loss_of(train=[0], lost=[0]), NO_RULES, "no slot that trained is left"),
        (loss_of(lost=[0, 1], gone=[0, 1, 2, 3]), NO_RULES, "no slot that trained is left"),
        (loss_of(lost=[3], gone=range(6)), NO_RULES, "no slot that trained is left"),
        (loss_of(lost=[1, 2, 3]), TP2, "1 slot is no multiple of tp 2, which is asked for"),
        (loss_of(lost=[3], gone=[4, 5]), NO_RULES, "no slot that generates is left"),
        (loss_of(generate=[3], lost=[3]), NO_RULES, "no slot that generates is left"),
        (loss_of(score=[6], lost=[3], gone=[6]), NO_RULES, "no slot that scores is left"),
        (
            loss_of(score=[6, 7], lost=[3], gone=[6], slots_per_scorer=2),
            NO_RULES, "too few slots that score are left",
        ),
        (
            loss_of(lost=[3], num_in_row=5), NO_RULES,
            "it has gone back 5 times in a row without a new checkpoint (cluster.max_restarts)",
        ),
        (
            loss_of(lost=[3], num_in_row=1, max_restarts=1), NO_RULES,
            "it has gone back 1 time in a row without a new checkpoint (cluster.max_restarts)",
        ),
    ],
)  # fmt: skip
def test_where_it_cannot_go_back_it_says_why(loss, rules, why):
    back = way_back(loss, rules)
    assert (back.goes_on, back.placement, back.layout, back.reason) == (False, None, None, why)


def test_memory_decides_too() -> None:
    """Two slots have room for a part each, and one has none for the whole."""
    rules = LayoutRules(QWEN, num_samples=8, memory=SlotMemory(room_bytes=1 << 60, options=MemoryOptions()))
    needed = {n: needed_bytes(n, rules) for n in (1, 2)}
    assert needed[2] < needed[1]
    tight = replace(rules, memory=SlotMemory(room_bytes=needed[2], options=MemoryOptions()))
    assert way_back(loss_of(lost=[2, 3]), tight).layout == ParallelLayout.of((0, 1))
    refused = way_back(loss_of(lost=[1, 2, 3]), tight)
    assert not refused.goes_on
    assert refused.reason.startswith("1 slot is too few, as it seems:")


def needed_bytes(num_slots: int, rules: LayoutRules) -> int:
    return choose_layout(num_slots, rules).planned.needed_bytes


@pytest.mark.parametrize(
    ("step", "num_lost", "said"),
    [
        (
            40, 3,
            "Trainer goes back to the checkpoint of step 40 on slots 0-1 as tp 2 (slot 2 left out, as 3 slots are no "
            "multiple of tp 2, which is asked for), since it is gone; steps 41-43 are trained anew.",
        ),
        (
            40, 1,
            "Trainer goes back to the checkpoint of step 40 on slots 0-1 as tp 2 (slot 2 left out, as 3 slots are no "
            "multiple of tp 2, which is asked for), since it is gone; step 41 is trained anew.",
        ),
        (
            0, 0,
            "Trainer goes back to the beginning, as there is no checkpoint yet, on slots 0-1 as tp 2 (slot 2 left out, "
            "as 3 slots are no multiple of tp 2, which is asked for), since it is gone.",
        ),
    ],
)  # fmt: skip
def test_it_is_told_in_a_sentence(step, num_lost, said):
    back: WayBack = way_back(loss_of(lost=[3]), TP2)
    assert sentence_of(step, back, "it is gone", num_lost) == said
