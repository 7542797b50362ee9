"""Tokens a second of a training step, against other systems' models under the same FSDP2, and what each axis costs.

A step is forward, backward, clipping and AdamW. A Llama of about 100 M parameters in fp32, samples of one length whose
tokens are all trained but the first, in micro-batches of half of them; one thread a process. Two tables:

    against peers   two processes under FSDP2: ductile's train role as a slot has it, and torchtitan's and transformers'
                    Llama (`peers/train.py`), each with torch's collectives and with those that ductile has for CPUs
    axes            CPU-seconds of a token with two processes along one axis, over those of one process. `plain` is the
                    same model, packing and loss without FSDP, messages or process groups, with torch's own clipping
                    and fused AdamW: the floor. `2 x plain` is two of them at once with half the samples each, which
                    never talk: what two cores cost each other

Contenders take turns, in new processes each time, over `--rounds` or until the budget ends; the first step of a turn
does not count. Wall times are those of the slower process, CPU times of both together; figures are medians of all
steps. All losses, of each step of a turn, must be those of `1 slot`, within 1e-3: who computes something else is left
out. `ratio_vs_best_peer` is against the fastest peer, whichever collectives it has.

    python benchmarks/train.py      (needs `pip install -e .[bench]`)
"""

import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from budget import Budget, CannotGoOn, arguments
from ductile.cluster.node import FREED_MEMORY_STAYS
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
from models import LLAMA, SMALL, make_model
from peers import train as peers
from provenance import provenance, write

OURS, ONE, PLAIN, APART = "ductile", "1 slot", "plain", "2 x plain"
AXES: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "cp 2, ulysses": {"cp": 2, "cp_style": "ulysses"},
    "cp 2, ring": {"cp": 2, "cp_style": "ring"},
}
"""Axes of two processes' layout, by contender. `ductile` has dp_shard 2."""
PEERS = {f"{peer}{', direct' if direct else ''}": (peer, direct) for peer in peers.MODELS for direct in (False, True)}
"""Whose model a contender has, and whether it has ductile's collectives for CPUs."""
SAME_LOSS = 1e-3

Make = Callable[[], peers.Step]
"""Makes a process's training step, in the process."""


@dataclass(frozen=True)
class Timed:
    wall_s: float
    cpu_s: float
    loss: float


def make_samples(num_samples: int, num_tokens: int, vocab_size: int) -> list[Sample]:
    """`num_tokens` tokens are run and trained of each. No two begin alike: nothing is shared."""
    generator = random.Random(0)
    mask = (False,) + (True,) * num_tokens
    return [
        Sample((first, *(generator.randrange(vocab_size) for _ in range(num_tokens))), mask)
        for first in range(num_samples)
    ]


def plain(config: TrainerConfig, micro_batches: Sequence[MicroBatch]) -> peers.Step:
    model = load_model(str(config.model.name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    loss = make_loss(config.loss)
    num_tokens = sum(sample.num_trained for micro_batch in micro_batches for sample in micro_batch.samples)

    def step() -> float:
        total = 0.0
        for micro_batch in micro_batches:
            batch = collate(micro_batch)
            outputs = loss(batch.loss_inputs(*batch.packed.score(model)))
            of_batch = (batch.weights * outputs.loss).sum() / num_tokens
            of_batch.backward()
            total += of_batch.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def ductile(
    config: TrainerConfig, place: RoleAssignment, micro_batches: Sequence[MicroBatch], num_tokens: int
) -> peers.Step:
    role = TrainRole(config.model_dump(), place)

    def step() -> float:
        role.handle(ForwardBackward(tuple(micro_batches)))
        return role.handle(OptimStep(float(num_tokens))).report.loss

    return step


class Contenders:
    """Who takes turns: by name, how each of a contender's processes makes its step."""

    def __init__(self, folder: Path, num_samples: int, num_tokens: int, vocab_size: int, port: int) -> None:
        self._rendezvous = f"127.0.0.1:{port}"
        self._folder = folder
        self._samples = make_samples(num_samples, num_tokens, vocab_size)
        self.num_tokens = num_samples * num_tokens
        self._seq_len = (num_tokens + 1) * num_samples // 2
        """Half of the samples: what each of two data-parallel ranks has at once."""

    def all(self) -> dict[str, list[Make]]:
        """`1 slot` comes first: its losses are what the others' must be."""
        return {
            ONE: self._ours((0,)),
            OURS: self._ours((0, 1)),
            **{name: self._peer(*peer) for name, peer in PEERS.items()},
            PLAIN: [partial(plain, self._config(), self._packed(1)[0])],
            APART: [partial(plain, self._config(), of_rank) for of_rank in self._packed(2)],
            **{name: self._ours((0, 1), **axes) for name, axes in AXES.items()},
        }

    def _ours(self, slots: tuple[int, ...], cp_style: str = "ring", **sizes: int) -> list[Make]:
        layout, config = ParallelLayout.of(slots, **sizes), self._config(cp_style)
        work = self._packed(layout.num_data_parallel)
        return [
            partial(ductile, config, self._place(layout, slot), work[layout.data_parallel_rank(slot)], self.num_tokens)
            for slot in slots
        ]

    def _peer(self, peer: str, direct: bool) -> list[Make]:
        layout = ParallelLayout.of((0, 1))
        samples = [list(micro_batch.samples) for (micro_batch,) in self._packed(2)]
        return [
            partial(peers.step, self._config(), self._place(layout, slot), samples[slot], peer, direct)
            for slot in layout.slots
        ]

    def _config(self, cp_style: str = "ring") -> TrainerConfig:
        """Weights change so fast that a gradient which is wrong shows in the next step's loss."""
        section = {"name": str(self._folder), "seq_len": self._seq_len, "cp_style": cp_style}
        return TrainerConfig.model_validate(
            {"model": section, "loss": {"type": "sft"}, "optim": {"type": "adamw", "lr": 1e-4}}
        )

    def _place(self, layout: ParallelLayout, slot: int) -> RoleAssignment:
        return RoleAssignment(slot, layout, len(layout.slots), "cpu", self._rendezvous)

    def _packed(self, num_ranks: int) -> list[list[MicroBatch]]:
        return pack(self._samples, num_ranks, self._seq_len)


def work(connection: Any, make: Make, num_steps: int) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    step, found = make(), list[Timed]()
    for _ in range(num_steps):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        loss = step()
        found.append(Timed(time.perf_counter() - wall_s, time.process_time() - cpu_s, loss))
    connection.send(found)


def turn(jobs: Sequence[Make], num_steps: int, left_s: float) -> list[Timed]:
    """Run the jobs at once, each in a process: the slowest's wall times, the CPU times of all together, and the first
    one's losses."""
    context, until_s = multiprocessing.get_context("forkserver"), time.monotonic() + left_s
    started = []
    for make in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, make, num_steps), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        found = [received(ours, until_s) for _, ours in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    return [
        Timed(max(each.wall_s for each in step), sum(each.cpu_s for each in step), step[0].loss)
        for step in zip(*found, strict=True)
    ]


def received(connection: Any, until_s: float) -> list[Timed]:
    if not connection.poll(max(0.0, until_s - time.monotonic())):
        raise TimeoutError("its turn had not ended when the time was over")
    try:
        return connection.recv()
    except EOFError:
        raise CannotGoOn("one of its processes has ended; what it printed is above") from None


def figures_of(steps: dict[str, list[Timed]], num_tokens: int) -> dict[str, Any]:
    wall_s = {name: statistics.median(step.wall_s for step in of) for name, of in steps.items()}
    cpu_s = {name: statistics.median(step.cpu_s for step in of) for name, of in steps.items()}
    theirs = [name for name in steps if name in PEERS]
    best = min(theirs, key=lambda name: wall_s[name], default=None)
    compared = {"ratio_vs_best_peer": wall_s[best] / wall_s[OURS], "best_peer": best} if best and OURS in steps else {}
    return {
        **compared,
        "tokens_per_s": {name: num_tokens / wall_s[name] for name in steps},
        "cpu_s_per_token": {name: cpu_s[name] / num_tokens for name in steps},
        "cpu_vs_one_slot": {name: cpu_s[name] / cpu_s[ONE] for name in steps if name not in theirs and ONE in steps},
        "wall_s": {name: [step.wall_s for step in of] for name, of in steps.items()},
        "cpu_s": {name: [step.cpu_s for step in of] for name, of in steps.items()},
    }


def same_losses(name: str, found: Sequence[Timed], expected: Sequence[Timed]) -> None:
    """Raises CannotGoOn where a contender does not compute the same thing."""
    if name == APART:
        return  # two models
    pairs = [(each.loss, other.loss) for each, other in zip(found, expected, strict=True)]
    if not all(abs(loss - other) <= SAME_LOSS for loss, other in pairs):
        raise CannotGoOn(f"{name} and {ONE} have other losses, step by step: {pairs}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="of a turn, besides its first one")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    names = (ONE, OURS, *PEERS, PLAIN, APART, *AXES)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="name", help=f"of: {'; '.join(names)}"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model: whether it works, and not how fast")
    options = parser.parse_args()
    budget = Budget(options.budget)
    shape = LLAMA | (SMALL if options.small else {})
    os.environ |= FREED_MEMORY_STAYS  # read when a process starts
    multiprocessing.set_forkserver_preload(["ductile.trainer.train_role", "peers.train", *peers.MODULES.values()])
    missing = {peer: sentence for peer in peers.MODELS if (sentence := peers.missing(peer))}
    for name in options.only:
        if name in PEERS and (sentence := missing.get(PEERS[name][0])):
            budget.leave_out(name, sentence)
    store = rendezvous.host_store()
    with tempfile.TemporaryDirectory() as work_folder:
        folder = Path(work_folder) / "model"
        num_params = make_model(folder, shape)
        contenders = Contenders(folder, options.samples, options.tokens, shape["vocab_size"], store.port)
        jobs = {name: makes for name, makes in contenders.all().items() if name in {ONE, *options.only}}
        steps: dict[str, list[Timed]] = {}
        expected: list[Timed] = []
        for number, name in budget.turns(list(jobs), options.rounds):
            with budget.turn_of(name):
                found = turn(jobs[name], 1 + options.steps, budget.left_s)
                expected = expected or found
                same_losses(name, found, expected)
                steps.setdefault(name, []).extend(found[1:])
                told = statistics.median(step.wall_s for step in found[1:])
                print(f"round {number}  {name:24} {contenders.num_tokens / told:8.0f} tokens/s", flush=True)
    figures = figures_of(steps, contenders.num_tokens)
    print(f"{'':24}{'tokens/s':>10}{'CPU ms a token':>16}{'over ' + ONE:>14}")
    for name, speed in figures["tokens_per_s"].items():
        over = figures["cpu_vs_one_slot"].get(name)
        print(f"{name:24}{speed:10.0f}{1000 * figures['cpu_s_per_token'][name]:16.2f}{over or '':14.3}")
    if "best_peer" in figures:
        print(f"ductile is {figures['ratio_vs_best_peer']:.2f} times as fast as {figures['best_peer']}")
    settings = {name: vars(options)[name] for name in ("rounds", "steps", "samples", "tokens")}
    where = provenance("ductile", "torch", "torchtitan", "transformers")
    write(options.json, figures | {"num_params": num_params, "settings": settings} | budget.told | where)


if __name__ == "__main__":
    main()
