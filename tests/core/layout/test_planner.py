"""The planner: what it says of requests that cannot be, why it chose what was left to it, and that all it returns is a
layout that the model can have."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.planner import LayoutFinding, plan_layout
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.context_parallel import style_violation
from ductile.core.layout.geometry.parallel_layout import AXES, ParallelDims
from ductile.core.layout.geometry.pipeline_schedule import runs_of_layers
from ductile.core.layout.geometry.strategy import model_layout
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.spec import ModelSpec

QWEN = ModelSpec("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, tie_embeddings=True, qk_norm=True)
"""Qwen3-0.6B."""
TINY = ModelSpec("llama", 50, 16, 24, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=4)
GIB = 2**30
BLIND = "memory was not looked at, as how much a slot has is not known"


def sentences(findings: tuple[LayoutFinding, ...]) -> list[str]:
    return [finding.sentence for finding in findings]


@pytest.mark.parametrize(
    ("num_slots", "asked", "says"),
    [
        (0, AskedLayout(), ["slots = 0 are too few: a layout needs at least one"]),
        (4, AskedLayout(tp=0, vpp=-1), ["tp = 0 must be at least 1", "vpp = -1 must be at least 1"]),
        (3, AskedLayout(dp_replicate=2), ["dp_replicate = 2 must divide the number of train slots, 3: write 1 or 3"]),
        (6, AskedLayout(tp=4), ["tp = 4 must divide the number of train slots, 6: write 1 or 2"]),
        (
            12,
            AskedLayout(pp=2, tp=4),
            ["tp = 4 makes 8 slots with pp 2, of which the number of train slots, 12, is no multiple: write 1 or 2"],
        ),
        (
            9,
            AskedLayout(pp=2, tp=4),
            [
                "tp = 4 makes 8 slots with pp 2, of which the number of train slots, 9, is no multiple: train "
                "on 8 or 16 slots, or write smaller sizes"
            ],
        ),
        (8, AskedLayout(tp=4, dp_shard=4), ["dp_shard = 4 makes 16 slots with tp 4, and the trainer has 8: write 2"]),
        (
            6,
            AskedLayout(tp=4, dp_shard=4),
            ["dp_shard = 4 makes 16 slots with tp 4, and the trainer has 6: give it 16 slots"],
        ),
        (5, AskedLayout(tp=5), ["tp = 5 leaves a slot without any of the model's 16 heads: write 1, 2, 4, 8 or 16"]),
        (40, AskedLayout(pp=40), ["pp = 40 must be at most 28: the model has 28 layers"]),
        (
            16,
            AskedLayout(pp=16, pp_schedule="interleaved"),
            ["pp = 16 must be at most 14: the model has 28 layers, 2 runs of them on each slot of pp"],
        ),
        (
            2,
            AskedLayout(pp=2, vpp=1, pp_schedule="interleaved"),
            [
                'vpp = 1 must be at least 2 with pp_schedule = "interleaved": leave it out, or write pp_schedule = '
                '"1f1b"'
            ],
        ),
        (
            32,
            AskedLayout(tp=8, cp=4, cp_style="ulysses"),
            [
                'cp_style = "ulysses" deals the 2 query heads of a slot of tp 8 out to the slots along cp, and cp is '
                '4: write cp_style = "ring", or a cp of 1 or 2'
            ],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_with_what_to_write(num_slots: int, asked: AskedLayout, says: list[str]) -> None:
    planned = plan_layout(num_slots, asked, QWEN)
    assert planned.layout is None
    assert sentences(planned.errors) == says


def test_all_that_is_wrong_is_told_at_once() -> None:
    planned = plan_layout(8, AskedLayout(tp=5, pp=40, dp_replicate=2), QWEN)
    assert [finding.keys[0] for finding in planned.errors] == ["tp", "tp", "pp"]


@pytest.mark.parametrize(
    ("asked", "given", "says"),
    [
        (AskedLayout(tp=16), {}, "tp = 16 is more than the 8 key/value heads: 2 neighbours hold the same one"),
        (AskedLayout(tp=3), {}, "tp = 3 deals the work out unevenly (a slot has 6 of 16 heads)"),
        (AskedLayout(tp=3), {}, "tp = 3 pads the vocabulary from 151,936 to 151,938 rows"),
        (
            AskedLayout(cp=2, seq_len=2047, cp_style="ring"),
            {},
            "seq_len = 2047 is no multiple of 4, as cp 2 wants it: a full micro-batch is filled up to 2048 tokens",
        ),
        (
            AskedLayout(),
            {"num_samples": 20},
            "dp_shard = 48 leaves 28 of 48 data-parallel ranks without work, as an optimizer step has 20 samples: "
            "fewer slots do, or a larger tp or cp",
        ),
        (
            AskedLayout(pp=4),
            {"num_samples": 24},
            "pp = 4 leaves stages idle for at least 60% of the time: a data-parallel rank has at most 2 micro-batches "
            "in an optimizer step, and 4 stages want 16",
        ),
        (
            AskedLayout(seq_len=262_144),
            {"memory": SlotMemory(24 * GIB)},
            "tp = 1 is with dp_shard 48 probably too little memory: a slot would need about 322 GiB (activations "
            "321) and has 24 GiB",
        ),
    ],
)  # fmt: skip
def test_what_is_good_to_know_is_a_warning(asked: AskedLayout, given: dict[str, Any], says: str) -> None:
    planned = plan_layout(48, asked, QWEN, **given)
    assert planned.layout is not None
    assert any(said.startswith(says) for said in sentences(planned.warnings)), sentences(planned.warnings)


@pytest.mark.parametrize(
    ("asked", "given", "dims", "reasons"),
    [
        (
            AskedLayout(tp="auto"),
            {},
            ParallelDims(dp_shard=8),
            {"tp": "auto: data parallelism costs least, and nothing speaks against it; " + BLIND},
        ),
        (
            AskedLayout(tp="auto", pp=2),
            {"num_samples": 2},
            ParallelDims(pp=2, tp=4),
            {
                "tp": "auto: with tp 2 stages are idle for 50% of the time, as a data-parallel rank has 1 micro-batch; "
                + BLIND,
                "stages": "19 and 9 layers, where the output embeddings count as 9.9",
            },
        ),
        (
            AskedLayout(tp="auto", seq_len=32_768),
            {"memory": SlotMemory(30 * GIB)},
            ParallelDims(dp_shard=4, tp=2),
            {
                "tp": "auto: with tp 1 a slot would need about 42.1 GiB (gradients 0.857, activations 38.9, logits "
                "1.25) and has 30 GiB"
            },
        ),
        (
            AskedLayout(cp=2),
            {},
            ParallelDims(dp_shard=4, cp=2),
            {"cp_style": "auto: ulysses, as it leaves shared prompts shared"},
        ),
        (AskedLayout(cp=2, cp_style="ring"), {}, ParallelDims(dp_shard=4, cp=2), {}),
        (
            AskedLayout(tp=2, cp=4),
            {"spec": TINY},
            ParallelDims(cp=4, tp=2),
            {
                "cp_style": "auto: ring, as ulysses deals the 3 query heads of a slot of tp 2 out to the slots along "
                "cp, and cp is 4"
            },
        ),
    ],
)  # fmt: skip
def test_what_is_left_to_the_planner_has_a_reason(
    asked: AskedLayout, given: dict[str, Any], dims: ParallelDims, reasons: dict[str, str]
) -> None:
    planned = plan_layout(8, asked, **({"spec": QWEN} | given))
    assert planned.layout is not None
    assert (planned.layout.dims, dict(planned.reasons)) == (dims, reasons)


def test_a_plan_says_what_a_slot_takes() -> None:
    asked = AskedLayout(seq_len=4096, pp=2, pp_schedule="interleaved")
    memory = SlotMemory(8 * GIB)
    planned = plan_layout(4, asked, QWEN, memory=memory)
    assert planned.layout is not None
    assert planned.use == predict(QWEN, planned.layout.dims, memory.options_of(asked))
    assert (memory.options_of(asked).num_runs, memory.options_of(asked).seq_len) == (2, 4096)
    assert planned.needed_bytes == planned.use.device.total > memory.room_bytes
    assert planned.too_little in planned.warnings
    assert plan_layout(4, asked, QWEN).use is None, "how much a slot has is not known"


@given(st.integers(1, 24), st.integers(1, 40))
def test_pp_does_not_grow_for_lack_of_samples(num_slots: int, num_samples: int) -> None:
    """Stages would wait for each other for at least as long as ranks without samples do."""
    planned = plan_layout(num_slots, AskedLayout(pp="auto"), QWEN, num_samples)
    assert planned.layout is not None
    assert planned.layout.dims.pp == 1


SIZES = st.integers(1, 4)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    kv_heads = draw(st.integers(1, 4))
    return replace(
        TINY,
        vocab_size=draw(st.integers(1, 400)),
        intermediate_size=draw(st.integers(1, 48)),
        num_layers=draw(st.integers(1, 7)),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        tie_embeddings=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn) -> AskedLayout:
    auto = st.just("auto")
    return AskedLayout(
        pp=draw(SIZES | auto),
        dp_replicate=draw(SIZES),
        dp_shard=draw(st.none() | SIZES),
        cp=draw(SIZES),
        tp=draw(SIZES | auto),
        cp_style=draw(st.sampled_from(["ring", "ulysses"]) | auto),
        pp_schedule=draw(st.sampled_from(["1f1b", "interleaved", "zero_bubble"])),
        vpp=draw(st.integers(1, 3) | auto),
        seq_len=draw(st.integers(2, 4096)),
    )


@given(specs(), requests(), st.integers(1, 24), st.none() | st.integers(1, 40), st.none() | st.just(SlotMemory(2**31)))
def test_what_it_returns_is_a_layout_that_the_model_can_have(
    spec: ModelSpec, asked: AskedLayout, num_slots: int, num_samples: int | None, memory: SlotMemory | None
) -> None:
    slots = tuple(range(num_slots, 0, -1))
    planned = plan_layout(slots, asked, spec, num_samples, memory)
    assert (planned.layout is None) == bool(planned.errors)
    for finding in (*planned.errors, *planned.warnings):
        assert finding.sentence.startswith(f"{finding.keys[0]} = ")
    if planned.layout is None:
        return
    layout, dims = planned.layout, planned.layout.dims
    assert layout.slots == slots
    assert prod(getattr(dims, axis) for axis in AXES) == num_slots
    for axis in AXES:
        wanted = getattr(asked, axis)
        assert wanted in (None, "auto", getattr(dims, axis)), "a size that is asked for is what one gets"
    assert style_violation(planned.cp_style, spec.num_heads, dims.cp, dims.tp) is None
    holdings = model_layout(spec, layout, "float32")
    if dims.dp_shard * dims.cp == 1:  # tensors may have fewer rows than FSDP2 has ranks
        on = {slot for tensor in holdings for slot, _, size in tensor.holdings.sizes if size}
        assert on == {*slots}, "tp and pp leave no slot without a part"
    if dims.pp > 1:
        assert len(runs_of_layers(layout, spec.num_layers)) == dims.pp * asked.num_runs


@given(specs(), requests(), st.integers(1, 24))
def test_the_same_request_gives_the_same_plan(spec: ModelSpec, asked: AskedLayout, num_slots: int) -> None:
    assert plan_layout(num_slots, asked, spec) == plan_layout(num_slots, asked, spec)


@given(requests(), st.integers(1, 24))
def test_without_a_model_sizes_are_held_against_the_number_of_slots(asked: AskedLayout, num_slots: int) -> None:
    planned = plan_layout(num_slots, asked)
    if planned.layout is not None:
        assert prod(getattr(planned.layout.dims, axis) for axis in AXES) == num_slots
