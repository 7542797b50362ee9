"""Tokens per second of ductile's engine against `transformers.generate`, with output lengths as uneven as RL's.

Both run the same model (Qwen3 shape, 4 layers of 256, fp32), the same prompts and the same output lengths on the same
threads, greedily, in one process and alternating; the figure is the median of the rounds. The first one warms up.

`transformers` gets static batches, left-padded, sdpa attention, dynamic cache: in order of arrival, in each of the
batch sizes of `--batches`; a batch runs until its longest completion is done. The ratio is against the size that does
best. `sorted` shows what it would do if it knew all output lengths beforehand and sorted by them, which RL cannot.

    python benchmarks/generate.py
"""

import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from budget import Budget, arguments
from ductile.config.schema.inference import InferenceConfig, InferenceModelConfig
from ductile.generator.engine.engine import Engine
from ductile.model.checkpoint import load_model
from ductile.records import GenerateRequest, Sampling
from provenance import provenance, write

PAD = 0
Completions = list[list[int]]


def make_model(folder: Path) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        # Logits far apart: the last bit of a sum must not decide which token is the largest.
        initializer_range=0.1,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.save_pretrained(folder)
    return model.eval()


def make_requests(num: int, median: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 16 to 64 tokens; log-normal output lengths, cut off at `longest`."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 4096) for _ in range(rng.randint(16, 64))] for _ in range(num)]
    lengths = [min(longest, max(4, round(rng.lognormvariate(math.log(median), 1.0)))) for _ in range(num)]
    return prompts, lengths


@torch.inference_mode()
def run_transformers(
    model: Any, prompts: list[list[int]], lengths: list[int], batch: int, order: list[int]
) -> Completions:
    completions: Completions = [[] for _ in prompts]
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        width = max(len(prompts[i]) for i in members)
        padding = [width - len(prompts[i]) for i in members]
        ids = torch.tensor([[PAD] * n + prompts[i] for i, n in zip(members, padding, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
        longest = max(lengths[i] for i in members)
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            min_new_tokens=longest,
            max_new_tokens=longest,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        for i, row in zip(members, out[:, width:].tolist(), strict=True):
            completions[i] = row[: lengths[i]]
    return completions


def run_ductile(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> Completions:
    completions: Completions = [[] for _ in prompts]
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sampling = Sampling(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add(GenerateRequest(str(i), tuple(prompt), sampling))
    while engine.has_work():
        for generation in engine.step():
            completions[int(generation.id)] = list(generation.token_ids)
    return completions


@dataclass(frozen=True)
class Timings:
    """Of every counted round of each contestant. CPU seconds tell how far other processes disturbed the wall clock."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    completions: dict[str, Completions]


def measure(contestants: dict[str, Callable[[], Completions]], rounds: int, budget: Budget) -> Timings:
    """One round more than asked, as the first warms up: it counts only for whom the budget leaves no other."""
    timings = Timings({name: [] for name in contestants}, {name: [] for name in contestants}, {})
    for number, name in budget.turns(list(contestants), rounds + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        timings.completions[name] = contestants[name]()
        timings.wall_s[name].append(time.perf_counter() - wall)
        timings.cpu_s[name].append(time.process_time() - cpu)
        print(f"round {number}  {name:34} {timings.wall_s[name][-1]:.2f} s", flush=True)
    for of in (timings.wall_s, timings.cpu_s):
        of |= {name: values[1:] or values for name, values in of.items()}
    return timings


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--median", type=int, default=32, help="of the output lengths, tokens")
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    budget = Budget(args.budget)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    prompts, lengths = make_requests(args.requests, args.median, args.longest)
    arrival = list(range(args.requests))
    by_length = sorted(arrival, key=lengths.__getitem__)
    with tempfile.TemporaryDirectory() as folder:
        peer = make_model(Path(folder))
        config = InferenceConfig(model=InferenceModelConfig(max_model_len=512), max_num_seqs=max(args.batches))
        engine = Engine(load_model(folder), config, eos_token_ids=(), decode=lambda tokens, skip_special_tokens: "")

    def peer_run(batch: int, order: list[int]) -> Callable[[], Completions]:
        return lambda: run_transformers(peer, prompts, lengths, batch, order)

    contestants = {"ductile": lambda: run_ductile(engine, prompts, lengths)}
    contestants |= {f"transformers, batch {b}": peer_run(b, arrival) for b in args.batches}
    contestants |= {f"transformers, batch {b}, sorted": peer_run(b, by_length) for b in args.batches[:-1]}
    timings = measure(contestants, args.rounds, budget)

    num_tokens = sum(lengths)
    speed = {name: num_tokens / statistics.median(values) for name, values in timings.wall_s.items() if values}
    cpu_s = {name: statistics.median(values) for name, values in timings.cpu_s.items() if values}
    peers = [name for name in speed if name.startswith("transformers")]
    in_order = [name for name in peers if "sorted" not in name]
    compared: dict[str, Any] = {}
    if in_order:
        compared = {
            "ratio_vs_transformers": speed["ductile"] / max(speed[name] for name in in_order),
            "ratio_vs_transformers_sorted": speed["ductile"] / max(speed[name] for name in peers),
            "ratio_of_cpu_time": min(cpu_s[name] for name in in_order) / cpu_s["ductile"],
        }
    figures = {
        **compared,
        "tokens_identical": all(
            completion == timings.completions["ductile"] for completion in timings.completions.values()
        ),
        "tokens_per_s": {name: round(value, 1) for name, value in speed.items()},
        "wall_s": {name: [round(value, 3) for value in values] for name, values in timings.wall_s.items()},
        "cpu_s": {name: [round(value, 3) for value in values] for name, values in timings.cpu_s.items()},
        "load_average": os.getloadavg(),
        "tokens_a_round": num_tokens,
        "output_lengths": {
            "median": statistics.median(lengths),
            "mean": num_tokens / len(lengths),
            "max": max(lengths),
        },
        "threads": args.threads,
        **budget.told,
    } | provenance("ductile", "torch", "transformers")
    print(f"{len(prompts)} requests, {num_tokens} tokens, lengths {figures['output_lengths']}")
    for name, value in speed.items():
        print(f"{name:34} {value:9.0f} tokens/s   {speed['ductile'] / value:5.2f}x")
    told = ", ".join(f"{name.replace('_', ' ')} {ratio:.2f}" for name, ratio in compared.items())
    print(f"{told}; tokens identical: {figures['tokens_identical']}; load average {os.getloadavg()[0]:.1f}")
    write(args.json, figures)


if __name__ == "__main__":
    main()
