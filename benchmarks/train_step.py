"""What the trainer adds to the arithmetic: one forward, backward and optimizer step, plain and on 1 and 2 ranks.

`plain` is the same model, packing and loss without FSDP, messages or process groups, with torch's own clipping and
fused AdamW: the floor. `2 x plain` is two of them at once with half the samples each, which never talk. Model of Qwen3
shape, 4 layers of 256, fp32, 32 samples of 60 to 100 tokens, one thread a rank. Medians of the rounds; CPU time beside
wall time, since other load on the machine changes the latter most.

    python benchmarks/train_step.py --json benchmarks/results/train_step.json
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric import rendezvous
from ductile.messages.workers import ForwardBackward, OptimStep
from ductile.model.checkpoint import load_model
from ductile.records import MicroBatch, Sample
from ductile.roles import RoleAssignment
from ductile.trainer.collate import collate
from ductile.trainer.loss import make_loss
from ductile.trainer.train_role import TrainRole
from provenance import provenance, write

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
Times = dict[str, list[float]]


def make_samples(num_samples: int) -> list[Sample]:
    generator = random.Random(0)
    samples = []
    for index in range(num_samples):
        n = 60 + index * 7 % 41
        tokens = tuple(generator.randrange(MODEL["vocab_size"]) for _ in range(n))
        mask = (False,) * (n // 4) + (True,) * (n - n // 4)
        samples.append(Sample(tokens, mask, rollout_logprobs=(-6.0,) * n, advantages=(generator.uniform(-1, 1),) * n))
    return samples


def measure(rounds: int, forward_backward: Callable[[], Any], optim_step: Callable[[], Any]) -> Times:
    times: Times = {"forward_backward": [], "optim_step": [], "forward_backward_cpu": [], "optim_step_cpu": []}
    for number in range(rounds + 2):
        for name, work in (("forward_backward", forward_backward), ("optim_step", optim_step)):
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            if number >= 2:  # two rounds to warm up
                times[name].append(time.perf_counter() - wall)
                times[f"{name}_cpu"].append(time.process_time() - cpu)
    return times


def plain(config: TrainerConfig, rounds: int, samples: list[Sample]) -> Times:
    model = load_model(str(config.model.name), random_init=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    loss = make_loss(config.loss)
    ((micro_batch,),) = pack(samples, 1, config.model.seq_len)

    def forward_backward() -> None:
        batch = collate(micro_batch)
        outputs = loss(batch.loss_inputs(*batch.packed.score(model)))
        (batch.weights * outputs.loss).sum().backward()

    def optim_step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return measure(rounds, forward_backward, optim_step)


def ductile(config: TrainerConfig, rounds: int, place: RoleAssignment, work: list[MicroBatch]) -> Times:
    role = TrainRole(config.model_dump(), place)
    times = measure(
        rounds,
        lambda: role.handle(ForwardBackward(tuple(work))),
        lambda: role.handle(OptimStep(1000.0)),
    )
    role.close()
    return times


def run(connection: Any, function: Callable[..., Times], arguments: tuple[Any, ...]) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    connection.send(function(*arguments))


def in_processes(jobs: list[tuple[Callable[..., Times], tuple[Any, ...]]]) -> Times:
    """Run the jobs at once; the slowest's wall times, and the CPU times of all together."""
    context = multiprocessing.get_context("forkserver")
    started = []
    for function, arguments in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, function, arguments), daemon=True)
        process.start()
        started.append((process, ours))
    results = []
    for process, connection in started:
        if not connection.poll(600.0):
            raise TimeoutError("a process did not finish within 600 s")
        results.append(connection.recv())
        process.join(10.0)
    combined: Times = {}
    for name in results[0]:
        combine = sum if name.endswith("_cpu") else max
        combined[name] = [combine(of_ranks) for of_ranks in zip(*(times[name] for times in results), strict=True)]
    return combined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=32)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch", "ductile.trainer.train_role"])
    samples = make_samples(options.samples)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = {"name": folder, "seq_len": 4096, "debug": {"random_init": True}}
        config = TrainerConfig.model_validate({"model": model})
        variants: dict[str, list[tuple[Callable[..., Times], tuple[Any, ...]]]] = {
            "plain": [(plain, (config, options.rounds, samples))],
            "2 x plain": [(plain, (config, options.rounds, samples[half::2])) for half in (0, 1)],
        }
        store = rendezvous.host_store()
        for members in ((0,), (0, 1)):
            ranks = pack(samples, len(members), config.model.seq_len)
            places = [
                RoleAssignment(slot, ParallelLayout.of(members), len(members), "cpu", f"127.0.0.1:{store.port}")
                for slot in members
            ]
            variants[f"{len(members)} rank(s)"] = [
                (ductile, (config, options.rounds, place, ranks[place.slot])) for place in places
            ]
        for name, jobs in variants.items():
            figures[name] = {what: 1000 * statistics.median(of) for what, of in in_processes(jobs).items()}
    print(f"{sum(map(len, samples))} tokens; milliseconds, CPU of all ranks together")
    print(f"{'':10}{'forward_backward':>18}{'cpu':>8}{'optim_step':>12}{'cpu':>8}")
    for name, of in figures.items():
        row = (of["forward_backward"], of["forward_backward_cpu"], of["optim_step"], of["optim_step_cpu"])
        print(f"{name:10}{row[0]:18.0f}{row[1]:8.0f}{row[2]:12.1f}{row[3]:8.1f}")
    write(options.json, {"milliseconds": figures} | provenance("torch"))


if __name__ == "__main__":
    main()
