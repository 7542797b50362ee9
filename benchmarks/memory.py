"""Bytes that a slot's device would hold at most in a training step: each knob's saving, and the planner's predictions.

Real trainers in real processes, on the CPU; live bytes of tensors are counted as operators make them
(`ductile.parallel.live_memory`), by pool: what would lie on a GPU, and what in host memory. Peaks are those of the
second step, of the slot that has the most; times are of a later step, that nobody counts, of the slowest slot. Parts:

    rows            each knob of the scaling page on one model, beside the same model without it
    predictions     peaks as the planner has them from the configuration alone, over models, layouts and knobs
    logits_ratio    logit memory of the head at a vocabulary of 128k, all tokens at once over chunks of them
    fit             steps in twelve layouts of four slots: measured times, and the ones that `ductile fit` expects

It ends with 1 when a prediction is more than a tenth off, or a twentieth too low, or when one of the other bars is
missed, and says which.

    python benchmarks/memory.py --json F
"""

import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from budget import Budget, CannotGoOn, arguments
from ductile.cluster.node import FREED_MEMORY_STAYS
from ductile.config.checks.trainer_layout import asked_layout, memory_options
from ductile.config.schema.run import TrainerRunConfig
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.choice.planner import plan_layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.memory.parts import SlotUse
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.spec import ModelSpec
from ductile.fabric import rendezvous
from ductile.messages.workers import ForwardBackward, OptimStep
from ductile.model.checkpoint import read_spec
from ductile.model.logprobs import LogprobHead
from ductile.parallel.live_memory import MemoryCounter
from ductile.records import MicroBatch
from ductile.roles import RoleAssignment
from ductile.trainer.train_role import TrainRole
from memory_bars import missed
from memory_cases import MICRO_BATCHES, MODELS, Case, Knob, all_cases, knobs, layouts
from memory_fit import BESIDE, fit_of
from provenance import provenance, write
from train import make_samples, received

NUM_TIMED = {"knobs": 2, "fit": 4}
"""Steps of a case whose times are taken, by part; the fastest counts. Other processes of the machine only ever add to
one."""
LOGITS = {"vocab": 128_256, "hidden": 64, "tokens": 2048, "chunk": 128}
"""Sizes of the head whose logits are measured, and its chunk."""
ALL_TOKENS = 1 << 30
MIB = 2**20


@dataclass(frozen=True)
class Found:
    """What was measured of a case."""

    peak_bytes: int
    """Most bytes that the device pool of a slot held."""
    host_peak_bytes: int
    step_s: float
    """Seconds of the fastest step that was timed; 0 where none was."""
    loss: float
    peak_parts: dict[str, int]
    """What the fullest slot's device pool held at its peak, by the operator that made it."""
    in_flight: int | None
    """Most activations in flight between device and host; None where none is offloaded."""


# -- In a slot's process


def work(
    connection: Any,
    config: Mapping[str, Any],
    place: RoleAssignment,
    micro_batches: Sequence[MicroBatch],
    num_tokens: int,
    num_timed: int,
) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    counter = MemoryCounter()

    def step(role: TrainRole) -> float:
        role.handle(ForwardBackward(tuple(micro_batches)))
        return role.handle(OptimStep(float(num_tokens))).report.loss

    with counter.watch():
        role = TrainRole(config, place)
        step(role)
        gc.collect()
        counter.reset_peak()
        loss = step(role)
    times: list[float] = []
    for _ in range(num_timed):
        began_s = time.perf_counter()
        step(role)
        times.append(time.perf_counter() - began_s)
    of_device, of_host = counter.peak_bytes("device"), counter.peak_bytes("host")
    parts = counter.peak_parts("device")
    offloaded = role._live.offload_counters
    in_flight = None if offloaded is None else offloaded.most_in_flight
    connection.send(Found(of_device, of_host, min(times, default=0.0), loss, parts, in_flight))


# -- Measuring


class Measured:
    """Cases, each of which is measured once."""

    def __init__(self, folder: Path, budget: Budget, timed: Mapping[str, int]) -> None:
        """timed: how many steps of a case are timed, by its name; of the others none is."""
        self._folder, self._budget, self._timed = folder, budget, timed
        self._found: dict[str, Found] = {}
        """By the case's name."""
        for name, shape in MODELS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(shape))

    def settings(self, case: Case) -> dict[str, Any]:
        """The trainer's section of a config."""
        axes = {axis: size for axis, size in case.sizes.items() if axis != "dp_shard"}
        model = {"name": str(self._folder / case.model), "seq_len": case.seq_len, "debug": {"random_init": True}}
        return {"model": {**model, **axes, **case.options}, "loss": {"type": "sft"}, "optim": case.optim}

    def layout(self, case: Case) -> ParallelLayout:
        """The layout that a run would have. Raises CannotGoOn for one that the planner refuses."""
        asked = asked_layout(self.config(case).model)
        planned = plan_layout(case.num_slots, asked, self.spec(case))
        if planned.layout is None:
            raise CannotGoOn("; ".join(error.sentence for error in planned.errors))
        return planned.layout

    def config(self, case: Case) -> TrainerRunConfig:
        return TrainerRunConfig.model_validate({**self.settings(case), "cluster": {"device": "cpu"}})

    def spec(self, case: Case) -> ModelSpec:
        return read_spec(self._folder / case.model, lora=self.config(case).model.adapters)

    def predicted(self, case: Case) -> SlotUse:
        """What a slot's pools hold at most, as the planner has it."""
        return predict(self.spec(case), self.layout(case).dims, self.options(case))

    def options(self, case: Case) -> MemoryOptions:
        return replace(memory_options(self.config(case)), num_micro_batches=MICRO_BATCHES)

    def of(self, case: Case) -> Found:
        """Raises CannotGoOn, TimeoutError."""
        if case.name not in self._found:
            self._found[case.name] = found = self._measure(case)
            print(f"{case.name:70} {found.peak_bytes / MIB:8.1f} MiB {found.step_s:6.2f} s", flush=True)
        return self._found[case.name]

    def _measure(self, case: Case) -> Found:
        settings, layout = TrainerConfig.model_validate(self.settings(case)).model_dump(), self.layout(case)
        num_timed = self._timed.get(case.name, 0)
        num_ranks = layout.num_data_parallel
        num_samples = MICRO_BATCHES * case.seq_len // case.sample_tokens * num_ranks
        samples = make_samples(num_samples, case.sample_tokens - 1, MODELS[case.model]["vocab_size"])
        packed = pack(samples, num_ranks, case.seq_len)
        assert {len(of_rank) for of_rank in packed} == {MICRO_BATCHES}
        num_tokens = num_samples * (case.sample_tokens - 1)
        store = rendezvous.host_store()
        places = [RoleAssignment(slot, layout, 1, "cpu", f"127.0.0.1:{store.port}") for slot in layout.slots]
        found = together(
            [
                (settings, place, packed[layout.data_parallel_rank(place.slot)], num_tokens, num_timed)
                for place in places
            ],
            self._budget.left_s,
        )
        fullest = max(found, key=lambda each: each.peak_bytes)
        return Found(
            fullest.peak_bytes,
            max(each.host_peak_bytes for each in found),
            max(each.step_s for each in found),
            fullest.loss,
            fullest.peak_parts,
            max((each.in_flight for each in found if each.in_flight is not None), default=None),
        )


def together(jobs: Iterable[tuple[Any, ...]], left_s: float) -> list[Found]:
    """Run the slots at once, each in a process."""
    context, until_s = multiprocessing.get_context("forkserver"), time.monotonic() + left_s
    started = []
    for job in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, *job), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        return [received(ours, until_s) for _, ours in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def logit_bytes(chunk_tokens: int) -> int:
    """Bytes that the head takes at most for a micro-batch, forward and backward, besides its inputs and their
    gradients."""
    generator = torch.Generator().manual_seed(0)
    tokens, vocab = LOGITS["tokens"], LOGITS["vocab"]
    hidden = torch.randn(tokens, LOGITS["hidden"], generator=generator).requires_grad_()
    weight = torch.randn(vocab, LOGITS["hidden"], generator=generator).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    counter = MemoryCounter()
    with counter.watch():
        head = LogprobHead(torch.arange(tokens), targets, None, chunk_tokens)
        logprobs, _ = head(hidden, weight)
        logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return counter.peak_bytes("device") - hidden.grad.nbytes - weight.grad.nbytes


# -- What is told


def row_of(measured: Measured, knob: Knob) -> dict[str, Any]:
    baseline, found = measured.of(knob.baseline), measured.of(knob.case)
    saved = 1 - found.peak_bytes / baseline.peak_bytes
    is_as_promised = saved >= knob.saves
    note = f"The page: {knob.promise}. Here it saves {saved:.0%} of the peak"
    if not is_as_promised and knob.why_not:
        note += f": {knob.why_not}"
    asked = knob.case.options.get("ac_offloading", {}).get("max_inflight_activations")
    return {
        "knob": knob.name,
        "case": knob.case.name,
        "baseline": knob.baseline.name,
        "peak_bytes": found.peak_bytes,
        "predicted_peak_bytes": measured.predicted(knob.case).device.total,
        "host_peak_bytes": found.host_peak_bytes,
        "step_s": found.step_s,
        "baseline_peak_bytes": baseline.peak_bytes,
        "baseline_step_s": baseline.step_s,
        "saved": saved,
        "is_as_promised": is_as_promised,
        "why_not": knob.why_not,
        **({"asked_in_flight": asked, "most_in_flight": found.in_flight} if asked else {}),
        "note": f"{note}.",
    }


def prediction_of(measured: Measured, case: Case) -> dict[str, Any]:
    found, predicted = measured.of(case), measured.predicted(case)
    return {
        "case": case.name,
        "seq_len": case.seq_len,
        "peak_bytes": found.peak_bytes,
        "host_peak_bytes": found.host_peak_bytes,
        "predicted_peak_bytes": predicted.device.total,
        "predicted_host_bytes": predicted.host.total,
        "ratio": predicted.device.total / found.peak_bytes,
        "predicted_parts": predicted.device.named(),
        "predicted_moment": predicted.moment,
        "peak_parts": found.peak_parts,
    }


def tell(figures: Mapping[str, Any]) -> None:
    print(
        f"\n{'':34}{'peak MiB':>10}{'predicted':>11}{'without':>10}{'saved':>8}{'host':>8}{'step s':>8}{'without':>9}"
    )
    for row in figures["rows"]:
        sizes = (row[f"{name}_bytes"] / MIB for name in ("peak", "predicted_peak", "baseline_peak"))
        print(
            "{:34}{:10.1f}{:11.1f}{:10.1f}".format(row["knob"], *sizes),
            f"{row['saved']:8.0%}{row['host_peak_bytes'] / MIB:8.1f}{row['step_s']:8.2f}{row['baseline_step_s']:9.2f}",
            sep="",
        )
    print(f"\nlogit memory at a vocabulary of {LOGITS['vocab']:,}: {figures['logits_ratio']:.1f} times less in chunks")
    print(f"\n{'':64}{'peak MiB':>10}{'predicted over it':>19}")
    for each in figures["predictions"]:
        print(f"{each['case']:64}{each['peak_bytes'] / MIB:10.1f}{each['ratio']:19.3f}")
    print(f"\n{'':24}{'step s':>8}{'predicted':>11}")
    for each in sorted(figures["fit"]["layouts"], key=lambda each: each["step_s"]):
        name = " · ".join(f"{axis} {size}" for axis, size in each["layout"].items())
        print(f"{name:24}{each['step_s']:8.2f}{each['predicted_step_s']:11.2f}")


def main() -> int:
    parser = arguments(__doc__)
    parts = ("knobs", "predictions", "logits", "fit")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="part", help=f"of: {parts}")
    options = parser.parse_args()
    budget = Budget(options.budget)
    os.environ |= FREED_MEMORY_STAYS  # read when a process starts
    multiprocessing.set_forkserver_preload(["ductile.trainer.train_role", "train"])
    logits_ratio = 0.0
    if "logits" in options.only:
        logits_ratio = logit_bytes(ALL_TOKENS) / logit_bytes(LOGITS["chunk"])
    wanted: dict[str, list[Case]] = {
        "knobs": [case for knob in knobs() for case in (knob.baseline, knob.case)],
        "fit": [*BESIDE.values(), *layouts()],
        "predictions": [*all_cases(), *layouts()],
    }
    with tempfile.TemporaryDirectory() as folder:
        timed = {case.name: number for part, number in NUM_TIMED.items() for case in wanted[part]}
        measured = Measured(Path(folder), budget, timed)
        cases = {case.name: case for part, of_part in wanted.items() if part in options.only for case in of_part}
        for _, name in budget.turns(list(cases)):
            with budget.turn_of(name):
                measured.of(cases[name])
        had = {name: case for name, case in cases.items() if name not in budget.left_out}
        figures: dict[str, Any] = {
            "rows": [row_of(measured, knob) for knob in knobs() if {knob.case.name, knob.baseline.name} <= had.keys()],
            "logits_ratio": logits_ratio,
            "predictions": [prediction_of(measured, case) for case in wanted["predictions"] if case.name in had],
            "fit": fit_of(measured, [case for case in wanted["fit"] if case.name in had]),
        }
    tell(figures)
    bars = missed(figures)
    print(*(f"missed: {each}" for each in bars), sep="\n")
    write(options.json, {**figures, "missed": bars, **budget.told, **provenance("ductile", "torch")})
    return 1 if bars else 0


if __name__ == "__main__":
    raise SystemExit(main())
