import asyncio
import io
import json

import pytest
from rich.console import Console

from ductile.config.schema.bench import BenchConfig
from ductile.messages.workers import Surveyed, Traced
from ductile.orchestrator.commands.bench import GIB, Bench, written
from ductile.roles import Late


def text_of(bench: Bench) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(bench.table())
    return " ".join(console.export_text().split())  # the caption is as wide as the table


def measured_on(ask, steps, arithmetic="bfloat16") -> Bench:
    """A run of steps: (step, seconds, mfu), 1,000 tokens each."""

    async def run() -> Bench:
        bench = Bench(BenchConfig(), {"seq_len": 64})
        if ask:
            await bench.begin(ask, arithmetic)
        for step, step_s, mfu in steps:
            bench.on_metrics(step, {"tokens": 1000.0, "step_s": step_s} | ({} if mfu is None else {"mfu": mfu}))
            await asyncio.sleep(0)  # the slots reply before the next step
            await asyncio.sleep(0)
        await bench.wait_for_replies()
        return bench

    return asyncio.run(run())


def gpus(*memory_gib: tuple[float, float]):
    """Slots on GPUs: used and reserved after each request."""
    left = iter(memory_gib)

    async def ask(measure):
        if measure:
            return {slot: Surveyed("NVIDIA H200", 0, 0, 989e12, "known") for slot in (0, 1)}
        used, reserved = next(left)
        return {
            0: Surveyed("NVIDIA H200", int(used * GIB), int(reserved * GIB), total_bytes=8 * GIB),
            1: Surveyed("NVIDIA H200", GIB, GIB, total_bytes=8 * GIB),
        }

    return ask


async def cpus(measure):
    peaks = {0: 40e9, 1: 60e9}
    return {
        slot: Surveyed("cpu", GIB, None, peak if measure else None, "measured" if measure else None)
        for slot, peak in peaks.items()
    }


def test_the_first_step_is_left_out(tmp_path):
    steps = [(0, 9.0, None), (1, 100.0, 0.01), (2, 1.0, 0.4), (3, 2.0, 0.2), (4, 4.0, 0.1)]
    bench = measured_on(gpus((2, 3), (4, 6), (4, 6)), steps)
    figures = bench.figures()
    assert figures["throughput"] == {
        "mean": (1000 + 500 + 250) / 3,
        "std": figures["throughput"]["std"],
        "min": 250,
        "max": 1000,
    }
    assert figures["step_time"]["min"] == 1
    assert figures["mfu"] == {
        "mean": pytest.approx(0.7 / 3),
        "std": figures["mfu"]["std"],
        "min": 0.1,
        "max": 0.4,
    }
    assert figures["mfu_reason"] is None
    assert figures["devices"] == [
        {"name": "NVIDIA H200", "slots": 2, "peak_flops_per_s": 989e12, "source": "known"},
    ]
    assert figures["peak_memory"] == {
        "gib": 5.0,
        "largest_slot_gib": 4.0,
        "reserved_gib": 7.0,
        "pct": 75.0,
        "of": "tensors on the slots' devices",
    }
    written(figures, bench.table(), str(tmp_path / "bench.json"))
    assert json.loads((tmp_path / "bench.json").read_text())["steps"] == 3
    text = text_of(bench)
    assert "40.0 %" in text
    assert "23.3 ± 12.5 % [10.0, 40.0]" in text
    assert "NVIDIA H200 at 989 TFLOP/s (known)" in text
    assert "5.00 GiB (75 %)" in text
    assert "583 ± 312 tokens/s [250, 1,000]" in text


def test_a_cpu_is_measured_and_its_memory_is_the_processes():
    bench = measured_on(cpus, [(1, 1.0, 0.5), (2, 1.0, 0.5)], "float32")
    figures = bench.figures()
    assert figures["devices"] == [{"name": "cpu", "slots": 2, "peak_flops_per_s": 50e9, "source": "measured"}]
    assert figures["peak_memory"] == {
        "gib": 2.0,
        "largest_slot_gib": 1.0,
        "reserved_gib": None,
        "pct": None,
        "of": "resident memory of the slots' processes",
    }
    assert "cpu at 0.05 TFLOP/s (measured)" in text_of(bench)


def test_what_cannot_be_told_is_null_with_the_reason():
    """`ductile orchestrator`: the server is somebody else's."""
    bench = measured_on(None, [(1, 1.0, None), (2, 1.0, None)])
    figures = bench.figures()
    assert figures["mfu"] is None
    assert figures["peak_memory"]["gib"] is None
    assert "starts no slots" in figures["mfu_reason"]
    assert "starts no slots" in figures["peak_memory"]["reason"]
    assert figures["devices"] == []
    text = text_of(bench)
    assert text.count("n/a") == 4
    assert "starts no slots" in text


def test_a_step_that_trained_nothing_is_not_in_the_mean_of_mfu():
    bench = measured_on(cpus, [(1, 1.0, 0.9), (2, 1.0, 0.2), (3, 1.0, None), (4, 1.0, 0.4)])
    figures = bench.figures()
    assert figures["mfu"]["mean"] == pytest.approx(0.3)
    assert figures["mfu_reason"] is None
    assert text_of(bench).count("n/a") == 1


def test_a_device_of_unknown_speed_is_no_slow_one():
    async def ask(measure):
        return {0: Surveyed("cpu", GIB, None, 40e9, "measured"), 1: Surveyed("cpu", GIB, None)}

    bench = measured_on(ask, [(1, 1.0, 0.5), (2, 1.0, 0.5)])
    assert bench.figures()["devices"] == [
        {"name": "cpu", "slots": 1, "peak_flops_per_s": 40e9, "source": "measured"},
        {"name": "cpu", "slots": 1, "peak_flops_per_s": None, "source": None},
    ]
    assert "against cpu at 0.04 TFLOP/s (measured)." in text_of(bench)


def test_a_slot_that_does_not_reply_costs_its_figures_alone(capsys):
    async def ask(measure):
        if measure:
            return await cpus(measure)
        raise Late("slot 1 did not reply")

    bench = measured_on(ask, [(1, 1.0, 0.5), (2, 1.0, 0.5)])
    assert bench.figures()["peak_memory"] == {"gib": None, "reason": "no slot has said it"}
    assert bench.figures()["mfu"]["mean"] == 0.5
    assert "slot 1 did not reply" in capsys.readouterr().err


def test_a_run_that_was_too_short_has_an_empty_table():
    assert Bench(BenchConfig(), {"seq_len": 64}).figures()["steps"] == 0
    assert Bench(BenchConfig(), {"seq_len": 64}).table().row_count == 0


class Tracer:
    """As `SlotTracer`, with slots that spend a fifth and two fifths of their time on communication."""

    def __init__(self) -> None:
        self.did: list[object] = []

    def begin(self, files):
        self.did.append(dict(files))

    def end(self):
        self.did.append("end")

    async def replies(self):
        return {0: Traced(5.0, 1.0), 1: Traced(5.0, 2.0)}


def test_the_step_after_the_timed_ones_is_traced():
    bench, tracer = Bench(BenchConfig(steps=3, warmup_steps=2), {}), Tracer()

    async def run() -> None:
        bench.trace(tracer, lambda: (0, 1))
        for step in range(1, 5):
            seconds = {"seconds/forward_backward": 0.75 * step, "seconds/optim_step": 0.125, "seconds/resize": 0.0}
            bench.on_metrics(step, {"tokens": 10.0, "step_s": float(step), **seconds})
            tracer.did.append(step)
        await bench.wait_for_replies()

    asyncio.run(run())
    assert tracer.did == [1, 2, {0: "", 1: ""}, 3, "end", 4]
    figures = bench.figures()
    assert (figures["steps"], figures["warm_up_steps"], figures["step_time"]["mean"]) == (1, 2, 3.0)
    assert {name: found["mean"] for name, found in figures["phases"].items()} == {
        "forward_backward": 2.25,
        "optim_step": 0.125,
    }
    assert figures["communication"] == {"share": pytest.approx(0.3), "largest_slot_share": 0.4, "slots": 2}
    assert figures["versions"]["torch"]
    text = text_of(bench)
    assert "Phases of a step, which may overlap: forward_backward 2.25 s, optim_step 0.125 s." in text
    assert "Communication: 30.0 % of a traced step" in text
