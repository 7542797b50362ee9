"""What README and docs quote of `results/`: a table a benchmark, which `figures.py` puts into the pages.

Nothing is measured here. A figure that no file in `results/` has is told nowhere.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from measured import NOTHING_YET, Cell, Row, markdown, num_machines, results, table, together

ARMS = {
    "static": "the best split",
    "collocated": "collocated: all generate, then all train",
    "rules": "`rules`",
    "rules_policies": "`rules` with both options",
    "model": "`model`",
    "model_no_offload": "`model` without offload",
    "seed": "[dynamic.yaml](../examples/scheduling/dynamic.yaml)",
}
"""Of the scheduling benchmark, as the pages call them."""
MIB = 2**20


# -- README


def of_elastic(found: Any) -> Sequence[Cell]:
    """The share of the others' time that `model` takes, round by round."""
    return [times(found, "model", other) for other in ("static", "collocated", "rules", "rules_policies")]


def of_reshard(found: Any) -> Sequence[Cell]:
    moving = [row for row in found["pairs"] if row["wire_bytes"]]
    return [[row[f"{call}ratio_vs_best_peer"] for row in moving] for call in ("", "first_call_")]


README: Sequence[tuple[str, str, str, str, Callable[[Any], Sequence[Cell]]]] = (
    (
        "generate",
        "tokens/s, 64 requests of uneven length, one thread",
        "`transformers.generate`, best batch size",
        "{} times as many; {} times as many as in batches sorted by lengths that one cannot know",
        lambda found: (found["ratio_vs_transformers"], found["ratio_vs_transformers_sorted"]),
    ),
    (
        "grpo_step",
        "seconds of a whole GRPO step, 32 completions of 64 tokens, 2 cores",
        "TRL `GRPOTrainer`, best of two set-ups",
        "{} times as fast in the best of three set-ups; strictly on-policy with the roles together {} times",
        lambda found: (found["ratio_vs_trl"], found["ratio_vs_trl_on_policy"]),
    ),
    (
        "train",
        "tokens/s of a training step of 100 M parameters, FSDP2 on two slots",
        "torchtitan's and transformers' Llama under the same FSDP2",
        "{} times as many as the faster of them ([how](docs/trainer.md#measured))",
        lambda found: (found["ratio_vs_best_peer"],),
    ),
    (
        "elastic",
        "strictly on-policy GRPO steps with long-tailed completions, six slots of a quarter of a core",
        "the best of three fixed splits; collocated; `rules`; `rules` with both options",
        '`policy = "model"` takes {} times the time of the best split, {} of collocated, {} of `rules` and {} of '
        "`rules` with both options ([how](docs/scheduling.md#what-is-measured))",
        of_elastic,
    ),
    (
        "reshard",
        "another tensor-parallel layout of a 790 MiB model, live, 4 processes",
        "DCP, DTensor and megatron-core, the best of them",
        "where bytes move, a `ductile.Resharder` is {} times as fast from its second call on, {} times in its first "
        "one; it compares fingerprints of all that moves, which they do not ([how](docs/transfer.md#what-is-measured))",
        of_reshard,
    ),
    (
        "resize",
        "a trainer of 100 M parameters goes to other slots",
        "checkpoint and restart of the workers",
        "{} times as fast where the checkpoint stays in memory, {} times from disk; median pause {} s "
        "([how](docs/resize.md#measured))",
        lambda found: (found["ratio_vs_restart_in_memory"], found["ratio_vs_restart"], found["median_pause_s"]),
    ),
    (
        "plan",
        "reshard plans for a 32B model on 128 to 1,024 slots",
        "",
        "{} ms ([which](docs/layout.md#what-is-measured))",
        lambda found: ([row["cold_ms"] for row in found["speed"]],),
    ),
)
"""Benchmark, what it measures, against whom, the result, and the figures that stand in it."""


def readme() -> str:
    rows: list[tuple[str, ...]] = []
    for name, what, against, text, figures_of in README:
        found: list[Sequence[Cell]] = []
        for of_machine in results(name):
            with suppress(KeyError):  # it ran out of time before it could compare
                found.append(figures_of(of_machine))
        if found:
            result = text.format(*(together(cells) or "(not measured)" for cells in zip(*found, strict=True)))
            rows.append((f"`benchmarks/{name}.py`: {what}", against, result, num_machines(len(found))))
    return markdown(("benchmark", "against", "result", "on"), rows)


# -- docs


def generate(found: Any) -> Iterator[Row]:
    cpu_s = {name: statistics.median(rounds) for name, rounds in found["cpu_s"].items() if rounds}
    speed = found["tokens_per_s"]
    for name in speed:
        faster, cheaper = speed["ductile"] / speed[name], cpu_s[name] / cpu_s["ductile"]
        yield name, speed[name], *((faster, cheaper) if name != "ductile" else ("", ""))


def grpo_step(found: Any) -> Iterator[Row]:
    slot, loop = found["on_policy_step"]["slot"], found["on_policy_step"]["loop"]
    yield "generate", 1000 * slot["generate"], "prompts, then token after token of half the completions"
    yield "train", 1000 * slot["train"], "forward and backward pass of half the completions, optimizer"
    yield "- optimizer", 1000 * loop["optim_step"], ""
    yield (
        "publish",
        1000 * slot["publish"],
        "parts of all slots copied into a segment; mapped, checked, copied into the engines",
    )
    idle_s = sum(part_s for what, part_s in slot.items() if what.startswith("idle"))
    yield "nothing", 1000 * idle_s, "rewards, messages, the orchestrator's books"
    yield "all of it", 1000 * found["median_step_s"]["ductile, roles together, on-policy"], ""
    yield "the same with TRL", 1000 * found["trl_s"], "the better of its two set-ups"


def train(found: Any) -> Iterator[Row]:
    for name, speed in found["tokens_per_s"].items():
        yield name, speed, 1000 * found["cpu_s_per_token"][name], found["cpu_vs_one_slot"].get(name)


def resize(found: Any) -> Iterator[Row]:
    changes: dict[str, dict[bool, list[Any]]] = {}
    for row in (*found["resizes"], *(each for pair in found.get("pairs", ()) for each in pair["resizes"])):
        slots = " → ".join(",".join(map(str, row[end])) for end in ("before", "after"))
        named = row.get("layouts", "")
        what = named.replace("->", "→") if {"tp", "pp", "cp"} & {axis[:2] for axis in named.split()} else slots
        changes.setdefault(what, {False: [], True: []})[row["in_a_batch"]].append(row)
    for what, by_place in changes.items():
        parts = [([r["moved_bytes"] / MIB for r in rows], [r["pause_s"] for r in rows]) for rows in by_place.values()]
        yield what, *(cell for part in parts for cell in part)
    for where, restart_s in found["median_restart_s"].items():
        yield f"checkpoint {where} and restart", "", restart_s, "", ""


def reshard(found: Any) -> Iterator[Row]:
    ways = ("ours", "first_call", "transfer", "messages", "dcp", "dtensor", "mcore")
    for row in found["pairs"]:
        moved = row["wire_bytes"] / MIB
        seconds = (row.get(f"{way}_s") for way in ways)
        yield row["pair"], moved, *seconds, row["ratio_vs_best_peer"], row["fraction_of_limit"]


def publish(found: Any) -> Iterator[Row]:
    """Yield a row for each layout and number of servers."""
    of: dict[tuple[str, int], dict[str, Any]] = {}
    for row in found["rows"]:
        of.setdefault((row["layout"], row["instances"]), {})[row["transport"]] = row
    for (layout, instances), by in of.items():
        peers = by["shared_memory"]["peers_s"]
        yield (
            f"{layout} to {instances}",
            by["shared_memory"]["seconds"],
            by["shared_memory"]["fraction_of_limit"],
            by["point_to_point"]["seconds"],
            by["point_to_point"]["fraction_of_limit"],
            by["http"]["seconds"],
            by["disk"]["seconds"],
            peers["save_load_tmpfs"],
            peers["gloo_broadcast"],
        )


def plan(found: Any) -> Iterator[Row]:
    for row in found["speed"]:
        yield row["case"], row["cold_ms"], row["known_classes_ms"], row["cached_ms"], row["one_slot_ms"]


def times(found: Any, arm: str, other: str) -> list[float]:
    """What one arm takes of another's time, round by round."""
    ours, theirs = (found["arms"].get(name, {"wall_s_rounds": []})["wall_s_rounds"] for name in (arm, other))
    return [our_s / their_s for our_s, their_s in zip(ours, theirs, strict=False)]


def elastic(found: Any) -> Iterator[Row]:
    for arm, of in found["arms"].items():
        idle = 100 * sum(of["idle_by_cause"].values())
        moves = (of["num_switches"], 100 * of["switch_share"]) if arm not in ("static", "collocated") else ("", "")
        yield ARMS[arm], times(found, arm, "static"), of["tokens_per_s"], idle, *moves


def memory(found: Any) -> Iterator[Row]:
    of_host = {each["case"]: each["predicted_host_bytes"] / MIB for each in found["predictions"]}
    for row in found["rows"]:
        peak, predicted, without, host = (
            row[key] / MIB for key in ("peak_bytes", "predicted_peak_bytes", "baseline_peak_bytes", "host_peak_bytes")
        )
        saved, time = 100 * row["saved"], row["step_s"] / row["baseline_step_s"]
        yield row["knob"], peak, without, saved, predicted, host or "", of_host[row["case"]] or "", time


def memory_predictions(found: Any) -> Iterator[Row]:
    ratios = [each["ratio"] for each in found["predictions"]]
    yield "prediction over peak", [min(ratios), max(ratios)], f"{len(ratios)} configurations"
    offloading = [each for each in found["predictions"] if each["host_peak_bytes"]]
    ratios = [each["predicted_host_bytes"] / each["host_peak_bytes"] for each in offloading]
    yield "the same in host memory", [min(ratios), max(ratios)], f"{len(ratios)} configurations"
    yield "logit memory at a vocabulary of 128k, all at once over in chunks", found["logits_ratio"], ""


def decisions(found: Any) -> Iterator[Row]:
    for row in found["rows"]:
        what = f"{ARMS[row['policy']]}, {row['slots']:,} slots, {row['rollouts']:,} rollouts"
        yield what, row["median_ms"], row["p99_ms"], row["simulating_s"]


def schedules(found: Any) -> Iterator[Row]:
    by: dict[str, dict[str, dict[str, float]]] = {}
    for row in found["rows"]:
        by.setdefault(row["kind"], {}).setdefault(row["case"], {})[row["arm"]] = row["wall_s"]
    for kind, cases in by.items():
        pairs = (("model", "best_static"), ("model", "collocated"), ("rules", "best_static"))
        yield kind, *([of[arm] / of[other] for of in cases.values()] for arm, other in pairs)


PARTS = {
    "prepare": "slots prepare",
    "wait": "a micro-step ends",
    "pause": "the trainer stands still",
    "begin": "a generator begins",
    "leave": "rollouts leave",
}
"""Where the seconds of a role change go."""


def role_changes(found: Any) -> Iterator[Row]:
    for kind in sorted({row["kind"] for row in found["rows"]}):
        rows = [row for row in found["rows"] if row["kind"] == kind]
        seconds, pauses = [[row[key] for row in rows] for key in ("seconds", "longest_other_pause_s")]
        parts = [[row["parts"][part] for row in rows if part in row["parts"]] for part in PARTS]
        yield kind, seconds, *(statistics.mean(of_part) if of_part else "" for of_part in parts), pauses
    yield "mean, and % of all seconds", found["mean_s"], *(100 * found["shares"][part] for part in PARTS), ""
    yield "a micro-step, for comparison", found["micro_step_s"], *("" for _ in PARTS), ""


ROLE_CHANGES = ("change", "seconds", *PARTS.values(), "longest wait of a slot that keeps its roles, s")


def gpu() -> str:
    """What each part of `make gpu` says of itself, or why it has nothing to say; of the tests, how many passed."""
    tables: list[str] = []
    for found in results("gpu"):
        rows: list[tuple[str, str]] = []
        for name, part in found["parts"].items():
            said = part["figures"].get("sentence") or f"{part['outcome']}: {part['reason']}"
            if outcomes := list(part["figures"].get("outcomes", {}).values()):
                said = ", ".join(f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes)))
            rows.append((f"`{name}`", said))
        tables.append(markdown((found["device"]["name"], "figures"), rows))
    return "\n\n".join(tables) or NOTHING_YET


def real(found: Any) -> Iterator[Row]:
    yield "base rate: held-out reward before training", found["base_rate"]
    yield f"held-out reward after {found['steps']} steps", found["reward_after"]
    yield "standard error of the gain", found["gain_standard_error"]
    yield "role changes", found["role_changes"]
    yield "resizes of the trainer", found["resizes"]
    yield "seconds until the killed generator was back", found["back_after_s"]
    yield "bound of the difference of log-probs between sampler and trainer", found["logprob_difference_bound"]
    yield "greedy completions of the exported folder that are transformers', of 10", found["greedy_equal"]
    yield "minutes", found["wall_s"] / 60
    yield "CPU minutes", found["cpu_s"] / 60


DOCS: Mapping[str, tuple[Callable[[Any], Iterator[Row]], Sequence[str]]] = {
    "generate": (generate, ("", "tokens/s", "ductile is so many times as fast", "in CPU time")),
    "grpo_step": (grpo_step, ("a slot", "ms of a step", "what it does")),
    "train": (train, ("", "tokens/s", "CPU ms a token", "over one slot's")),
    "resize": (resize, ("", "between batches: MiB moved", "pause, s", "in a batch: MiB moved", "pause, s")),
    "reshard": (
        reshard,
        (
            "4 slots", "MiB between ranks", "`reshard`", "first call", "`Transfer`", "messages", "DCP", "DTensor",
            "megatron-core", "best of them / `reshard`", "of the memory's speed",
        ),
    ),
    "plan": (
        plan,
        ("Qwen3-32B in bf16", "a plan, ms", "of classes that are known", "from the cache", "one slot's messages"),
    ),
    "publish": (
        publish,
        (
            "1 GiB of bf16", "shared memory, s", "of memcpy's speed", "point to point, s", "of loopback's speed",
            "HTTP, s", "disk, s", "`torch.save` and `load` through tmpfs, s", "gloo broadcast, s",
        ),
    ),
    "elastic": (elastic, ("", "of the best split's time", "tokens/s", "idle, %", "changes", "in `switch`, %")),
    "elastic_no_share": (elastic, ("", "of the best split's time", "tokens/s", "idle, %", "changes", "in `switch`, %")),
    "memory": (
        memory,
        (
            "knob", "peak, MiB", "without, MiB", "saved, %", "predicted, MiB", "in host memory, MiB",
            "predicted there, MiB", "time of a step",
        ),
    ),
    "decisions": (decisions, ("", "median decision, ms", "the 99th of 100", "all of it simulated, s")),
    "schedules": (schedules, ("", "`model` / best split", "`model` / collocated", "`rules` / best split")),
    "role_changes": (role_changes, ROLE_CHANGES),
    "role_changes_smollm2": (role_changes, ROLE_CHANGES),
    "real": (real, ("SmolLM2-135M-Instruct, sums", "")),
}  # fmt: skip
TABLES: Mapping[str, Callable[[], str]] = {
    "readme": readme,
    **{name: partial(table, name, head, rows_of) for name, (rows_of, head) in DOCS.items()},
    "memory_predictions": partial(table, "memory", ("", "", "of"), memory_predictions),
    "gpu": gpu,
}
"""By the names in the pages' markers."""
