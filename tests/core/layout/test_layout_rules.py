"""Which layout the trainer has on each number of slots: listed, asked for, or what fits of it."""

from dataclasses import asdict, replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.asked_layout import AskedLayout
from ductile.core.layout.layout_rules import LayoutRules, choose_dims, choose_layout, layout_for
from ductile.core.layout.layout_text import in_words, spelled_sizes
from ductile.core.layout.parallel_layout import AXES, ParallelDims, ParallelLayout
from ductile.core.layout.spec import RopeScaling
from ductile.core.layout.strategy import model_layout
from tests.core.layout.test_planner import QWEN, TINY, specs

RULES = LayoutRules(QWEN, AskedLayout(tp=2), listed=("pp=2,tp=2,dp_shard=2", "cp=2,tp=2,dp_shard=2", "tp=4"))


@pytest.mark.parametrize(
    ("num_slots", "words", "why"),
    [
        (1, "", "one slot, the nearest that fits 1 slots: tp = 2 must divide the number of train slots, 1: write 1"),
        (2, "tp 2", "as asked"),
        (3, "dp_shard 3", "dp_shard 3, the nearest that fits 3 slots: tp = 2 must divide the number of train slots, 3"),
        (4, "tp 4", "tp=4 is listed for 4 slots"),
        (6, "dp_shard 3 · tp 2", "as asked"),
        (8, "pp 2 · dp_shard 2 · tp 2", "pp=2,tp=2,dp_shard=2 is listed for 8 slots"),
        (12, "dp_shard 3 · tp 4", "tp=4 is listed for 12 slots"),
    ],
)
def test_listed_then_asked_for_then_what_fits(num_slots: int, words: str, why: str) -> None:
    chosen = choose_layout(num_slots, RULES)
    assert in_words(chosen.layout.dims) == words
    assert chosen.reason.startswith(why)


@pytest.mark.parametrize(
    ("num_slots", "words"),
    [
        (32, "pp 2 · dp_replicate 2 · cp 2 · tp 4"),
        (24, "dp_replicate 3 · cp 2 · tp 4"),
        (16, "pp 2 · cp 2 · tp 4"),
        (8, "cp 2 · tp 4"),
        (4, "tp 4"),
        (6, "dp_replicate 3 · tp 2"),
        (7, "dp_shard 7"),
    ],
)
def test_as_many_slots_as_possible_share_a_sample_and_tp_is_kept_first(num_slots: int, words: str) -> None:
    rules = LayoutRules(QWEN, AskedLayout(pp=2, cp=2, tp=4, dp_replicate=6))
    rules = replace(rules, asked=replace(rules.asked, dp_replicate=2)) if num_slots == 32 else rules
    assert in_words(choose_layout(num_slots, rules).layout.dims) == words


def test_a_listed_layout_that_the_model_cannot_have_is_passed_over() -> None:
    """`ductile check` refuses it; a run that goes on with another model's list must not stop for it."""
    assert layout_for(range(5), LayoutRules(TINY, listed=("tp=5",))) == ParallelLayout.of(range(5))


def test_slots_are_those_that_are_given() -> None:
    assert layout_for((5, 3, 9, 4), RULES) == ParallelLayout.of((5, 3, 9, 4), tp=4)
    with pytest.raises(ValueError, match="at least one slot"):
        layout_for((), RULES)
    with pytest.raises(ValueError, match="each of its slots once"):
        layout_for((1, 1), RULES)


ASKED = st.builds(
    AskedLayout,
    pp=st.integers(1, 4) | st.just("auto"),
    dp_replicate=st.integers(1, 4),
    cp=st.integers(1, 4),
    tp=st.integers(1, 4) | st.just("auto"),
    pp_schedule=st.sampled_from(["1f1b", "interleaved", "zero_bubble"]),
)
LISTED = st.lists(st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}), max_size=3)


@given(specs(), ASKED, LISTED, st.integers(1, 24))
def test_there_is_a_layout_for_every_number_of_slots(spec, asked, listed, num_slots) -> None:
    texts = tuple(spelled_sizes(ParallelDims(**sizes)) for sizes in listed)
    rules = LayoutRules(spec, asked, texts)
    for number, dims in enumerate(choose_dims(num_slots, rules), 1):
        layout = layout_for(range(number), rules)
        assert layout.dims == dims
        assert prod(getattr(dims, axis) for axis in AXES) == number
        chosen = choose_layout(number, rules)
        assert chosen.layout == layout
        for axis in ("pp", "dp_replicate", "cp", "tp"):
            wanted = getattr(asked, axis)
            if not chosen.listed and wanted != "auto":
                assert wanted % getattr(dims, axis) == 0, "sizes are as asked, or divisors of that"
        model_layout(spec, layout.mesh, "float32", layout.stages or None)


def test_rules_come_back_from_their_fields() -> None:
    spec = replace(QWEN, rope_scaling=RopeScaling("linear", 2.0))
    for rules in (RULES, LayoutRules(), LayoutRules(spec, AskedLayout(tp="auto"), num_samples=4)):
        assert LayoutRules.from_fields(asdict(rules)) == rules
