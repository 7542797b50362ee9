"""Seconds of one whole GRPO step, ductile against TRL's `GRPOTrainer`, on the same cores.

Both train the same model (Qwen3 shape, 4 layers of 256, fp32) with the same prompts, group size, output length (every
completion is exactly `--tokens` long), learning rate and number of completions a step. A step is everything: generate,
reward, advantage, loss, backward, AdamW, and the new weights back in the generator.

TRL runs as one process with a thread a core, and as a process a core; ductile as a slot a core with one thread
each: roles apart (a train slot and a generate slot, generation at most one version ahead) and roles together
(every slot does both), one version ahead and strictly on-policy, as TRL is. Each side's best set-up counts; all
are in the JSON. Set-ups alternate over `--rounds`, or until the budget ends.

Of the step with the roles together, on-policy, the JSON also says where it goes: seconds by what its slots did, and by
the phase of the loop. `--trace` writes when each slot did what, for https://ui.perfetto.dev.

    python benchmarks/grpo_step.py      (needs `pip install -e .[bench]`)
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

from budget import Budget, CannotGoOn, arguments
from letters import make_tokenizer
from provenance import provenance, write

HERE = Path(__file__).parent
ON_POLICY = "ductile, roles together, on-policy"
Spent = dict[str, list[dict[str, float]]]
"""Seconds by what they went to, of each step: of a slot, and of the loop."""
REWARD = "def reward(row, completion):\n    return float(len(set(completion)) % 7)\n"


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocab = make_tokenizer(folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocab),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=vocab["<eos>"],
            pad_token_id=vocab["<pad>"],
        )
    ).save_pretrained(folder)


def run_trl(args: argparse.Namespace, work: Path, budget: Budget, processes: int, threads: int) -> list[float]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [
        *launcher, str(HERE / "peers" / "trl_grpo.py"),
        "--model", str(work / "model"), "--prompts", str(work / "prompts.json"), "--output", str(work / "trl"),
        f"--steps={args.steps}", f"--warmup={args.warmup}", f"--batch={args.batch}", f"--group={args.group}",
        f"--tokens={args.tokens}", f"--lr={args.lr}", f"--threads={threads}",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    told = budget.run(command, environment)
    return json.loads(next(line for line in told.splitlines() if line.startswith('{"step_s"')))["step_s"]


def run_ductile(
    args: argparse.Namespace, work: Path, budget: Budget, placement: dict[str, str], max_async_level: int
) -> list[float]:
    config = {
        "output_dir": str(work / "ductile"),
        "clean": True,
        "max_steps": args.steps + args.warmup,
        "model": {"name": str(work / "model")},
        "cluster": {"component_placement": placement},
        "trainer": {"model": {"seq_len": 4096}, "optim": {"lr": args.lr}, "loss": {"type": "grpo"}},
        "inference": {"model": {"max_model_len": 256}},
        "orchestrator": {
            "batch_size": args.batch,
            "rollouts_per_example": args.group,
            "max_async_level": max_async_level,
            "drop_zero_advantage": False,
            "sampling": {"max_tokens": args.tokens, "ignore_eos": True},
            "eval": {"enabled": False},
            "task": {"type": "jsonl", "path": str(work / "prompts.jsonl"), "reward": f"{work / 'reward.py'}:reward"},
        },
        "ckpt": {"export_model": False},
    }
    path = work / "rl.toml"
    path.write_text(tomli_w.dumps(config))
    budget.run([sys.executable, "-m", "ductile", "rl", "@", str(path)])
    steps = [row for row in lines(work / "ductile" / "metrics.jsonl") if row["step"] > args.warmup]
    expected = args.batch * args.tokens
    wrong = [row["step"] for row in steps if row["sampled_tokens"] != expected]
    if wrong:
        raise CannotGoOn(f"steps {wrong} did not train on {expected} sampled tokens")
    return [row["step_s"] for row in steps]


def where_it_goes(folder: Path, warmup: int) -> Spent:
    """Of the run in `folder`, step by step: seconds of a slot by activity (an idle one by its cause), and of the loop
    by phase, which overlap."""
    slots: list[dict[str, float]] = []
    for profile in profiles(folder, warmup):
        seconds: dict[str, float] = {}
        for _, start_s, end_s, activity, cause in profile["spans"]:
            what = f"idle: {cause}" if cause else activity
            seconds[what] = seconds.get(what, 0.0) + end_s - start_s
        num_slots = len({slot for slot, *_ in profile["spans"]})
        slots.append({what: spent_s / num_slots for what, spent_s in seconds.items()})
    phases = [
        {name.removeprefix("seconds/"): value for name, value in row.items() if name.startswith("seconds/")}
        for row in lines(folder / "metrics.jsonl")
        if row["step"] > warmup
    ]
    return {"slot": slots, "loop": phases}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """By name; who has no number has spent no time."""
    names = sorted({name for row in rows for name in row})
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def write_trace(folder: Path, warmup: int, path: str) -> None:
    """What each slot did, as Chrome's and Perfetto's viewers read it."""
    events = [
        {"name": cause or activity, "cat": activity, "ph": "X", "pid": 0, "tid": slot, "ts": 1e6 * start_s}
        | {"dur": 1e6 * (end_s - start_s), "args": {"step": profile["step"]}}
        for profile in profiles(folder, warmup)
        for slot, start_s, end_s, activity, cause in profile["spans"]
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}) + "\n")


def profiles(folder: Path, warmup: int) -> list[dict[str, Any]]:
    return [row for row in lines(folder / "events.jsonl") if row["kind"] == "profile" and row["step"] > warmup]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trace", help="a file for when each slot did what, with the roles together, on-policy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-6)
    args = parser.parse_args()
    budget = Budget(args.budget)

    cores = len(os.sched_getaffinity(0))
    together, apart = {"actor,rollout": f"0-{cores - 1}"}, {"actor": "0", "rollout": f"1-{cores - 1}"}
    setups = {
        "trl, a process a core": lambda work: run_trl(args, work, budget, cores, 1),
        "ductile, roles apart, one version ahead": lambda work: run_ductile(args, work, budget, apart, 1),
        ON_POLICY: lambda work: run_ductile(args, work, budget, together, 0),
        "trl, one process, a thread a core": lambda work: run_trl(args, work, budget, 1, cores),
        "ductile, roles together, one version ahead": lambda work: run_ductile(args, work, budget, together, 1),
    }
    seconds: dict[str, list[float]] = {}
    spent: Spent = {"slot": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "model")
        prompts = [f"{a} + {b} =" for a in range(10, 42) for b in range(10, 18)]
        (work / "prompts.json").write_text(json.dumps(prompts))
        (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        (work / "reward.py").write_text(REWARD)
        for number, name in budget.turns(list(setups), args.rounds):
            with budget.turn_of(name):
                steps = setups[name](work)
                seconds.setdefault(name, []).extend(steps)
                if name == ON_POLICY:
                    for whose, found in where_it_goes(work / "ductile", args.warmup).items():
                        spent[whose] += found
                    if args.trace:
                        write_trace(work / "ductile", args.warmup, args.trace)
                print(f"round {number}  {name:45s} {statistics.median(steps):.3f} s a step", flush=True)
    result = {
        **compared(seconds),
        "on_policy_step": {whose: medians(found) for whose, found in spent.items()},
        "settings": {key: value for key, value in vars(args).items() if key not in ("json", "trace")},
        **budget.told,
        **provenance("ductile", "torch", "trl"),
    }
    for name in ("ratio_vs_trl", "ratio_vs_trl_on_policy"):
        if name in result:
            print(f"{name.replace('_', ' ')}: {result[name]:.2f}")
    for whose, parts in result["on_policy_step"].items():
        told = ", ".join(f"{what} {part_s:.3f}" for what, part_s in sorted(parts.items(), key=lambda part: -part[1]))
        print(f"seconds of a {whose} in a step, on-policy: {told}")
    write(args.json, result)


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The best of each side, where it has been measured."""
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    best: dict[str, float] = {}
    for side in ("trl", "ductile"):
        if found := [value for name, value in median_s.items() if name.startswith(side)]:
            best[f"{side}_s"] = min(found)
    ratios: dict[str, float] = {}
    if len(best) == 2:
        ratios["ratio_vs_trl"] = best["trl_s"] / best["ductile_s"]
    if "trl_s" in best and ON_POLICY in median_s:
        ratios["ratio_vs_trl_on_policy"] = best["trl_s"] / median_s[ON_POLICY]
    return {**ratios, **best, "median_step_s": median_s}


if __name__ == "__main__":
    main()
