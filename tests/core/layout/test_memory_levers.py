"""What `ductile check` advises where training does not fit: settings that make it fit, the cheapest first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.memory_levers import MOST_ALONE, Relief, in_words, relief, spelled
from ductile.core.layout.choice.planner import plan_layout
from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import Checkpointing, LeverName, MemoryOptions
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.spec import ModelSpec
from tests.core.layout.test_memory import QWEN, cases

GIB = 2**30
LONG, SHORT = AskedLayout(seq_len=65_536), AskedLayout(seq_len=2048)


@pytest.mark.parametrize(
    ("asked", "dims", "room_gib", "named"),
    [
        (SHORT, ParallelDims(), 13.8, [{"fused_lm_head_token_chunk_size"}, {"ac.mode"}, {"optim_cpu_offload"}]),
        (SHORT, ParallelDims(), 9.2, [{"optim_cpu_offload"}, {"fsdp_cpu_offload"}]),
        (SHORT, ParallelDims(), 6, [{"fsdp_cpu_offload"}]),
        (LONG, ParallelDims(dp_shard=8), 24, [{"ac.mode"}, {"ac_offloading.max_inflight_activations"}, {"tp"}]),
        (LONG, ParallelDims(dp_shard=8), 9.5, [{"ac_offloading.max_inflight_activations"}]),
        (LONG, ParallelDims(dp_shard=8), 5, [{"ac.mode", "ac_offloading.max_inflight_activations", "tp"}]),
    ],
)
def test_the_cheapest_settings_that_suffice_come_first(
    asked: AskedLayout, dims: ParallelDims, room_gib: float, named: list[set[str]]
) -> None:
    memory = SlotMemory(int(room_gib * GIB))
    found = relief(QWEN, asked, dims, memory)
    assert [{*each.settings} for each in found] == named
    assert all(each.needed_bytes <= memory.room_bytes for each in found)


def test_what_nothing_makes_fit_is_told() -> None:
    memory = SlotMemory(GIB)
    found = relief(QWEN, LONG, ParallelDims(), memory)
    assert in_words(found, memory, "trainer.model.").endswith("GiB, which is still too much: take more slots")
    assert "optim_cpu_offload" not in found[0].settings, "it excludes fsdp_cpu_offload"


def test_only_what_is_built_is_named() -> None:
    found = relief(QWEN, SHORT, ParallelDims(), SlotMemory(9 * GIB), {"ac", "fused_lm_head_token_chunk_size"})
    assert {key for each in found for key in each.settings} <= {"ac.mode", "fused_lm_head_token_chunk_size"}


def test_no_setting_is_named_that_is_there() -> None:
    options = MemoryOptions(checkpointing=Checkpointing("full"), optim_cpu_offload=True, head_chunk_tokens=64)
    found = relief(QWEN, LONG, ParallelDims(dp_shard=8), SlotMemory(6 * GIB, options))
    named = {key for each in found for key in each.settings}
    assert named.isdisjoint({"ac.mode", "optim_cpu_offload", "fused_lm_head_token_chunk_size"})
    assert named


def test_zero_bubble_excludes_selective_checkpointing() -> None:
    asked = replace(LONG, pp_schedule="zero_bubble")
    for room in (5, 24, 100):
        for each in relief(QWEN, asked, ParallelDims(dp_shard=8), SlotMemory(room * GIB)):
            assert each.settings.get("ac.mode") != "selective"


@pytest.mark.parametrize("lever", ["selective", "fsdp_cpu_offload"])
def test_what_other_keys_exclude_is_not_named(lever: LeverName) -> None:
    def named(options: MemoryOptions) -> set[str]:
        rooms = (SlotMemory(int(room * GIB), options) for room in (6, 9.2, 13.8, 24))
        found = [each for memory in rooms for each in relief(QWEN, SHORT, ParallelDims(), memory)]
        return {f"{key} = {value}" for each in found for key, value in each.settings.items()}

    excluded = {"selective": "ac.mode = selective", "fsdp_cpu_offload": "fsdp_cpu_offload = True"}[lever]
    assert excluded in named(MemoryOptions())
    assert excluded not in named(MemoryOptions(excluded=(lever,)))


def test_sentences_can_be_pasted() -> None:
    one = Relief({"optim_cpu_offload": True}, 8 * GIB)
    assert one.sentence("trainer.model.") == "trainer.model.optim_cpu_offload = true makes it 8 GiB"
    both = Relief({"ac.mode": "full", "tp": 2}, 3 * GIB)
    assert both.sentence("model.") == 'model.ac.mode = "full" and model.tp = 2 together make it 3 GiB'
    assert [spelled(value) for value in (False, 5, "full", ["norm", "mlp"])] == [
        "false",
        "5",
        '"full"',
        '["norm", "mlp"]',
    ]


@given(cases(), st.integers(1, 2**26))
def test_what_is_advised_takes_what_is_said(
    case: tuple[ModelSpec, ParallelDims, MemoryOptions], room_bytes: int
) -> None:
    spec, dims, options = case
    asked = AskedLayout(pp=dims.pp, dp_replicate=dims.dp_replicate, cp=dims.cp, tp=dims.tp, seq_len=options.seq_len)
    memory = SlotMemory(room_bytes, options)
    found = relief(spec, asked, dims, memory)
    assert len(found) <= MOST_ALONE
    now = predict(spec, dims, memory.options_of(asked)).device.total
    assert all(each.needed_bytes < now for each in found if memory.missing(now))
    if len(found) > 1:
        assert all(len(each.settings) == 1 and not memory.missing(each.needed_bytes) for each in found)


@given(cases(), st.integers(1, 16))
def test_possible_layouts_are_those_that_the_planner_takes(
    case: tuple[ModelSpec, ParallelDims, MemoryOptions], num_slots: int
) -> None:
    spec, _, _ = case
    found = list(possible_layouts(spec, num_slots))
    assert len({*found}) == len(found)
    assert ParallelDims(dp_shard=num_slots) in found
    for dims in found:
        assert dims.num_slots == num_slots
        planned = plan_layout(num_slots, AskedLayout().like(dims), spec)
        assert planned.layout is not None, (dims, planned.errors)
        assert planned.layout.dims == dims
