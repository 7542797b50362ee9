"""Whether a real model learns while its slots change roles and one is killed: SmolLM2-135M-Instruct, by GRPO, on sums.

`ductile rl @ examples/smollm2/rl.toml`, with the scheduler on and a policy (`peers/every_change.py`) that orders one
kind of role change after the other, whether it pays or not. Some steps after the start a generator is killed (SIGKILL).
It ends with 0 only if all of this holds:

    resizes       the trainer went to other slots at least twice
    killed        the generator came back, and generated again
    reward        over 128 held-out prompts, sampled as in training, it is up by at least 0.1 and by more than twice
                  the standard error of the difference of two independent means,
                  sqrt((p (1 - p) + q (1 - q)) / 128): a reward is 0 or 1, and p and q are its means
    log-probs     the sampler's and the trainer's log-probs of a trained token never differ by more than 1e-3. The run
                  is strictly on-policy, so both are of the same weights. The trainer reports the mean over a step's n
                  trained tokens of k3(d) = exp(d) - d - 1, which is d^2 / 2 for a small d: no d is above
                  sqrt(2 n mean)
    greedy        10 of 10 greedy completions of the exported folder by ductile's engine are those of transformers

It prints a table and, last, one line of JSON.

    make real        # installs what it needs, and runs python benchmarks/real.py
"""

import argparse
import json
import math
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ductile.observe import read_jsonl
from provenance import provenance, results_file, write

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm2"
POLICY = ROOT / "benchmarks" / "peers" / "every_change.py"
KILLED_SLOT = 2
"""The policy leaves it a generator: a slot that trains besides would end the run."""
KILLED_AFTER_STEP = 6
NUM_HELD_OUT = 128
NUM_GREEDY = 10
MAX_TOKENS = 16
LEAST_GAIN = 0.1
LEAST_RESIZES = 2
MAX_DIFFERENCE = 1e-3
MAKE_TIMEOUT_S = 1200.0
POLL_S = 0.5

Row = Mapping[str, Any]
Completions = list[list[int]]


class NotEnded(Exception):
    """A reason, in a line, for which the run has not come to its end."""


@dataclass(frozen=True)
class Check:
    what: str
    wanted: str
    found: str
    holds: bool


def model_folder() -> Path:
    """Return the real model, which is made once."""
    script = [sys.executable, str(EXAMPLE / "make_model.py")]
    made = subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True, timeout=MAKE_TIMEOUT_S)
    return Path(made.stdout.splitlines()[-1])


def train(config: Path, model: Path, folder: Path, deadline_s: float, flags: Sequence[str] = ()) -> None:
    """Run the trial in `folder`, and kill a generator after some steps."""
    words = ["@", config, "--model.name", model, "--output-dir", folder, "--cluster.auto-scheduler"]
    words += ["--cluster.policy", f"{POLICY}:EveryChange", *flags]
    until_s = time.monotonic() + deadline_s
    run = subprocess.Popen([sys.executable, "-m", "ductile", "rl", *map(str, words)], cwd=ROOT)
    killed = False
    try:
        while run.poll() is None:
            if time.monotonic() > until_s:
                raise NotEnded(f"the run was still at work after {deadline_s:g} s")
            if not killed and any(row["step"] >= KILLED_AFTER_STEP for row in read_jsonl(folder / "metrics.jsonl")):
                os.kill(pid_of(read_jsonl(folder / "events.jsonl"), KILLED_SLOT), signal.SIGKILL)
                killed = True
            time.sleep(POLL_S)
    finally:
        run.kill()  # then the kernel ends the slots, too
        run.wait()
    if run.returncode:
        raise NotEnded(f"ductile rl ended with {run.returncode}")


def pid_of(events: Sequence[Row], slot: int) -> int:
    """Return the process that the slot has now."""
    return [row["pid"] for row in events if row["kind"] in ("slot_started", "slot_restarted") and row["slot"] == slot][
        -1
    ]


def figures_of(metrics: Sequence[Row], events: Sequence[Row]) -> dict[str, Any]:
    """Return what the run's own recording says."""
    steps = [row for row in metrics if row["step"] > 0]
    before, *_, after = (row["eval_reward"] for row in metrics if row.get("eval_reward") is not None)
    lost = [row["slot"] for row in events if row["kind"] == "slot_lost"]
    return {
        "steps": len(steps),
        "base_rate": before,
        "reward_after": after,
        "gain": after - before,
        "gain_standard_error": standard_error(before, after, NUM_HELD_OUT),
        "resizes": sum(row["kind"] == "resized" for row in events),
        "role_changes": sum(row["kind"] == "switched" and not row["failures"] for row in events),
        "killed": lost,
        "back_after_s": [row["seconds"] for row in events if row["kind"] == "slot_restarted"],
        "at_work_again": [slot for slot in lost if generates_again(events, slot)],
        "logprob_difference_bound": difference_bound(steps),
        "sampled_tokens": sum(row["sampled_tokens"] for row in steps),
    }


def standard_error(before: float, after: float, count: int) -> float:
    """Return the standard error of `after - before`, two means of `count` rewards each that are 0 or 1."""
    return math.sqrt((before * (1 - before) + after * (1 - after)) / count)


def difference_bound(steps: Sequence[Row]) -> float:
    """Return a bound of the difference between sampler's and trainer's log-prob of any token; infinite where tokens
    were sampled with other weights than they were trained with."""
    if any(row["off_policy_max"] > 0 for row in steps):
        return math.inf
    learned = [row for row in steps if "train/mismatch_kl" in row]
    return max(math.sqrt(2 * max(0.0, row["train/mismatch_kl"]) * row["trained_tokens"]) for row in learned)


def generates_again(events: Sequence[Row], slot: int) -> bool:
    """Return whether the slot generated in a step that began after it had come back."""
    back_s = [row["time"] for row in events if row["kind"] == "slot_restarted" and row["slot"] == slot]
    later = [
        row
        for row in events
        if row["kind"] == "profile" and back_s and row["time"] - (row["end_s"] - row["start_s"]) > back_s[0]
    ]
    return any(span[0] == slot and span[3] == "generate" for row in later for span in row["spans"])


def checks_of(figures: Row) -> list[Check]:
    """Return what has to hold for the trial to have passed."""
    gain, error, equal = figures["gain"], figures["gain_standard_error"], figures["greedy_equal"]
    wanted_gain = max(LEAST_GAIN, 2 * error)
    return [
        Check(
            "resizes of the trainer",
            f"at least {LEAST_RESIZES}",
            str(figures["resizes"]),
            figures["resizes"] >= LEAST_RESIZES,
        ),
        Check(
            "generators killed, and back at work",
            "at least 1, and as many",
            f"{len(figures['killed'])}, {len(figures['at_work_again'])}",
            0 < len(figures["killed"]) == len(figures["at_work_again"]),
        ),
        Check("held-out reward, gain", f"more than {wanted_gain:.3f}", f"{gain:+.3f}", gain > wanted_gain),
        Check(
            "log-probs of sampler and trainer, bound of the difference",
            f"at most {MAX_DIFFERENCE:g}",
            f"{figures['logprob_difference_bound']:.1e}",
            figures["logprob_difference_bound"] <= MAX_DIFFERENCE,
        ),
        Check(
            "greedy completions equal to transformers'",
            f"{NUM_GREEDY} of {NUM_GREEDY}",
            f"{equal} of {NUM_GREEDY}",
            equal == NUM_GREEDY,
        ),
    ]


def held_out() -> list[list[dict[str, str]]]:
    """Return the conversations of the first of the task's held-out prompts."""
    task = runpy.run_path(str(EXAMPLE / "sums.py"))["Sums"]()
    first = len(task) - NUM_HELD_OUT
    return [task.messages(example) for example in range(first, first + NUM_GREEDY)]


def greedy_equal(folder: Path, conversations: Sequence[list[dict[str, str]]]) -> int:
    """Return how many conversations ductile's engine and transformers complete alike."""
    from ductile.tasks.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    prompts = [tokenizer.apply_chat_template(conversation) for conversation in conversations]
    ends = frozenset(tokenizer.eos_token_ids)
    both = zip(by_ductile(folder, tokenizer, prompts), by_transformers(folder, prompts, ends), strict=True)
    return sum(without(ours, ends) == without(theirs, ends) for ours, theirs in both)


def by_ductile(folder: Path, tokenizer: Any, prompts: Completions) -> Completions:
    from ductile.config.schema.inference import InferenceConfig, InferenceModelConfig
    from ductile.generator.engine.engine import Engine
    from ductile.model.checkpoint import load_model
    from ductile.records import GenerateRequest, Sampling

    length = max(map(len, prompts)) + MAX_TOKENS
    config = InferenceConfig(model=InferenceModelConfig(max_model_len=length), max_num_seqs=NUM_GREEDY)
    engine = Engine(load_model(folder), config, tokenizer.eos_token_ids, tokenizer.decode)
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS)
        engine.add(GenerateRequest(str(number), tuple(prompt), sampling))
    found: dict[int, list[int]] = {}
    while engine.has_work():
        found |= {int(done.id): list(done.token_ids) for done in engine.step()}
    return [found[number] for number in range(len(prompts))]


def by_transformers(folder: Path, prompts: Completions, ends: frozenset[int]) -> Completions:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    stop = {"eos_token_id": sorted(ends), "pad_token_id": min(ends)}
    found: Completions = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        with torch.inference_mode():
            [tokens] = model.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=MAX_TOKENS, **stop
            )
        found.append(tokens[len(prompt) :].tolist())
    return found


def without(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Return the tokens before the one that ends them."""
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


def table(figures: Row, checks: Sequence[Check]) -> str:
    rows = [
        ("base rate: held-out reward before training", "", f"{figures['base_rate']:.3f}", ""),
        ("held-out reward after it", "", f"{figures['reward_after']:.3f}", ""),
        *((check.what, check.wanted, check.found, "yes" if check.holds else "NO") for check in checks),
        ("steps, role changes", "", f"{figures['steps']}, {figures['role_changes']}", ""),
        ("the generator was back after", "", ", ".join(f"{s:.1f} s" for s in figures["back_after_s"]) or "-", ""),
        ("wall time, CPU time", "", f"{figures['wall_s']:.0f} s, {figures['cpu_s']:.0f} s", ""),
    ]
    head = ("", "wanted", "found", "holds")
    return "\n".join(
        f"{what:54} {wanted:24} {found:14} {holds}".rstrip() for what, wanted, found, holds in (head, *rows)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=results_file("real"), help="default: this machine's file")
    parser.add_argument("--model", type=Path, help="a folder that make_model.py has made; default: it makes one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the run stays; it must not be there yet")
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="for the run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model, folder = args.model or model_folder(), args.keep or Path(work) / "run"
        began_s, used_s = time.monotonic(), children_s()
        try:
            train(EXAMPLE / "rl.toml", model, folder, args.deadline_s)
        except NotEnded as reason:
            raise SystemExit(str(reason)) from None
        spent = {"wall_s": time.monotonic() - began_s, "cpu_s": children_s() - used_s}
        recorded = figures_of(read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "events.jsonl"))
        figures = recorded | {"greedy_equal": greedy_equal(folder / "model", held_out())} | spent
    checks = checks_of(figures)
    print(table(figures, checks))
    failed = [check.what for check in checks if not check.holds]
    figures |= {"failed": failed}
    write(args.json, figures | provenance("ductile", "torch", "transformers"))
    print(json.dumps(figures))
    return 1 if failed else 0


def children_s() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
