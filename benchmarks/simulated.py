"""The tables of what is simulated (`quoted.py` has the others)."""

import re
import statistics
from collections.abc import Mapping
from typing import Any

from measured import ARMS, result, where
from wording import changes, markdown, prose, span, two_digits


def decisions() -> str:
    by = {(row["policy"], row["slots"]): row for row in result("decisions")["rows"]}
    counts = sorted({slots for _, slots in by})

    def took(policy: str, slots: int) -> str:
        """ "3.8 ms (8.2)"."""
        median, late = (by[policy, slots][f"{part}_ms"] for part in ("median", "p99"))
        return f"{two_digits(median)} ms ({two_digits(late)})"

    head = ("median decision", *(f"{slots:,} slots, {by['model', slots]['rollouts']:,} rollouts" for slots in counts))
    rows = ((ARMS[policy], *(took(policy, slots) for slots in counts)) for policy in ("rules", "model"))
    said = f"In brackets: what one of a hundred takes longer than. Simulated by one thread, on {where('decisions')}."
    return f"{markdown(head, rows)}\n\n{prose(said)}"


def simulating() -> str:
    by = {(row["policy"], row["slots"]): row for row in result("decisions")["rows"]}
    most = max(slots for _, slots in by)
    rules, model = by["rules", most], by["model", most]
    return prose(
        f"A run of {model['rollouts']:,} rollouts on {most:,} slots (`benchmarks/decisions.py`) takes",
        f"{rules['simulating_s']:.0f} s of one core with `rules` and {model['simulating_s']:.0f} s with `model`.",
    )


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

    return markdown(
        ("model, GPUs", *PUBLISHED.values(), "longest completion alone"), map(row, result("published")["rows"])
    )


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
    ("8 x 8: the step is one long completion", "8 x 8$", ""),
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
