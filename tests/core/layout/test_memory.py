"""What a slot needs to train: predictions held against peaks that a real trainer had, against each other, and against
the constants of the modules that they are about."""

from dataclasses import asdict, replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.layer_memory import layer_memory
from ductile.core.layout.memory.offloaded import buffer_bytes
from ductile.core.layout.memory.optimizer_memory import Trained, step_extra
from ductile.core.layout.memory.options import Checkpointing, MemoryOptions
from ductile.core.layout.memory.parts import MemoryParts
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.memory.slot_shapes import slot_shapes
from ductile.core.layout.model.lora import LoraSpec
from ductile.core.layout.model.spec import ModelSpec

MIB = 2**20
QWEN = ModelSpec("qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, tie_embeddings=True, qk_norm=True)
"""Qwen3-0.6B."""
VOCAB = ModelSpec("qwen3", 16_384, 128, 384, 4, 8, 2, 32, qk_norm=True)
WIDE = ModelSpec("qwen3", 4096, 256, 768, 4, 8, 4, 32, tie_embeddings=True, qk_norm=True)
DEEP = ModelSpec("qwen3", 256, 256, 1024, 4, 8, 4, 32, tie_embeddings=True, qk_norm=True)
"""Models whose peak is at the head, at either, and in the layers."""
SIX = ModelSpec("qwen3", 4096, 128, 512, 6, 4, 2, 32, qk_norm=True)
ADAPTED = replace(SIX, lora=LoraSpec(16, 32.0))
LLAMA = ModelSpec("llama", 4096, 256, 768, 6, 8, 4, 32, tie_embeddings=True)
"""Model that a pipeline runs with as many micro-batches as stages, or with fewer."""
BYTES = ModelSpec("llama", 256, 256, 704, 4, 8, 4, 32)
EMBEDDED = ModelSpec("llama", 32_768, 512, 4096, 8, 16, 8, 32, tie_embeddings=True)
"""Models that have their peak in the optimizer's step, where micro-batches are short. The moments of the embeddings of
the second one have more than a bucket."""
SHORT_STEP = {"seq_len": 64, "checkpointing": Checkpointing("full")}
OF_MUON = {**SHORT_STEP, "rule": "muon", "optimizer_bytes": 4.2}
OF_8_BITS = {**SHORT_STEP, "rule": "adamw_8bit", "optimizer_bytes": 2.13}
CPU = MemoryOptions(compute_bytes=4, device="cpu", num_micro_batches=2)
"""Options of a trainer in fp32 on a CPU, with two micro-batches a step."""


def selective(*targets: str) -> Checkpointing:
    return Checkpointing("selective", targets=targets)


@pytest.mark.parametrize(
    ("measured_mib", "spec", "dims", "options"),
    [
        (179.60, VOCAB, {}, {"seq_len": 512}),
        (153.17, VOCAB, {}, {"seq_len": 1024, "head_chunk_tokens": 128}),
        (265.17, VOCAB, {}, {"seq_len": 1024, "head_chunk_tokens": 10**9}),
        (161.71, WIDE, {}, {"seq_len": 1024, "num_micro_batches": 1}),
        (147.22, WIDE, {}, {"seq_len": 1024, "compute_bytes": 2}),
        (153.20, DEEP, {}, {"seq_len": 1024}),
        (68.34, DEEP, {}, {"seq_len": 64}),
        (61.54, DEEP, {}, {"seq_len": 64, "num_micro_batches": 1}),
        (94.44, DEEP, {}, {"seq_len": 1024, "checkpointing": Checkpointing("full")}),
        (133.53, DEEP, {}, {"seq_len": 1024, "checkpointing": selective("norm")}),
        (139.01, DEEP, {}, {"seq_len": 1024, "checkpointing": selective("attn_proj")}),
        (117.20, DEEP, {}, {"seq_len": 1024, "checkpointing": selective("mlp")}),
        (97.53, DEEP, {}, {"seq_len": 1024, "checkpointing": selective("norm", "attn_proj", "mlp")}),
        (82.85, DEEP, {}, {"seq_len": 1024, "offloaded_in_flight": 1}),
        (86.89, DEEP, {}, {"seq_len": 1024, "offloaded_in_flight": 5}),
        (94.44, DEEP, {}, {"seq_len": 1024, "offloaded_in_flight": 5, "checkpointing": Checkpointing("full")}),
        (61.04, DEEP, {}, {"seq_len": 64, "optim_cpu_offload": True}),
        (82.45, WIDE, {"dp_shard": 2}, {"seq_len": 256, "reshard_after_forward": False}),
        (73.45, WIDE, {"dp_shard": 2}, {"seq_len": 256}),
        (81.45, WIDE, {"dp_shard": 2}, {"seq_len": 256, "reduce_every_step": True}),
        (78.11, WIDE, {"dp_shard": 2}, {"seq_len": 512, "compute_bytes": 2}),
        (49.08, DEEP, {"dp_shard": 2}, {"seq_len": 64}),
        (128.88, WIDE, {"dp_replicate": 2}, {"seq_len": 512}),
        (94.07, WIDE, {"tp": 2}, {"seq_len": 1024}),
        (52.54, WIDE, {"tp": 2, "dp_shard": 2}, {"seq_len": 512}),
        (64.21, DEEP, {"cp": 2}, {"seq_len": 512}),
        (62.71, DEEP, {"cp": 2}, {"seq_len": 512, "cp_style": "ring"}),
        (110.42, WIDE, {"pp": 2}, {"seq_len": 512, "num_micro_batches": 4}),
        (105.9, SIX, {"pp": 2}, {"seq_len": 1024}),
        (51.17, DEEP, {"pp": 2, "dp_shard": 2}, {"seq_len": 256, "num_micro_batches": 4}),
        (116.10, LLAMA, {"pp": 2, "dp_shard": 2}, {"seq_len": 512}),
        (107.78, LLAMA, {"pp": 2, "tp": 2}, {"seq_len": 1024}),
        (122.23, LLAMA, {"pp": 2, "cp": 2}, {"seq_len": 1024}),
        (117.51, LLAMA, {"pp": 4}, {"seq_len": 1024}),
        (111.18, ADAPTED, {"dp_shard": 2}, {"seq_len": 1024}),
        (62.51, ADAPTED, {"tp": 2}, {"seq_len": 1024}),
        (100.77, ADAPTED, {"pp": 2}, {"seq_len": 1024}),
        (62.13, DEEP, {"pp": 2}, {"seq_len": 256, "num_micro_batches": 4, "pp_schedule": "interleaved", "num_runs": 2}),
        (71.81, DEEP, {"pp": 2}, {"seq_len": 256, "num_micro_batches": 4, "pp_schedule": "zero_bubble"}),
        (59.50, BYTES, {}, {**OF_MUON}),
        (59.50, BYTES, {}, {**OF_MUON, "optim_cpu_offload": True}),
        (41.07, BYTES, {"dp_shard": 2}, {**OF_MUON}),
        (42.01, BYTES, {"tp": 2}, {**OF_MUON}),
        (30.30, BYTES, {"pp": 2}, {**OF_MUON}),
        (36.30, BYTES, {}, {**OF_8_BITS}),
        (36.30, BYTES, {}, {**OF_8_BITS, "optim_cpu_offload": True}),
        (802.1, EMBEDDED, {}, {**SHORT_STEP, "head_chunk_tokens": 16, "optim_cpu_offload": True}),
    ],
)  # fmt: skip
def test_predictions_are_near_what_real_trainers_had(
    measured_mib: float, spec: ModelSpec, dims: dict[str, int], options: dict[str, object]
) -> None:
    """The peaks of live tensor bytes were counted by a dispatch mode, on CPUs; `benchmarks/memory.py` counts anew."""
    use = predict(spec, ParallelDims(**dims), replace(CPU, **options))  # pyright: ignore
    assert 0.95 <= use.device.total / (measured_mib * MIB) <= 1.1, use


def test_the_worst_moment_is_named() -> None:
    assert predict(QWEN, ParallelDims(), replace(CPU, seq_len=64)).moment == "backward pass of the head"
    long = replace(CPU, seq_len=2048, device="cuda", compute_bytes=2)
    assert predict(replace(QWEN, vocab_size=512), ParallelDims(), long).moment == "backward pass of layer 27"
    offloaded = replace(CPU, seq_len=2, optim_cpu_offload=True)
    assert predict(replace(DEEP, num_layers=16), ParallelDims(), offloaded).moment == "optimizer step"


def test_the_state_lies_on_the_device_or_in_host_memory() -> None:
    state, shards = 16 * QWEN.num_parameters, ParallelDims(dp_shard=4)
    options = MemoryOptions(seq_len=64)

    def of_state(parts: MemoryParts) -> int:
        return parts.parameters + parts.optimizer

    whole, sharded = (predict(QWEN, dims, options) for dims in (ParallelDims(), shards))
    assert of_state(whole.device) == 12 * QWEN.num_parameters
    assert of_state(sharded.device) == pytest.approx(3 * QWEN.num_parameters, rel=1e-3)
    assert whole.host.total == sharded.host.total == 0
    moments = predict(QWEN, shards, replace(options, optim_cpu_offload=True))
    assert (moments.host.optimizer, moments.host.parameters) == (sharded.device.optimizer, 0)
    everything = predict(QWEN, shards, replace(options, fsdp_cpu_offload=True, num_micro_batches=1))
    assert everything.host.total == pytest.approx(state / 4, rel=1e-3)
    assert everything.device.parameters == everything.device.optimizer == 0
    assert everything.device.gathered > 0, "computing needs whole parameters"


def test_generators_scorers_and_the_device_s_context_take_their_part() -> None:
    options = MemoryOptions(seq_len=64)
    beside = predict(QWEN, ParallelDims(), replace(options, generator_bytes=7, scorer_bytes=3, context_bytes=5)).device
    assert (beside.generator, beside.scorer, beside.context) == (7, 3, 5)
    assert beside.total == predict(QWEN, ParallelDims(), options).device.total + 15


SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    keys = draw(SIZES)
    return ModelSpec(
        "qwen3",
        vocab_size=draw(st.integers(2, 4000)),
        hidden_size=draw(st.integers(1, 64)) * 8,
        intermediate_size=draw(st.integers(1, 64)) * 16,
        num_layers=draw(st.integers(1, 8)),
        num_heads=keys * draw(SIZES),
        num_kv_heads=keys,
        head_dim=draw(st.integers(1, 16)) * 8,
        tie_embeddings=draw(st.booleans()),
    )


CHECKPOINTINGS = st.none() | st.builds(
    Checkpointing,
    st.sampled_from(["full", "selective"]),
    st.integers(1, 3),
    st.lists(st.sampled_from(["norm", "attn_proj", "mlp"]), min_size=1, unique=True).map(tuple),
)
OPTIONS = st.builds(
    MemoryOptions,
    parameter_bytes=st.sampled_from([2, 4]),
    compute_bytes=st.sampled_from([2, 4]),
    reduce_bytes=st.sampled_from([2, 4]),
    optimizer_bytes=st.sampled_from([0, 4, 8]),
    reduce_every_step=st.booleans(),
    reshard_after_forward=st.booleans(),
    checkpointing=CHECKPOINTINGS,
    offloaded_in_flight=st.none() | st.integers(1, 6),
    optim_cpu_offload=st.booleans(),
    head_chunk_tokens=st.none() | st.integers(1, 4096),
    fp32_lm_head=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
    num_micro_batches=st.none() | st.integers(1, 20),
    seq_len=st.integers(2, 2048),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, ParallelDims, MemoryOptions]:
    spec = draw(specs())
    layouts = list(possible_layouts(spec, draw(st.integers(1, 12))))
    return spec, draw(st.sampled_from(layouts)), draw(OPTIONS)


@given(cases())
def test_every_part_is_there_and_none_is_negative(case: tuple[ModelSpec, ParallelDims, MemoryOptions]) -> None:
    spec, dims, options = case
    use = predict(spec, dims, options)
    for parts in (use.device, use.host):
        assert all(size >= 0 for size in parts.named().values())
        assert all(isinstance(size, int) for size in parts.named().values())
    assert use.device.parameters > 0
    assert use.device.activations > 0
    assert use.moment
    assert 0 <= use.stage < dims.pp
    shards = prod((dims.pp, dims.dp_shard, dims.cp, dims.tp))
    assert use.device.parameters * shards >= 0.5 * spec.num_parameters * options.parameter_bytes


@given(cases())
def test_no_knob_that_saves_memory_costs_device_memory(case: tuple[ModelSpec, ParallelDims, MemoryOptions]) -> None:
    spec, dims, options = case
    plain = replace(options, checkpointing=None, offloaded_in_flight=None, optim_cpu_offload=False)
    needed = predict(spec, dims, plain).device.total
    for knob in (
        {"checkpointing": Checkpointing("full")},
        {"offloaded_in_flight": 1},
        {"optim_cpu_offload": True},
        {"reshard_after_forward": True},
        {"head_chunk_tokens": 1},
    ):
        less = predict(spec, dims, replace(plain, **knob)).device.total  # pyright: ignore
        assert less <= needed * 1.001 + 4096, knob


@given(cases(), st.integers(1, 5))
def test_more_in_flight_takes_more(case: tuple[ModelSpec, ParallelDims, MemoryOptions], number: int) -> None:
    spec, dims, options = case
    fewer, more = (replace(options, offloaded_in_flight=each) for each in (number, number + 1))
    assert predict(spec, dims, fewer).device.total <= predict(spec, dims, more).device.total
    assert predict(spec, dims, fewer).host == predict(spec, dims, more).host


@given(cases())
def test_longer_micro_batches_take_more(case: tuple[ModelSpec, ParallelDims, MemoryOptions]) -> None:
    spec, dims, options = case
    longer = replace(options, seq_len=2 * options.seq_len)
    assert predict(spec, dims, options).device.total <= predict(spec, dims, longer).device.total


@given(specs(), st.integers(2, 512), st.sampled_from(["norm", "attn_proj", "mlp"]))
def test_a_layer_keeps_least_where_all_of_it_is_computed_again(spec: ModelSpec, tokens: int, target: str) -> None:
    shapes = slot_shapes(spec, ParallelDims(), replace(CPU, seq_len=tokens))
    whole, some, none = (layer_memory(shapes, how) for how in (Checkpointing("full"), selective(target), None))
    assert whole.kept_bytes == shapes.hidden_bytes <= some.kept_bytes
    assert whole.kept_bytes < none.kept_bytes <= none.backward
    every = layer_memory(shapes, selective("norm", "attn_proj", "mlp"))
    attention = tokens * shapes.heads[0] * (4 * spec.head_dim + 4)
    assert every.kept_bytes == whole.kept_bytes + attention, "attention is never computed again"


def test_of_every_second_layer_half_is_kept() -> None:
    options = replace(CPU, seq_len=512)
    none, half, whole = (
        predict(DEEP, ParallelDims(), replace(options, checkpointing=how)).device.total
        for how in (None, Checkpointing(freq=2), Checkpointing())
    )
    assert whole < half < none


@given(st.integers(1, 10**9))
def test_pinned_buffers_are_powers_of_two_and_others_exact(num_bytes: int) -> None:
    pinned = buffer_bytes(num_bytes, is_pinned=True)
    assert num_bytes <= pinned < 2 * num_bytes
    assert pinned.bit_count() == 1
    assert buffer_bytes(num_bytes, is_pinned=False) == num_bytes


@given(OPTIONS)
def test_options_that_are_written_down_are_read_again(options: MemoryOptions) -> None:
    assert MemoryOptions.from_fields(asdict(options)) == options
    fields = asdict(options)
    if options.checkpointing is not None:
        fields["checkpointing"]["targets"] = list(options.checkpointing.targets)  # as JSON has it
    assert MemoryOptions.from_fields(fields) == options


def test_the_numbers_of_modules_that_take_torch_are_these() -> None:
    from ductile.core.layout.memory import head_memory, layer_operations, optimizer_memory
    from ductile.kernels import products
    from ductile.model import logprobs
    from ductile.trainer import muon

    assert optimizer_memory.MUON_BATCH_BYTES == muon.BATCH_BYTES
    assert head_memory.CHUNK_ELEMENTS == logprobs.CHUNK_ELEMENTS
    assert layer_operations.BLOCKS == products.BLOCKS


@pytest.mark.parametrize("dims", [{}, {"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2}])
def test_adapters_alone_have_gradients_and_moments(dims: dict[str, int]) -> None:
    options, layout = replace(CPU, seq_len=64), ParallelDims(**dims)
    adapted = replace(QWEN, lora=LoraSpec(16, 32.0))
    full, use = (predict(spec, layout, options).device for spec in (QWEN, adapted))
    num_slots = prod(dims.values())
    # A or B is whole along tp, and stages have not equally many layers.
    most = 1.1 * adapted.num_trained if {*dims} <= {"dp_shard"} else 1.8 * adapted.num_trained
    assert 7 * adapted.num_trained <= num_slots * use.optimizer <= 8 * most
    assert use.parameters == pytest.approx(full.parameters, rel=0.05)
    assert use.parameters > full.parameters
    assert use.total < 0.6 * full.total


def test_a_module_without_an_adapter_keeps_nothing_for_its_weight() -> None:
    spec = replace(QWEN, lora=LoraSpec(16, 32.0, ("down_proj",)))
    some, every, none = (
        layer_memory(slot_shapes(each, ParallelDims(), CPU), None)
        for each in (spec, replace(QWEN, lora=LoraSpec(16, 32.0)), QWEN)
    )
    assert some.kept_bytes < none.kept_bytes < every.kept_bytes
    assert some.weight_gradients < every.weight_gradients < none.weight_gradients


def trained(*kept_mib: float) -> list[Trained]:
    return [Trained(1, True, size * MIB) for size in kept_mib]


@pytest.mark.parametrize(
    ("kept_mib", "coming_mib"),
    [
        ([10, 20, 30], 60),  # one bucket
        ([40, 40, 40, 40], 120),  # four of them, three of which are there at once
        ([300, 40, 10, 40, 40], 350 + 40),
        ([300, 200, 100], 600),
        ([300, 10, 10, 50, 200], 370),  # the largest ones are no neighbours of each other
    ],
)
def test_an_offloaded_state_comes_in_buckets_of_which_three_are_there(kept_mib: list[float], coming_mib: float) -> None:
    extra = step_extra(trained(*kept_mib), replace(CPU, optim_cpu_offload=True), ParallelDims())
    assert extra.coming == coming_mib * MIB
    assert extra.working == 0
    assert step_extra(trained(*kept_mib), CPU, ParallelDims()).coming == 0
