"""Which layout the trainer has on each number of slots: listed, asked for, or what fits of it."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import (
    LayoutRules,
    NoLayout,
    choose_layout,
    dims_allowed,
    layout_for,
    nearest_allowed,
)
from ductile.core.layout.choice.layout_text import in_words, spelled_sizes
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.parallel_layout import AXES, ParallelDims, ParallelLayout
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.memory.options import Checkpointing, MemoryOptions
from ductile.core.layout.model.spec import RopeScaling
from tests.core.layout.test_planner import QWEN, TINY, specs

RULES = LayoutRules(QWEN, AskedLayout(tp=2), listed=("pp=2,tp=2,dp_shard=2", "cp=2,tp=2,dp_shard=2", "tp=4"))


@pytest.mark.parametrize(
    ("num_slots", "words", "why"),
    [
        (2, "tp 2", "as asked"),
        (4, "tp 4", "tp=4 is listed for 4 slots"),
        (6, "dp_shard 3 · tp 2", "as asked"),
        (8, "pp 2 · dp_shard 2 · tp 2", "pp=2,tp=2,dp_shard=2 is listed for 8 slots"),
        (12, "dp_shard 3 · tp 4", "tp=4 is listed for 12 slots"),
    ],
)
def test_listed_then_asked_for(num_slots: int, words: str, why: str) -> None:
    chosen = choose_layout(num_slots, RULES)
    assert in_words(chosen.layout.dims) == words
    assert chosen.reason == why


def test_what_is_asked_for_is_kept_and_other_numbers_of_slots_are_no_layout() -> None:
    """Only copies may be fewer: they are shards then."""
    rules = LayoutRules(QWEN, AskedLayout(cp=2, tp=4, dp_replicate=2), listed=("dp_shard=3",))
    words = {number: in_words(dims) for number, dims in dims_allowed(32, rules).items()}
    assert words == {
        3: "dp_shard 3",
        8: "cp 2 · tp 4",
        16: "dp_replicate 2 · cp 2 · tp 4",
        24: "dp_shard 3 · cp 2 · tp 4",
        32: "dp_replicate 2 · dp_shard 2 · cp 2 · tp 4",
    }
    assert choose_layout(24, rules).reason == "as asked, but dp_replicate 1, which is what 24 slots allow"
    with pytest.raises(NoLayout, match="9 slots are no multiple of cp 2 · tp 4, which is asked for"):
        layout_for(range(9), rules)
    with pytest.raises(NoLayout, match="1 slot is no multiple of cp 2"):
        layout_for(range(1), rules)
    assert [nearest_allowed(number, 20, rules) for number in (1, 9, 20)] == [[3], [8, 16], [16]]


def test_what_is_asked_for_by_hand_comes_before_all_else_where_it_fits() -> None:
    rules = replace(RULES, by_hand=AskedLayout(cp=2, dp_replicate=2))
    assert in_words(layout_for(range(8), rules).dims) == "dp_replicate 2 · dp_shard 2 · cp 2"
    assert in_words(layout_for(range(6), rules).dims) == "dp_shard 3 · cp 2"
    with pytest.raises(NoLayout):
        layout_for(range(5), rules)
    assert in_words(layout_for(range(12), replace(RULES, by_hand=AskedLayout(tp=8))).dims) == "dp_shard 3 · tp 4"


def test_numbers_of_slots_that_leave_too_little_memory_are_no_layout() -> None:
    """The state takes 9 GB; what layers keep of 8,192 tokens as much, which FSDP2 does not divide."""
    few = SlotMemory(room_bytes=12 * 2**30)
    whole = LayoutRules(QWEN, AskedLayout(seq_len=1024), memory=few)
    assert [*dims_allowed(8, whole)] == [2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(
        NoLayout,
        match=r"1 slot is too few, as it seems: as one slot a slot would need about 12\.2 GiB \(parameters 2\.22",
    ):
        layout_for((0,), whole)
    assert [*dims_allowed(2, whole.beginning_on(1))] == [1, 2], "the run begins so, whatever is estimated"
    own = whole.asked_by_hand(AskedLayout(), 1)
    assert layout_for((0,), own).dims == ParallelDims(), "what somebody has asked for is there, and stays"
    assert [*dims_allowed(2, own)] == [1, 2]
    chosen = replace(whole, asked=AskedLayout(tp="auto", seq_len=8192))
    words = {number: in_words(dims) for number, dims in dims_allowed(8, chosen).items()}
    assert words == {2: "tp 2", 4: "dp_shard 2 · tp 2", 6: "dp_shard 3 · tp 2", 8: "dp_shard 4 · tp 2"}


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
def test_sizes_are_as_listed_or_as_asked(spec, asked, listed, num_slots) -> None:
    texts = tuple(spelled_sizes(ParallelDims(**sizes)) for sizes in listed)
    rules = LayoutRules(spec, asked, texts)
    allowed = dims_allowed(num_slots, rules)
    for number in range(1, num_slots + 1):
        if number not in allowed:
            with pytest.raises(NoLayout):
                layout_for(range(number), rules)
            continue
        layout, chosen = layout_for(range(number), rules), choose_layout(number, rules)
        assert layout.dims == allowed[number] == chosen.layout.dims
        assert layout.dims.num_slots == number
        for axis in ("pp", "cp", "tp"):
            assert chosen.listed or getattr(asked, axis) in ("auto", getattr(layout.dims, axis))
        assert chosen.listed or asked.dp_replicate % layout.dims.dp_replicate == 0
        model_layout(spec, layout, "float32")


def test_rules_come_back_from_their_fields() -> None:
    spec = replace(QWEN, rope_scaling=RopeScaling("linear", 2.0))
    options = MemoryOptions(checkpointing=Checkpointing("selective", 2, ("norm", "mlp")), offloaded_in_flight=5)
    for memory in (SlotMemory(9), SlotMemory(9, options, 5)):
        for rules in (RULES, LayoutRules(), LayoutRules(spec, memory=memory, by_hand=AskedLayout())):
            assert LayoutRules.from_fields(asdict(rules)) == rules
            assert LayoutRules.from_fields(json.loads(json.dumps(asdict(rules)))) == rules, "as a run writes them down"


def test_rules_of_older_runs_are_read() -> None:
    """Before there were options, a slot's memory was five numbers."""
    old = {"room_bytes": 9, "state_bytes": 16, "compute_bytes": 2, "gradient_bytes": 0, "keeps_gathered": False}
    fields = asdict(LayoutRules(QWEN)) | {"memory": old | {"least_bytes": 7}}
    assert LayoutRules.from_fields(fields).memory == SlotMemory(9, MemoryOptions(), 7)
    other = {"state_bytes": 6, "gradient_bytes": 2, "keeps_gathered": True, "least_bytes": 0}
    read = LayoutRules.from_fields(fields | {"memory": old | other}).memory
    assert read is not None
    assert (read.options.state_bytes, read.options.parameter_bytes, read.options.optimizer_bytes) == (6, 2, 2)
    assert (read.options.reduce_bytes, read.options.reduce_every_step) == (2, True)
    assert not read.options.reshard_after_forward
