"""How long a step takes in a layout, and the search among layouts and knobs."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.possible_layouts import possible_layouts
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.geometry.parallel_layout import ParallelDims, RankShape
from ductile.core.layout.memory.options import Checkpointing, MemoryOptions
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.lora import LoraSpec
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.costs.layout_time import REACHED, HostSpeeds, SlotSpeed, layout_time, recomputed_share
from ductile.core.scheduling.layout_search import KNOBS, MOST_TP, best_fits

QWEN = ModelSpec("qwen3", 151_936, 2560, 9728, 36, 32, 8, 128, tie_embeddings=True, qk_norm=True)
"""Qwen3-4B."""
SMALL = ModelSpec("llama", 512, 64, 128, 4, 8, 4, 16)
OPTIONS = MemoryOptions(seq_len=8192)
GIB = 2**30


def known(device: str) -> SlotSpeed:
    found = SlotSpeed.of_device(device)
    assert found is not None
    return found


H100 = known("NVIDIA H100 80GB HBM3")


def step_s(dims: ParallelDims, speed: SlotSpeed = H100, num_samples: int = 64, **options: object) -> float:
    return layout_time(QWEN, dims, replace(OPTIONS, **options), num_samples, speed).step_s  # pyright: ignore


def test_a_slot_alone_takes_as_long_as_its_operations() -> None:
    """6 operations a parameter and token, and those of attention, at the share of the peak that is reached."""
    found = layout_time(QWEN, ParallelDims(), OPTIONS, 1, H100)
    products = 6 * QWEN.num_parameters * OPTIONS.seq_len
    attention = 12 * QWEN.num_layers * QWEN.num_heads * QWEN.head_dim * OPTIONS.seq_len**2 / 2
    assert found.compute_s == pytest.approx((products + attention) / (989e12 * REACHED), rel=0.01)
    assert found.collectives_s == found.copies_s == 0


def test_what_was_measured_comes_before_data_sheets() -> None:
    measured = SlotSpeed(tokens_per_s=1000, rank_speeds=((RankShape(tp=2), 1.5),), overlaps=False)
    assert layout_time(QWEN, ParallelDims(), OPTIONS, 2, measured).compute_s == 2 * OPTIONS.seq_len / 1000
    assert layout_time(QWEN, ParallelDims(tp=2), OPTIONS, 2, measured).compute_s == pytest.approx(
        2 * OPTIONS.seq_len / 1500
    )
    assert SlotSpeed.of_device("a device of nobody") is None


def test_a_slot_that_waits_leaves_its_core_to_the_others() -> None:
    four, share = ParallelDims(pp=4), SlotSpeed(tokens_per_s=1000, rank_speeds=((RankShape(pp=4), 4 * 16 / 19),))
    times = [layout_time(QWEN, four, OPTIONS, 2, replace(share, slots_per_core=slots)).compute_s for slots in (1, 2, 4)]
    busy_s = 2 * OPTIONS.seq_len / 1000 / 4
    assert times == pytest.approx([busy_s * 5 / 2, busy_s * 5 / 4, busy_s]), "2 micro-batches take 5 turns"


def test_each_knob_costs_what_it_does() -> None:
    eight, plain = ParallelDims(dp_shard=8), step_s(ParallelDims(dp_shard=8))
    full = step_s(eight, checkpointing=Checkpointing()) / plain
    assert 1.25 < full < 4 / 3
    norm = step_s(eight, checkpointing=Checkpointing("selective")) / plain
    mlp = step_s(eight, checkpointing=Checkpointing("selective", targets=("norm", "mlp"))) / plain
    assert 1 < norm < 1.05 < mlp < full
    assert step_s(eight, checkpointing=Checkpointing(freq=2)) / plain == pytest.approx((1 + full) / 2, rel=1e-3)
    moments = step_s(eight, optim_cpu_offload=True) - plain
    assert moments == pytest.approx(QWEN.num_parameters / 8 * 8 / 25e9, rel=1e-3)
    assert step_s(eight, fsdp_cpu_offload=True) - plain > moments
    kept = step_s(eight, reshard_after_forward=False)
    assert kept < plain


def test_where_nothing_overlaps_all_adds_up() -> None:
    cpu = SlotSpeed(tokens_per_s=100, overlaps=False, message_s=1e-3, machine=HostSpeeds(link_bytes_per_s=1e9))
    found = layout_time(SMALL, ParallelDims(dp_shard=2), replace(OPTIONS, offloaded_in_flight=2), 4, cpu)
    parts = found.compute_s + found.collectives_s + found.copies_s + found.optimizer_s
    assert found.step_s == pytest.approx(parts)
    assert min(found.collectives_s, found.copies_s) > 0
    beside = layout_time(
        SMALL, ParallelDims(dp_shard=2), replace(OPTIONS, offloaded_in_flight=2), 4, replace(cpu, overlaps=True)
    )
    assert beside.step_s < found.step_s


def test_stages_wait_where_there_are_few_micro_batches() -> None:
    alone = SlotSpeed(tokens_per_s=1000)
    few, many = (step_s(ParallelDims(pp=4), alone, number) / number for number in (4, 64))
    assert few > 1.3 * many


def test_all_samples_of_the_slowest_rank_count() -> None:
    assert step_s(ParallelDims(dp_shard=4), num_samples=5) == pytest.approx(
        step_s(ParallelDims(dp_shard=4), num_samples=8)
    )


@given(st.sampled_from(["full", "selective"]), st.lists(st.sampled_from(["norm", "attn_proj", "mlp"]), min_size=1))
def test_nothing_is_computed_more_than_twice(mode: str, targets: list[str]) -> None:
    checkpointing = Checkpointing(mode, targets=tuple(dict.fromkeys(targets)))  # pyright: ignore
    assert 0 < recomputed_share(QWEN, replace(OPTIONS, checkpointing=checkpointing)) <= 1


@pytest.mark.parametrize(
    ("seq_len", "room_gib", "needs"),
    [(8192, 72, set[str]()), (65_536, 72, {"ac"}), (8192, 12, {"ac"})],
)
def test_the_fastest_fit_has_no_knob_that_it_does_not_need(seq_len: int, room_gib: int, needs: set[str]) -> None:
    memory = SlotMemory(room_gib * GIB, MemoryOptions())
    fits = best_fits(QWEN, 8, AskedLayout(seq_len=seq_len), memory, 64, H100)
    assert needs <= fits[0].settings.keys()
    if not needs:
        assert fits[0].settings.keys() <= {"reshard_after_forward"}


def test_fits_are_the_best_of_their_layouts_and_fit() -> None:
    memory = SlotMemory(3 * 2**20, MemoryOptions(compute_bytes=4, device="cpu"))
    asked = AskedLayout(seq_len=256)
    speed = SlotSpeed(tokens_per_s=500, overlaps=False)
    fits = best_fits(SMALL, 4, asked, memory, 8, speed)
    assert fits
    assert [fit.time.step_s for fit in fits] == sorted(fit.time.step_s for fit in fits)
    assert len({fit.dims for fit in fits}) == len(fits)
    possible = list(possible_layouts(SMALL, 4, most_tp=MOST_TP))
    assert {fit.dims for fit in fits} <= {*possible}
    assert all(fit.use.device.total <= memory.room_bytes for fit in fits)
    best = {fit.dims: fit.time.step_s for fit in fits}
    for dims in possible:
        options = memory.options_of(asked)
        for _, values in KNOBS:
            for _, changes in values:
                tried = replace(options, **changes)  # pyright: ignore
                if predict(SMALL, dims, tried).device.total <= memory.room_bytes:
                    assert best.get(dims, inf) <= layout_time(SMALL, dims, tried, 8, speed).step_s


def test_knobs_that_exclude_each_other_do_not_come_in_one_fit() -> None:
    for room in (6, 12, 30):
        for fit in best_fits(QWEN, 8, AskedLayout(seq_len=16_384), SlotMemory(room * GIB), 64, H100):
            assert not {"optim_cpu_offload", "fsdp_cpu_offload"} <= fit.settings.keys()
    asked = AskedLayout(seq_len=65_536, pp_schedule="zero_bubble")
    for fit in best_fits(QWEN, 8, asked, SlotMemory(72 * GIB), 64, H100):
        assert fit.settings.get("ac") in (None, {"mode": "full"})


def test_only_knobs_that_are_built_are_tried() -> None:
    fits = best_fits(QWEN, 8, AskedLayout(seq_len=65_536), SlotMemory(72 * GIB), 64, H100, built={"ac"})
    assert {key for fit in fits for key in fit.settings} <= {"ac", "pp", "tp", "cp", "dp_replicate"}


def test_what_is_offloaded_fits_in_host_memory() -> None:
    asked, memory = AskedLayout(seq_len=65_536), SlotMemory(40 * GIB)
    anywhere = best_fits(QWEN, 8, asked, memory, 64, H100)
    assert max(fit.use.host.total for fit in anywhere) > 20 * GIB
    fits = best_fits(QWEN, 8, asked, memory, 64, H100, host_bytes=20 * GIB)
    assert fits
    assert max(fit.use.host.total for fit in fits) <= 20 * GIB
    assert fits[0].time.step_s >= anywhere[0].time.step_s


def test_collectives_are_as_fast_as_the_slowest_link_of_their_group() -> None:
    """FSDP over two nodes waits for the network; a copy on each node gathers inside it, and only sums go across."""
    over_nodes = replace(H100, slots_per_node=8)

    def collectives_s(speed: SlotSpeed, **sizes: int) -> float:
        return layout_time(QWEN, ParallelDims(**sizes), OPTIONS, 64, speed).collectives_s

    machine = H100.machine
    slower = machine.link_bytes_per_s / machine.network_bytes_per_s
    assert collectives_s(over_nodes, dp_shard=16) == pytest.approx(slower * collectives_s(H100, dp_shard=16))
    assert collectives_s(over_nodes, dp_shard=8) == collectives_s(H100, dp_shard=8), "one node is enough"
    copies = dict(dp_replicate=2, dp_shard=8)
    inside_s = collectives_s(H100, dp_shard=8)
    sums_s = collectives_s(H100, **copies) - inside_s / 2  # of half as many micro-batches
    assert collectives_s(over_nodes, **copies) == pytest.approx(inside_s / 2 + slower * sums_s)
    assert step_s(ParallelDims(**copies), over_nodes) < step_s(ParallelDims(dp_shard=16), over_nodes)


@pytest.mark.parametrize(("sizes", "slows"), [(dict(tp=8), False), (dict(tp=16), True), (dict(cp=4, tp=4), True)])
def test_tp_and_cp_cost_more_across_nodes(sizes: dict[str, int], slows: bool) -> None:
    dims = ParallelDims(**sizes, dp_shard=16 // (sizes["tp"] * sizes.get("cp", 1)))
    over_nodes = replace(H100, slots_per_node=8)
    compute_s = [layout_time(QWEN, dims, OPTIONS, 64, speed).compute_s for speed in (H100, over_nodes)]
    assert (compute_s[1] > compute_s[0]) is slows


def test_the_search_keeps_tp_inside_nodes() -> None:
    fits = best_fits(QWEN, 12, AskedLayout(), SlotMemory(80 * GIB, OPTIONS), 64, replace(H100, slots_per_node=6))
    assert fits
    assert {fit.dims.tp for fit in fits} <= {1, 2}, "4 divides 12 slots, and no node of 6"


def test_adapters_are_timed_without_the_gradients_and_the_state_of_the_rest() -> None:
    adapted, eight = replace(QWEN, lora=LoraSpec(16, 32.0)), ParallelDims(dp_shard=8)
    options = replace(OPTIONS, optim_cpu_offload=True)
    full, found = (layout_time(spec, eight, options, 64, H100) for spec in (QWEN, adapted))
    share = adapted.num_trained / adapted.num_parameters
    assert 2 / 3 < found.compute_s / full.compute_s < 0.75
    assert found.copies_s == pytest.approx(full.copies_s * share * adapted.num_parameters / QWEN.num_parameters)
    assert found.optimizer_s < 0.1 * full.optimizer_s
    assert found.collectives_s < full.collectives_s
