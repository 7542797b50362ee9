"""What README and docs quote of `results/`: one function a table, which `figures.py` puts into the pages.

Nothing is measured here. A figure that no file in `results/` has is told nowhere.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from measured import ARMS, result, where
from simulated import decisions, published_gains, published_steps, schedules, simulating
from wording import change, less, listed, markdown, percent, prose, span, two_digits

PEERS = {"dcp": "DCP", "dtensor": "DTensor", "mcore": "megatron-core"}


def resized() -> Any:
    """`results/resize.json`, with `Finalize` (`settle_s`) in the pause also where it was measured apart."""
    found = result("resize")
    rows = [row | {"pause_s": row["pause_s"] + row.get("settle_s", 0.0)} for row in found["resizes"]]
    pause_s = statistics.median(row["pause_s"] for row in rows)
    between_s = statistics.median(row["pause_s"] for row in rows if not row["in_a_batch"])
    restart_s = found["median_restart_s"]
    return found | {
        "resizes": rows,
        "median_pause_s": pause_s,
        "ratio_vs_restart": restart_s["on disk"] / pause_s,
        "ratio_vs_restart_in_memory": restart_s["in memory"] / pause_s,
        "ratio_between_batches": restart_s["on disk"] / between_s,
    }


# -- README


def readme() -> str:
    sources = ("generate", "grpo_step", "elastic", "reshard", "resize", "plan")
    generate, grpo, elastic, reshard, _, plan = map(result, sources)
    resize = resized()
    step_s, moving = grpo["median_step_s"], [row for row in reshard["pairs"] if row["wire_bytes"]]
    best = min((name for name in step_s if name.startswith("ductile")), key=lambda name: step_s[name])
    slots, cold_ms = ([row[key] for row in plan["speed"]] for key in ("num_slots", "cold_ms"))
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
            "`benchmarks/grpo_step.py`: seconds of a whole GRPO step, 32 completions of 64 tokens, 2 cores",
            "TRL `GRPOTrainer`, best of two set-ups",
            f"{grpo['ratio_vs_trl']:.2f} times as fast (best of three set-ups: {best.removeprefix('ductile, ')}); "
            f"strictly on-policy with the roles together {grpo['ratio_vs_trl_on_policy']:.2f} times",
        ),
        (
            "`benchmarks/elastic.py`: seconds of ten strictly on-policy GRPO steps with long-tailed completions, six "
            "slots of a quarter of a core",
            f"the best of {len(elastic['splits'])} fixed splits; collocated; both rules; the example's file",
            '`policy = "model"` takes '
            + listed([f"{less(share)} time than {arms[arm]}" for arm, share in elastic["model_against"].items()])
            + " ([how](docs/scheduling.md#what-is-measured))",
        ),
        (
            "`benchmarks/reshard.py`: another tensor-parallel layout of a 790 MiB model, live, 4 processes",
            listed([PEERS[name] for name in PEERS if f"{name}_s" in moving[0]]),
            "where bytes move between processes a `ductile.Resharder`, from its second call on, is by default "
            f"{span((row['ratio_vs_best_peer'] for row in moving), '.1f')} times as fast as the best of them, its "
            f"first call {span((row['first_call_ratio_vs_best_peer'] for row in moving), '.1f')} times; it compares "
            "fingerprints of all that is read, which they do not ([how](docs/transfer.md#what-is-measured))",
        ),
        (
            "`benchmarks/resize.py`: a trainer of 100 M parameters goes to other slots",
            "checkpoint and restart of the workers",
            f"{resize['ratio_vs_restart_in_memory']:.1f} times as fast where the checkpoint stays in memory, "
            f"{resize['ratio_vs_restart']:.1f} times from disk; median pause {resize['median_pause_s']:.2f} s "
            "([how](docs/resize.md#measured))",
        ),
        (
            f"`benchmarks/plan.py`: reshard plans for a 32B model on {min(slots)} to {max(slots):,} slots",
            "the exact optimum of the busiest sender (no peer plans)",
            f"within {max(row['ratio'] for row in plan['balance']):.3f} of it; {two_digits(min(cold_ms))} ms "
            f"({min(slots)} slots, tensor-parallel) to {max(cold_ms) / 1000:.1f} s ([which](docs/layout.md))",
        ),
    ]
    table = markdown(("benchmark", "against", "result"), rows)
    return f"{table}\n\n{prose(f'Measured on {where(*sources)}; where a row has a peer, both in the same run.')}"


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
        f"{found['tokens_a_round']} tokens, the longest completion {found['output_lengths']['max']}.",
        f"On {where('generate')}.",
        "All tokens were identical." if found["tokens_identical"] else "Not all tokens were identical.",
    )
    return f"{markdown(('', 'tokens/s', 'ductile is', 'in CPU time'), map(row, speed))}\n\n{said}"


def grpo_step() -> str:
    found = result("grpo_step")
    slot, loop = found["on_policy_step"]["slot"], found["on_policy_step"]["loop"]
    idle_s = sum(part_s for what, part_s in slot.items() if what.startswith("idle"))

    def ms(seconds: float) -> str:
        return f"{1000 * seconds:.0f}"

    rows = (
        ("generate", ms(slot["generate"]), "prompts, then token after token of half the completions"),
        (
            "train",
            ms(slot["train"]),
            f"forward and backward pass of half the completions {ms(loop['forward_backward'])}, "
            f"optimizer {ms(loop['optim_step'])}",
        ),
        (
            "publish",
            ms(slot["publish"]),
            f"gathered and copied into a segment {ms(loop['publish'])}; mapped, checked and copied into the engines "
            f"{ms(loop['receive'])}",
        ),
        ("nothing", ms(idle_s), "rewards, messages, the orchestrator's books"),
    )
    step_s = found["median_step_s"]
    on_policy_s = next(value for name, value in step_s.items() if name.endswith("on-policy"))
    said = prose(f"A step took {on_policy_s:.2f} s, and {found['trl_s']:.2f} s with TRL. On {where('grpo_step')}.")
    return f"{markdown(('a slot', 'ms of a step', 'in it, ms'), rows)}\n\n{said}"


def train_step() -> str:
    found = result("train_step")["milliseconds"]
    total = {
        name: [of[f"forward_backward{kind}"] + of[f"optim_step{kind}"] for kind in ("", "_cpu")]
        for name, of in found.items()
    }

    def over(name: str, floor: str) -> str:
        wall, cpu = (ours / its - 1 for ours, its in zip(total[name], total[floor], strict=True))
        return f"{less(wall)} time than that, {less(cpu)} CPU"

    rows = (
        ("plain module, torch's clipping and AdamW", "plain", "the floor"),
        ("trainer, 1 rank", "1 rank(s)", f"{over('1 rank(s)', 'plain')}: packing, metrics, messages"),
        ("two plain modules at once, half the samples each", "2 x plain", "two cores slow each other down"),
        (
            "trainer, 2 ranks",
            "2 rank(s)",
            f"{over('2 rank(s)', '2 x plain')}: parameters are gathered, gradients reduced",
        ),
    )
    cells = ((what, *(f"{milliseconds:.0f}" for milliseconds in total[name]), why) for what, name, why in rows)
    table = markdown(("", "ms", "CPU of all ranks, ms", "what it is"), cells)
    said = prose(f"Forward and backward and the optimizer's step, on {where('train_step')}.")
    return f"{table}\n\n{said}"


def resize() -> str:
    found = resized()
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
    parts = ("carrier", "plan", "groups", "build", "load")
    prepared_s = [sum(each[f"{part}_s"] for part in parts) for each in found["resizes"]]
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
    speed = span((row["limits_bytes_s"]["memory"] / 1e9 for row in found["pairs"]), ".1f", " GB/s")
    said = prose(
        "With two moments for each weight, 2.3 GiB, which megatron-core's refit does not move; medians of",
        f"{found['repeats']}, and the memory's speed, measured again, is {speed}:",
    )
    return f"{said}\n\n{_against_peers(found['pairs'])}"


def _against_peers(rows: list[Any]) -> str:
    peers = {peer: what for peer, what in PEERS.items() if any(f"{peer}_s" in row for row in rows)}
    head = ("4 slots", "between ranks", "`reshard`", "first call", "`Transfer`", *peers.values())
    return markdown(
        (*head, "best of them / `reshard`", "of the memory's speed"),
        (
            (
                row["pair"],
                f"{row['wire_bytes'] / 2**20:.0f} MiB" if row["wire_bytes"] else "moves no bytes",
                *(f"{row[f'{way}_s']:.3f}" for way in ("ours", "first_call", "transfer", *peers)),
                f"{row['ratio_vs_best_peer']:.2f}",
                f"{row['fraction_of_limit']:.2f}",
            )
            for row in rows
        ),
    )


def plan() -> str:
    found = result("plan")
    head = (
        "Qwen3-32B in bf16",
        "a plan, ms",
        "the same, of classes that are known",
        "from the cache",
        "one slot's messages",
    )
    columns = ("cold_ms", "known_classes_ms", "cached_ms", "one_slot_ms")
    rows = ((of["case"], *(two_digits(of[column]) for column in columns)) for of in found["speed"])
    said = prose(
        f"One thread is at work, on {where('plan')}.",
        f"The busiest sender of the {len(found['balance'])} pairs sends at most",
        f"{max(row['ratio'] for row in found['balance']):.3f} times what it has to.",
    )
    return f"{markdown(head, rows)}\n\n{said}"


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

    head = ("arm", "seconds", "against the best split", "tokens/s", "idle", "changes", "in `switch`")
    others = [f"{of['wall_s']:.0f} s ({count} train)" for count, of in splits.items() if count != str(train)]
    said = prose(
        f"On {where('elastic')}.",
        f"The longest completion has {arms['model']['longest_by_median']:.0f} times the tokens of the median one.",
        f"In single rounds `model` stood at {rounds('static')} against the best split, and at",
        f"{rounds('collocated')} against collocated. The other splits took {listed(others)}.",
        f"Deciding took the orchestrator {100 * arms['model']['deciding_share']:.1f} % of the time.",
    )
    return f"{markdown(head, map(row, arms))}\n\n{said}"


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


def gpu() -> str:
    """What each part of `make gpu` says of itself, or why it has nothing to say; of the tests, how many passed."""
    rows: list[tuple[str, str]] = []
    for name, part in result("gpu")["parts"].items():
        if outcomes := list(part["figures"].get("outcomes", {}).values()):
            counted = [f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "unfinished", "skipped")]
            said = f"{listed([each for each in counted if not each.startswith('0 ')])} of {len(outcomes)}"
        elif part["outcome"] == "done":
            said = part["figures"]["sentence"]
        else:
            said = f"{part['outcome']}: {part['reason']}"
        rows.append((f"`{name}`", said))
    return markdown(("part", "figures"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "readme": readme,
    "generate": generate,
    "grpo_step": grpo_step,
    "train_step": train_step,
    "reshard": reshard,
    "reshard.moments": reshard_moments,
    "resize": resize,
    "plan": plan,
    "elastic": elastic,
    "decisions": decisions,
    "simulating": simulating,
    "role_changes": role_changes,
    "predicted": predicted,
    "gpu": gpu,
    "published.steps": published_steps,
    "published.gains": published_gains,
    "schedules": schedules,
}
"""By the names in the pages' markers."""
