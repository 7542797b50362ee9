"""What README and docs quote of `results/`: one function a table, which `figures.py` puts into the pages.

Nothing is measured here. A figure that no file in `results/` has is told nowhere.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wording import change, changes, less, listed, markdown, percent, prose, span, two_digits

RESULTS = Path(__file__).with_name("results")
ARMS = {
    "static": "the best split",
    "collocated": "collocated",
    "rules": "`rules`",
    "rules_policies": "`rules` with both options",
    "model": "`model`",
    "seed": "[dynamic.yaml](../examples/scheduling/dynamic.yaml)",
}
"""As the pages in `docs/` call them."""
PEERS = {"dcp": "DCP", "dtensor": "DTensor", "mcore": "megatron-core"}


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def where(*names: str) -> str:
    """ "2 cores (AMD EPYC 7B13)": what these files were measured on."""
    machines = dict.fromkeys((found["machine"]["cores"], found["machine"]["cpu"]) for found in map(result, names))
    return listed([f"{cores} core{'' if cores == 1 else 's'} ({cpu})" for cores, cpu in machines])


# -- README


def readme() -> str:
    sources = ("generate", "grpo_step", "elastic", "reshard", "resize", "plan")
    generate, grpo, elastic, reshard, resize, plan = map(result, sources)
    step_s, moving = grpo["median_step_s"], [row for row in reshard["pairs"] if row["wire_bytes"]]
    best = min((name for name in step_s if name.startswith("ductile")), key=lambda name: step_s[name])
    arms = {**ARMS, "seed": "`examples/scheduling/dynamic.yaml`"}
    rows = [
        (
            "`benchmarks/generate.py`: tokens/s, 64 requests of uneven length, one thread",
            "`transformers.generate`, best batch size",
            f"{generate['ratio_vs_transformers']:.2f} times as many, "
            f"{'identical' if generate['tokens_identical'] else 'other'} tokens "
            f"({generate['ratio_vs_transformers_sorted']:.2f} times against batches sorted by lengths one cannot know)",
        ),
        (
            "`benchmarks/grpo_step.py`: seconds of a whole GRPO step, 32 answers of 64 tokens, 2 cores",
            "TRL `GRPOTrainer`, best of two set-ups",
            f"{grpo['ratio_vs_trl']:.2f} times as fast ({best.removeprefix('ductile, ')}); strictly on-policy with the "
            f"roles together {grpo['ratio_vs_trl_on_policy']:.2f} times",
        ),
        (
            "`benchmarks/elastic.py`: seconds of ten GRPO steps with long-tailed answers, six slots of a quarter of a "
            "core",
            f"the best of {len(elastic['splits'])} fixed splits; collocated; both rules",
            '`policy = "model"` takes '
            + listed([f"{less(share)} time than {arms[arm]}" for arm, share in elastic["model_against"].items()])
            + " ([how](docs/scheduling.md#what-is-measured))",
        ),
        (
            "`benchmarks/reshard.py`: another tensor-parallel layout of a 790 MiB model, live, 4 processes",
            listed([PEERS[name] for name in PEERS if f"{name}_s" in moving[0]]),
            f"`ductile.reshard` by default is {span((row['ratio_vs_best_peer'] for row in moving), '.1f')} times as "
            "fast as the best of them, and checks every byte that moves, which they do not "
            "([how](docs/transfer.md#what-is-measured))",
        ),
        (
            "`benchmarks/resize.py`: a trainer of 100 M parameters goes to other slots",
            "checkpoint and restart of the workers",
            f"{resize['ratio_vs_restart']:.1f} times as fast; median pause {resize['median_pause_s']:.2f} s "
            "([how](docs/resize.md#measured))",
        ),
        (
            "`benchmarks/plan.py`: reshard plan for a 32B model on 128 slots",
            "the exact optimum of the busiest sender",
            f"within {max(row['ratio'] for row in plan['balance']):.3f}; {plan['speed'][0]['cold_ms']:.1f} ms",
        ),
    ]
    table = markdown(("benchmark", "against", "result"), rows)
    return f"{table}\n\n{prose(f'Measured on {where(*sources)}, peer and ductile in the same run.')}"


# -- docs


def generate() -> str:
    found = result("generate")
    speed = found["tokens_per_s"]
    cpu_s = {name: statistics.median(rounds) for name, rounds in found["cpu_s"].items()}

    def row(name: str) -> tuple[str, ...]:
        if name == "ductile":
            return name, f"{speed[name]:.0f}", "", ""
        faster, cheaper = speed["ductile"] / speed[name], cpu_s[name] / cpu_s["ductile"]
        what = name.replace("sorted", "sorted by output length (which one cannot know)")
        return what, f"{speed[name]:.0f}", f"{faster:.2f} times as fast", f"{cheaper:.2f} times less"

    said = prose(
        f"{found['tokens_a_round']} tokens, the longest answer {found['output_lengths']['max']}.",
        f"On {where('generate')}.",
        "All tokens were identical." if found["tokens_identical"] else "Not all tokens were identical.",
    )
    return f"{markdown(('', 'tokens/s', 'ductile is', 'in CPU time'), map(row, speed))}\n\n{said}"


def train_step() -> str:
    found = result("train_step")["milliseconds"]
    cpu = {name: of["forward_backward_cpu"] + of["optim_step_cpu"] for name, of in found.items()}
    one, two = cpu["1 rank(s)"] / cpu["plain"] - 1, cpu["2 rank(s)"] / cpu["2 x plain"] - 1
    rows = (
        ("plain module, torch's clipping and AdamW", "plain", "the floor"),
        ("trainer, 1 rank", "1 rank(s)", f"{less(one)} than that: packing, metrics, messages"),
        ("two plain modules at once, half the samples each", "2 x plain", "two cores slow each other down"),
        ("trainer, 2 ranks", "2 rank(s)", f"{less(two)} than those: parameters are gathered, gradients reduced"),
    )
    cells = (
        (what, f"{found[name]['forward_backward_cpu']:.0f} + {found[name]['optim_step_cpu']:.0f}", why)
        for what, name, why in rows
    )
    table = markdown(("", "CPU of all ranks, ms", "what it is"), cells)
    said = prose(f"Forward and backward + the optimizer's step, on {where('train_step')}.")
    return f"{table}\n\n{said}"


def resize() -> str:
    found = result("resize")
    by_change: dict[str, dict[bool, Any]] = {}
    for each in found["resizes"]:
        before, after = (",".join(map(str, each[side])) for side in ("before", "after"))
        by_change.setdefault(f"{before} → {after}", {})[each["in_a_batch"]] = each

    def cells(of: Mapping[str, Any]) -> tuple[str, str]:
        return f"{of['moved_bytes'] / 2**20:.0f} MiB", f"{of['pause_s']:.2f}"

    table = markdown(
        ("", "between batches: moved", "pause", "in a batch: moved", "pause"),
        ((name, *cells(of[False]), *cells(of[True])) for name, of in by_change.items()),
    )
    transfer = statistics.median(each["transfer_s"] / each["pause_s"] for each in found["resizes"])
    prepared_s = [sum(each[f"{part}_s"] for part in ("plan", "groups", "build", "load")) for each in found["resizes"]]
    restart_s = found["median_restart_s"]
    said = prose(
        f"The median of all is {found['median_pause_s']:.2f} s, {percent(transfer)} of it the transfer.",
        f"Checkpoint and restart of the workers, in the same run: {restart_s['on disk']:.1f} s with the checkpoint on",
        f"disk, {found['ratio_vs_restart']:.1f} times the median pause ({found['ratio_between_batches']:.1f} times",
        f"between batches, which is all that a restart can do); {restart_s['in memory']:.1f} s with the checkpoint in",
        f"memory, {found['ratio_vs_restart_in_memory']:.1f} times.",
        f"Beside training, a change prepares for {span(prepared_s, '.1f', ' s')}. On {where('resize')}.",
    )
    return f"{table}\n\n{said}"


def reshard() -> str:
    found = result("reshard")
    rows = found["pairs"]
    ways = (
        ("`Transfer`, unverified", "transfer_unverified_s"),
        ("messages", "messages_s"),
        ("messages, unverified", "messages_unverified_s"),
    )
    other = markdown(
        ("4 slots", *(what for what, _ in ways)),
        ((row["pair"], *(f"{row[key]:.3f}" for _, key in ways)) for row in rows),
    )
    speed = span((row["limits_bytes_s"]["memory"] / 1e9 for row in rows), ".1f", " GB/s")
    said = prose(
        f"Seconds, medians of {found['repeats']}, on {where('reshard')}. The memory's speed is what 4 processes copy",
        "at once, each from one large buffer of its own to another, in the same kind of memory:",
        f"{speed}. A share of 1 would mean that every byte that moves or stays was copied once at that speed, and",
        'checked in no time. With `verify="off"`, and through messages (gloo):',
    )
    return f"{_against_peers(rows)}\n\n{said}\n\n{other}"


def reshard_moments() -> str:
    found = result("reshard")["with_moments"]
    said = prose(
        "With two moments for each weight, 2.3 GiB, which megatron-core's refit does not move; medians of",
        f"{found['repeats']}:",
    )
    return f"{said}\n\n{_against_peers(found['pairs'])}"


def _against_peers(rows: list[Any]) -> str:
    peers = {peer: what for peer, what in PEERS.items() if any(f"{peer}_s" in row for row in rows)}
    head = ("4 slots", "between ranks", "`reshard`", "`Transfer`", *peers.values())
    return markdown(
        (*head, "best of them / `reshard`", "of the memory's speed"),
        (
            (
                row["pair"],
                f"{row['wire_bytes'] / 2**20:.0f} MiB" if row["wire_bytes"] else "moves no bytes",
                *(f"{row[f'{way}_s']:.3f}" for way in ("ours", "transfer", *peers)),
                f"{row['ratio_vs_best_peer']:.2f}",
                f"{row['fraction_of_limit']:.2f}",
            )
            for row in rows
        ),
    )


def elastic() -> str:
    found = result("elastic")
    arms, splits = found["arms"], found["splits"]
    best_s, train, slots = arms["static"]["wall_s"], found["train_slots"]["static"], found["settings"]["slots"]
    named = ARMS | {
        "static": f"best split of {len(splits)} ({train} train, {slots - train} generate)",
        "collocated": "collocated: all generate, then all train",
    }

    def row(arm: str) -> tuple[str, ...]:
        of, moves = arms[arm], arm not in ("static", "collocated")
        return (
            named[arm],
            f"{of['wall_s']:.1f}",
            change(of["wall_s"] / best_s - 1) if arm != "static" else "",
            f"{of['tokens_per_s']:,.0f}",
            percent(sum(of["idle_by_cause"].values())),
            f"{of['num_switches']:.0f}" if moves else "",
            f"{100 * of['switch_share']:.1f} %" if moves else "",
        )

    def rounds(other: str) -> str:
        pairs = zip(arms["model"]["wall_s_rounds"], arms[other]["wall_s_rounds"], strict=True)
        return listed([change(ours / theirs - 1) for ours, theirs in pairs])

    head = ("arm", "seconds", "of the best split", "tokens/s", "idle", "changes", "in `switch`")
    others = [f"{of['wall_s']:.0f} s ({count} train)" for count, of in splits.items() if count != str(train)]
    said = prose(
        f"On {where('elastic')}.",
        f"The longest answer has {arms['model']['longest_by_median']:.0f} times the tokens of the median one.",
        f"In single rounds `model` stood at {rounds('static')} against the best split, and at",
        f"{rounds('collocated')} against collocated. The other splits took {listed(others)}.",
        f"Deciding took the orchestrator {100 * arms['model']['deciding_share']:.1f} % of the time.",
    )
    return f"{markdown(head, map(row, arms))}\n\n{said}"


def decisions() -> str:
    by = {(row["policy"], row["slots"]): row for row in result("decisions")["rows"]}
    counts = sorted({slots for _, slots in by})

    def took(policy: str, slots: int) -> str:
        """ "3.8 ms (8.2)"."""
        median, late = (by[policy, slots][f"{part}_ms"] for part in ("median", "p99"))
        return f"{two_digits(median)} ms ({two_digits(late)})"

    head = ("median decision", *(f"{slots:,} slots, {by['model', slots]['rollouts']:,} rollouts" for slots in counts))
    rows = ((ARMS[policy], *(took(policy, slots) for slots in counts)) for policy in ("rules", "model"))
    said = f"In brackets: what one of a hundred takes longer than. Simulated, on one of {where('decisions')}."
    return f"{markdown(head, rows)}\n\n{prose(said)}"


def simulating() -> str:
    by = {(row["policy"], row["slots"]): row for row in result("decisions")["rows"]}
    most = max(slots for _, slots in by)
    rules, model = by["rules", most], by["model", most]
    return prose(
        f"A run of {model['rollouts']:,} rollouts on {most:,} slots (`benchmarks/decisions.py`) takes",
        f"{rules['simulating_s']:.0f} s of one core with `rules` and {model['simulating_s']:.0f} s with `model`.",
    )


def role_changes() -> str:
    found = result("role_changes")
    rows = sorted(found["rows"], key=lambda row: (row["kind"].endswith("begins"), row["kind"]))
    table = markdown(
        ("change", "seconds", "longest wait of a slot that keeps its roles", "whose, or why"),
        (
            (row["kind"], f"{row['seconds']:.1f}", f"{row['longest_other_pause_s']:.2f} s", row["waits_for"])
            for row in rows
        ),
    )
    said = prose(
        f"A model of {found['num_params'] / 1e6:.1f} M parameters on four slots that share {where('role_changes')}: a",
        f"micro-step of {found['micro_step_tokens']} tokens takes {found['micro_step_s']:.1f} s there. No slot that",
        f"kept its roles waited for longer than {found['worst_pause_by_micro_step']:.2f} of one.",
    )
    return f"{table}\n\n{said}"


def predicted() -> str:
    found = result("predicted")
    measured_s, sources = found["measured_s"], found["predicted_from"]
    splits = sorted(name for name in measured_s if name.startswith("static"))
    moving = [name for name in measured_s if name not in splits]
    best = min(splits, key=lambda name: measured_s[name])
    arms = [*moving, *splits]

    def named(arm: str) -> str:
        return f"{arm.split('_')[1]} train" if arm in splits else ARMS[arm]

    def row(source: str) -> list[str]:
        errors = {arm: change(error) for arm, error in sources[source]["errors"].items()}
        return [named(source), *(f"({errors[arm]})" if arm == source else errors[arm] for arm in arms)]

    measured = ("measured, s", *(f"{measured_s[arm]:.2f}" for arm in arms))
    table = markdown(("predicted from", *map(named, arms)), [measured, *map(row, sources)])
    wrong = [f"{named(pair['faster'])} and {named(pair['slower'])}" for pair in sources[best]["wrong_pairs"]]
    said = prose(
        "An arm's own step (in brackets) is predicted within",
        f"{percent(max(abs(of['errors'][name]) for name, of in sources.items()))}.",
        f"From the best split ({named(best)}), which is what one records before turning the scheduler on, the others",
        f"are predicted within {percent(sources[best]['worst_held_out'])}, and those that are no splits within",
        f"{percent(max(abs(sources[best]['errors'][arm]) for arm in moving))}; in the wrong order from there:",
        f"{listed(wrong) if wrong else 'none'}. The worst of all predictions, from one recording alone, is off by",
        f"{percent(max(of['worst_of_one_recording'] for of in sources.values()))}.",
    )
    return f"{table}\n\n{said}"


PUBLISHED = {
    "shipped_static": "as RLinf ships it",
    "best_static": "best split",
    "collocated": "collocated",
    "rules": "`rules`",
    "rules_policies": "both optional rules",
    "model": "`model`",
}


def published_steps() -> str:
    def row(of: Mapping[str, Any]) -> tuple[str, ...]:
        seconds = (*(of["step_s"][arm] for arm in PUBLISHED), of["floor_s"])
        return f"{of['model']}, {of['gpus']}", *(f"{each_s:,.0f}" for each_s in seconds)

    return markdown(("model, GPUs", *PUBLISHED.values(), "longest answer alone"), map(row, result("published")["rows"]))


def published_gains() -> str:
    rows = result("published")["rows"]
    over = {
        "shipped_static": "as RLinf ships it (a quarter trains, half generates, a quarter scores)",
        "best_static": "the best of all splits",
        "collocated": "collocated",
    }
    gains = [(what, *(f"{row['gain']['model'][arm]:.2f}x" for row in rows)) for arm, what in over.items()]
    published = ["-".join(f"{gain:.2f}" for gain in dict.fromkeys(row["published_gain"])) for row in rows]
    what = "published, over verl (collocated) and RLinf (one fixed placement)"
    gains.append((what, *(f"{gain}x" for gain in published)))
    head = ("`model` gains over", *(f"{row['model']}, {row['gpus']}" for row in rows))

    def time(arm: str, other: str) -> str:
        return changes(1 / row["gain"][arm][other] - 1 for row in rows)

    said = prose(
        f"In seconds of a step `model` is {time('model', 'shipped_static')} against the shipped placement,",
        f"{time('model', 'best_static')} against the best split and {time('model', 'collocated')} against a collocated",
        f"run; `rules` are {time('rules', 'best_static')} against the best split, and with both options",
        f"{time('rules_policies', 'best_static')}.",
    )
    return f"{markdown(head, gains)}\n\n{said}"


SCHEDULES = (
    ("6 slots, 64 x 8 rollouts a step, 0.6 or 1.2 ms a sequence, training long", r"64 x .* (0\.6|1\.2) ms", "long"),
    ("the same, 0.2 ms a sequence", r"64 x .* 0\.2 ms", "long"),
    ("the same, training short", r"64 x .*", "short"),
    ("6 slots, 32 x 8, training long", r"32 x .*", "long"),
    ("the same, training short", r"32 x .*", "short"),
    ("4, 8 and 16 slots", r"\d+ slots", ""),
    ("lognormal lengths, sigma 0.8 to 1.3", r"lognormal .* 0\.0", ""),
    ("the same, siblings about as long as each other", r"lognormal .* (0\.5|1\.0)", ""),
    ("four optimizer steps a batch", "4 minibatches", ""),
    ("at most 32 sequences a generator", "32 sequences a slot", ""),
    ("changes cost ten times as much", "costs x 10", ""),
    ("generation may run one step ahead", "async 1", ""),
    ("8 x 8: the step is one long answer", "8 x 8$", ""),
    ("12 steps instead of 4: the first one counts less", "12 steps", ""),
)
"""Of the cases in `schedules.py`: what they are, how their names begin, and whether training is long in them."""


def schedules() -> str:
    by: dict[str, dict[str, Any]] = {}
    for row in result("schedules")["rows"]:
        by.setdefault(row["case"], {})[row["arm"]] = row

    def against(case: str, arm: str, other: str) -> float:
        return by[case][arm]["wall_s"] / by[case][other]["wall_s"] - 1

    def line(what: str, pattern: str, training: str) -> tuple[str, ...]:
        found = [case for case in by if re.match(pattern, case) and _training(case) == training]
        others = ("best_static", "collocated")
        return what, *(changes(against(case, "model", other) for case in found) for other in others)

    table = markdown(("work", "against static", "against collocated"), (line(*each) for each in SCHEDULES))
    still_s = {case: min(of["best_static"]["wall_s"], of["collocated"]["wall_s"]) for case, of in by.items()}
    slower = [case for case, of in by.items() if of["model"]["wall_s"] > still_s[case]]
    switch = [of["model"]["switch_s"] / (of["model"]["wall_s"] * of["model"]["slots"]) for of in by.values()]
    rules = {case: against(case, "rules", "best_static") for case in by}
    costly = {case for case in by if case.startswith("costs")}
    said = prose(
        f"Of the {len(by)} cases it is slower than one of the two in {len(slower) or 'none'}; changes take",
        f"{span((100 * share for share in switch), '.1f', ' %')} of all slots' time,",
        f"{100 * statistics.fmean(switch):.1f} % on average. `rules` has no estimate of what a change gains: it is",
        f"{changes(rules[case] for case in by if case not in costly)} against the best static split, and",
        f"{changes(rules[case] for case in costly)} where changes cost ten times as",
        "much.",
    )
    return f"{table}\n\n{said}"


def _training(case: str) -> str:
    """ "long" where it takes as long as generation or longer, "short" where not; "" where the name does not tell."""
    speed = re.search(r"train (\d+)/s", case)
    return "" if speed is None else "short" if speed[1] == "6000" else "long"


TABLES: Mapping[str, Callable[[], str]] = {
    "readme": readme,
    "generate": generate,
    "train_step": train_step,
    "reshard": reshard,
    "reshard.moments": reshard_moments,
    "resize": resize,
    "elastic": elastic,
    "decisions": decisions,
    "simulating": simulating,
    "role_changes": role_changes,
    "predicted": predicted,
    "published.steps": published_steps,
    "published.gains": published_gains,
    "schedules": schedules,
}
"""By the names in the pages' markers."""
