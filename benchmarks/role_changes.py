"""How long a role change makes slots wait that keep their roles, beside a micro-step, in a real run.

`ductile rl` with a model of about 100 M parameters on four slots, and a policy (`peers/every_change.py`) that orders
each kind of change in turn while all slots are at work. From the run's recording, for each change:

    seconds                  from the decision until all is done
    longest_other_pause_s    the longest time at a stretch in which a slot that keeps its roles could not do its work:
                               any slot       commands of the change (offer weights, hand rollouts over, prepare a
                                              resize)
                               train slots    the trainer's pause in a resize; what another slot that trains on does for
                                              the change, as they work in step; and publishing, while a change is under
                                              way
                               generators     having nothing to do while new weights wait for slots that are to
                                              generate as well
    waits_for                which of these it was
    parts                    where its seconds go: slots prepare a resize; the micro-step that runs ends; the trainer
                               stands still; a generator begins, engine and weights; rollouts leave, and generators end

A change of migrations alone counts with all its seconds, as the recording does not tell a receiver's part from its
other work. `micro_step_s` is what a slot works on a micro-batch: the median of the steps. Nearly all completions are
equally long, and a micro-batch has two of them. Of a run that the budget ends, what it had changed by then counts.

    python benchmarks/role_changes.py
    python benchmarks/role_changes.py --model ~/.cache/ductile/smollm2-135m-instruct
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w

from budget import Budget, arguments
from ductile.config.checks.on_disk import read_spec
from ductile.core.scheduling.facts.ledger import Span
from ductile.core.scheduling.facts.profile import StepProfile
from letters import make_tokenizer
from models import make_model
from peers.every_change import SETTLING
from provenance import provenance, write

HANDOFFS = "rollouts handed off"
WAYS = ("generate → train", "train → generate", "train → train+generate", "train+generate → train")
KINDS = (*WAYS, HANDOFFS, *(f"{way}, {SETTLING}" for way in WAYS))
AFTERWARDS_S = 1.0
"""A weight offer ends after the change."""
AT_ONCE_S = 0.01
"""Stretches with a shorter gap between them are one."""
PROMPT_TOKENS = len("question 000:")
REWARD = "import zlib\n\n\ndef reward(row, completion):\n    return float(zlib.crc32(completion.encode()) % 2)\n"


Stretch = tuple[float, float]
"""From when to when."""
Part = Literal["prepare", "wait", "pause", "begin", "leave"]
PARTS: Sequence[Part] = get_args(Part)


@dataclass(frozen=True)
class Row:
    kind: str
    slots: list[int]
    seconds: float
    longest_other_pause_s: float
    waits_for: str
    parts: dict[Part, float]


def prepare(folder: Path, model: Path | None) -> int:
    """Writes `model/`, `prompts.jsonl` and `reward.py`; returns the number of parameters. model: the user's own folder,
    which `model/` is then a link to."""
    if model is None:
        num_params = make_model(folder / "model")
        make_tokenizer(folder / "model", num_tokens=32_000)
    elif (spec := read_spec(model)) is None:
        raise SystemExit(f"--model: {model} has no config.json that can be read")
    else:
        num_params = spec.num_parameters
        (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
    prompts = [json.dumps({"prompt": f"question {number:03d}:"}) for number in range(200)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return num_params


def run(work: Path, args: argparse.Namespace, budget: Budget) -> Path:
    """Returns the run's folder."""
    policy = Path(__file__).parent / "peers" / "every_change.py"
    config = {
        "output_dir": str(work / "run"),
        "max_steps": args.steps,
        "model": {"name": str(work / "model")},
        "cluster": {
            "device": "cpu",
            "component_placement": {"actor": "0-1", "rollout": "2-3"},
            "auto_scheduler": True,
            "policy": f"{policy}:EveryChange",
        },
        "trainer": {
            "model": {"seq_len": 2 * (args.max_tokens + PROMPT_TOKENS)},
            "loss": {"type": "grpo"},
            "optim": {"lr": 1e-6},
        },
        "inference": {"max_num_seqs": args.max_num_seqs, "model": {"max_model_len": args.max_tokens + 32}},
        "orchestrator": {
            "batch_size": args.batch,
            "rollouts_per_example": args.group,
            "max_async_level": 1,
            "drop_zero_advantage": False,
            "sampling": {"max_tokens": args.max_tokens, "seed": 1},
            "eval": {"enabled": False},
            "task": {"type": "jsonl", "path": str(work / "prompts.jsonl"), "reward": f"{work / 'reward.py'}:reward"},
        },
        "ckpt": {"export_model": False},
    }
    (work / "rl.toml").write_text(tomli_w.dumps(config))
    with budget.turn_of("the rest of the run"):
        budget.run([sys.executable, "-m", "ductile", "rl", "@", str(work / "rl.toml")])
    return work / "run"


@dataclass(frozen=True)
class Circle:
    """What the whole run did as its steps ended."""

    published: list[Stretch]
    waited: list[Stretch]
    """New weights, for slots that were about to generate."""


def rows_of(events: Sequence[dict[str, Any]], profiles: Sequence[StepProfile], circle: Circle) -> list[Row]:
    """One for each change that was carried out whole."""
    spans = [span for profile in profiles for span in profile.spans]
    begins_s = [event["at_s"] for event in events if event["kind"] == "decided"]
    train = next(event for event in events if event["kind"] == "setting")["home"]["train"]
    rows: list[Row] = []
    decided: dict[str, Any] = {}
    resized: dict[str, Any] = {}
    for event in events:
        if event["kind"] == "decided":
            decided, resized = event, {}
        elif event["kind"] == "resized":
            resized = event
        elif event["kind"] == "switched" and event["failures"]:
            raise SystemExit(event["sentence"])
        elif event["kind"] == "switched":
            after = resized.get("after", train)
            staying = set(train).intersection(after)
            next_s = min((at_s for at_s in begins_s if at_s > event["at_s"]), default=float("inf"))
            rows.append(row_of(decided["sentence"], event, next_s, resized, staying, spans, circle))
            train = after
    return rows


def row_of(
    sentence: str,
    switched: dict[str, Any],
    next_s: float,
    resized: dict[str, Any],
    staying: set[int],
    spans: Sequence[Span],
    circle: Circle,
) -> Row:
    """next_s: when the next change begins. resized: of the trainer's resize in this change; empty where there was none.
    staying: slots that train before and after it."""
    way = re.search(r"(\S+ → [^\s:;,]+)", sentence)
    kind = (way.group(1) if way else HANDOFFS) + (f", {SETTLING}" if SETTLING in sentence else "")
    begin_s, seconds, changing = switched["at_s"], switched["seconds"], set(switched["slots"])
    end_s = begin_s + seconds
    pauses = {"the trainer's resize": resized["pause_s"]} if resized and staying - changing else {}
    for slot in {span.slot for span in spans}:
        asked = stretches(spans, slot, begin_s, end_s, min(next_s, end_s + AFTERWARDS_S))
        if slot in staying:
            asked += within([(begin_s, end_s)], circle.published)
        else:
            idle = [(span.start_s, span.end_s) for span in spans if (span.slot, span.activity) == (slot, "idle")]
            asked += within(within([(begin_s, end_s)], circle.waited), idle)
        if slot not in changing:
            pauses[f"slot {slot}"] = longest(asked)
        elif slot in staying and staying - changing:
            if switched["ended"]:  # between two micro-steps, which are held until the last of it is done
                asked.append((min((first_s for first_s, _ in asked), default=end_s), end_s))
            pauses[f"slot {slot}, which trains in step with others"] = longest(asked)
    if kind == HANDOFFS:
        pauses["all of it"] = seconds
    why = max(pauses, key=lambda name: pauses[name])
    first_s = min(
        (span.start_s for span in spans if span.activity == "switch" and begin_s <= span.start_s), default=end_s
    )
    return Row(kind, sorted(changing), seconds, pauses[why], why, parts_of(switched, resized, first_s - begin_s))


def parts_of(switched: dict[str, Any], resized: dict[str, Any], wait_s: float) -> dict[Part, float]:
    """wait_s: from the decision until the first slot did something for it."""
    if not resized and switched["began"]:
        return {"begin": switched["seconds"]}
    if not resized:
        return {"wait": wait_s, "leave": switched["seconds"] - wait_s}
    prepare_s = resized["seconds"]["assign"] + resized["seconds"]["prepare"]
    of_resize: dict[Part, float] = {
        "prepare": prepare_s,
        "wait": resized["took_s"] - prepare_s - resized["pause_s"],
        "pause": resized["pause_s"],
    }
    return of_resize | {"begin" if switched["began"] else "leave": switched["seconds"] - resized["took_s"]}


def stretches(spans: Iterable[Span], slot: int, begin_s: float, end_s: float, taken_back_s: float) -> list[Stretch]:
    """When the slot did what a change asked of it."""
    last_s = {"switch": taken_back_s, "publish": end_s}
    asked = [span for span in spans if span.slot == slot and span.activity in last_s]
    all_of_them = [(max(span.start_s, begin_s), min(span.end_s, last_s[span.activity])) for span in asked]
    return [(first_s, until_s) for first_s, until_s in all_of_them if first_s < until_s]


def within(some: Sequence[Stretch], others: Sequence[Stretch]) -> list[Stretch]:
    """Where a stretch of the one kind and one of the other overlap."""
    both = [(max(one[0], other[0]), min(one[1], other[1])) for one in some for other in others]
    return [(first_s, last_s) for first_s, last_s in both if first_s < last_s]


def longest(stretches: Iterable[Stretch]) -> float:
    """Of what they cover together."""
    covered_s, longest_s, since_s = float("-inf"), 0.0, 0.0
    for start_s, end_s in sorted(stretch for stretch in stretches if stretch[1] > stretch[0]):
        if start_s > covered_s + AT_ONCE_S:
            since_s = start_s
        covered_s = max(covered_s, end_s)
        longest_s = max(longest_s, covered_s - since_s)
    return longest_s


def circle_of(metrics: Sequence[dict[str, float]], profiles: Sequence[StepProfile]) -> Circle:
    """A step's last phase is to publish. While the next one trains, the weights wait and go live."""
    rows = {row["step"]: row for row in metrics}
    published = [(profile.end_s - rows[profile.step]["seconds/publish"], profile.end_s) for profile in profiles]
    waited = [
        (profile.end_s, profile.end_s + rows[profile.step + 1]["seconds/join"])
        for profile in profiles
        if profile.step + 1 in rows
    ]
    return Circle(published, waited)


def micro_step_of(
    metrics: Sequence[dict[str, float]], profiles: Sequence[StepProfile], num_micro_batches: int
) -> float:
    """All slots' time in the steps' training, without the optimizer, shared among micro-batches."""
    optim_s = {row["step"]: row["seconds/optim_step"] for row in metrics if row["step"]}
    of_steps: list[float] = []
    for profile in profiles:
        trained_s = {
            slot: sum(span.seconds for span in profile.spans if (span.slot, span.activity) == (slot, "train"))
            for slot in {span.slot for span in profile.spans}
        }
        of_steps.append(sum(max(0.0, s - optim_s[profile.step]) for s in trained_s.values()) / num_micro_batches)
    return statistics.median(of_steps)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, in place of 100 M random parameters")
    parser.add_argument("--keep", type=Path, help="where the run's events.jsonl is copied to")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    args = parser.parse_args()
    budget = Budget(args.budget)
    with tempfile.TemporaryDirectory() as folder:
        num_params = prepare(Path(folder), args.model)
        recording = (run(Path(folder), args, budget) / "events.jsonl").read_text()
        metrics = (Path(folder) / "run" / "metrics.jsonl").read_text()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / "events.jsonl").write_text(recording)
        (args.keep / "metrics.jsonl").write_text(metrics)
    events, steps = ([json.loads(line) for line in text.split("\n")[:-1]] for text in (recording, metrics))
    steps = [row for row in steps if "seconds/publish" in row]  # who is ended does not publish its last one
    ended = {row["step"] for row in steps}
    profiles = [StepProfile.from_fields(each) for each in events if each["kind"] == "profile" and each["step"] in ended]
    rows = rows_of(events, profiles, circle_of(steps, profiles))
    for kind in sorted(set(KINDS).difference(row.kind for row in rows)):
        budget.leave_out(kind, "the run had no such change; more --steps have room for it")
    if not rows or not profiles:
        raise SystemExit("The run has no change and no step to measure.")
    tokens = 2 * (args.max_tokens + PROMPT_TOKENS)
    micro_step_s = micro_step_of(steps, profiles, args.batch // 2)
    worst_s = max(row.longest_other_pause_s for row in rows)
    heads = " ".join(f"{part:>8}" for part in PARTS)
    print(f"{'kind':42} {'slots':8} {'seconds':>8} {heads} {'longest pause of others':>24}")
    for row in sorted(rows, key=lambda row: KINDS.index(row.kind)):
        slots = ",".join(map(str, row.slots)) or "-"
        parts = " ".join(f"{row.parts.get(part, 0.0):8.2f}" for part in PARTS)
        print(f"{row.kind:42} {slots:8} {row.seconds:8.2f} {parts} {row.longest_other_pause_s:24.3f}   {row.waits_for}")
    seconds = [row.seconds for row in rows]
    shares = {part: sum(row.parts.get(part, 0.0) for row in rows) / sum(seconds) for part in PARTS}
    print(f"{'share':60} {' '.join(f'{share:8.1%}' for share in shares.values())}")
    print(f"From decision to effect: mean {statistics.mean(seconds):.2f} s, longest {max(seconds):.2f} s")
    print(
        f"{num_params / 1e6:.1f} M parameters: a micro-step of {tokens} tokens takes {micro_step_s:.2f} s, the "
        f"longest pause {worst_s:.2f} s: {worst_s / micro_step_s:.2f} of it"
    )
    figures: dict[str, Any] = {
        "rows": [asdict(row) for row in rows],
        "shares": shares,
        "mean_s": statistics.mean(seconds),
        "longest_s": max(seconds),
        "micro_step_s": micro_step_s,
        "micro_step_tokens": tokens,
        "worst_pause_s": worst_s,
        "worst_pause_by_micro_step": worst_s / micro_step_s,
        "num_params": num_params,
    }
    write(args.json, figures | budget.told | provenance("ductile", "torch"))


if __name__ == "__main__":
    main()
