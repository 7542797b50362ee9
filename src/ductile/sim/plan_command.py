"""`ductile plan runs/x`: with this run's lengths and speeds, which way to use its slots would be the fastest? And with
`--preemptions`, which the cheapest on slots that are taken away meanwhile?"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ductile.config.reading.command_line import parse_with_folder, path_argument, print_error, require_folder
from ductile.error_text import capitalised

if TYPE_CHECKING:
    from ductile.sim.plan import Case
    from ductile.sim.recording import Recording

DONE, NO_PLAN = 0, 2


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ductile plan",
        description="Predict a recorded run's step on other placements and with other policies, in virtual time. With "
        "--preemptions: the whole run's time and cost on slots that are taken away and come back.",
    )
    parser.add_argument(
        "--preemptions",
        type=path_argument,
        metavar="FILE",
        help="a schedule of slots that are taken away and come back, .csv or .toml: docs/simulator.md has the format",
    )
    parser.add_argument("--price", type=float, metavar="P", help="price of a slot for an hour; with --preemptions")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the run; default: as it was to have")
    parser.add_argument("--json", type=path_argument, metavar="F", help="write the table to this file too")
    asked = parse_with_folder(parser, words)
    if asked.preemptions is None and (asked.price is not None or asked.steps is not None):
        parser.error("--price and --steps are for --preemptions FILE: write it, too")
    if asked.price is not None and not 0 <= asked.price < float("inf"):
        parser.error(f"--price {asked.price:g} is no price: write 0 or more, such as 2.5")
    if asked.steps is not None and asked.steps < 1:
        parser.error(f"--steps {asked.steps} is no number of steps: write 1 or more")
    # Help comes at once: what simulates is loaded when there is something to simulate.
    from ductile.config.reading.imports import ImportPathError
    from ductile.elastic.policy_decision import BadDecision
    from ductile.sim.recording import read_recording

    try:
        recording = read_recording(asked.run)
        if asked.preemptions is None:
            _plan(recording, asked.json)
        else:
            _plan_spot(recording, asked.preemptions, asked.price or 0.0, asked.steps, asked.json)
    except BrokenPipeError:  # of `| head`: no reader is left
        raise
    except (ImportPathError, BadDecision, OSError, ValueError) as error:
        print_error("plan", error)
        return NO_PLAN
    return DONE


def _plan(recording: "Recording", file: Path | None) -> None:
    from ductile.observe import write_json
    from ductile.sim.plan import better, doubts, notes, other_cases, own_case, verdict

    if file is not None:
        require_folder("--json", file)  # a table that cannot be written is known before it is made
    print(f"{recording.sentence()}\n")
    own, measured_s = own_case(recording), recording.step_s
    error = own.step_s / measured_s - 1
    print(
        f"This run: {own.label}, begun with {own.slots}. A step took {measured_s:.2f} s; predicted {own.step_s:.2f} s "
        f"({error:+.1%}), {own.idle_share:.0%} idle."
    )
    doubted = doubts(recording, own)
    print(*doubted, "", sep="\n")
    print(
        f"{'policy':16}{'train':>9}{'generate':>10}{'step':>11}{'idle':>8}{'switches a step':>17}{'vs. this run':>14}"
    )
    others: list[Case] = []
    for case in other_cases(recording):
        others.append(case)
        print(
            f"{case.policy:16}{len(case.placement.train):>9}{len(case.placement.generate):>10}{case.step_s:>9.2f} s"
            f"{case.idle_share:>8.0%}{case.switches_per_step:>17.1f}{case.step_s / own.step_s - 1:>+14.0%}",
            flush=True,
        )
    said, best = verdict(own, others), better(own, others)
    print(
        "",
        *notes(recording),
        "",
        f"If the table holds all the same: {said}" if doubted else capitalised(said),
        sep="\n",
    )
    if best is not None and not doubted:
        print("", "As TOML, to lay over the run's config (`@ this.toml`):", "", best.toml(), sep="\n")
    if file is not None:
        write_json(
            file,
            {
                "run": str(recording.run),
                "taken": recording.sentence(),
                "measured_step_s": measured_s,
                "predicted": own.as_json(),
                "error": error,
                "doubts": doubted,
                "cases": [case.as_json() for case in others],
                "verdict": said,
                "toml": best.toml() if best else None,
            },
        )


def _plan_spot(recording: "Recording", schedule: Path, price: float, num_steps: int | None, file: Path | None) -> None:
    from ductile.observe import write_json
    from ductile.sim.plan import doubts, notes, own_case
    from ductile.sim.preemptions import read_preemptions
    from ductile.sim.spot import SpotCase, SpotPlanner, best_case, spot_verdict

    if file is not None:
        require_folder("--json", file)
    read = read_preemptions(schedule, recording.setting.home.slots)
    planner = SpotPlanner(recording, read, price, num_steps or recording.setting.num_steps)
    print(f"{recording.sentence()}\n{planner.sentence()}\n")
    print(f"{'policy':26}{'train':>8}{'generate':>10}{'time':>11}{'slot-hours':>12}{'cost':>11}{'idle':>8}")

    def show(case: SpotCase, label: str) -> None:
        split = f"{label:26}{len(case.case.placement.train):>8}{len(case.case.placement.generate):>10}"
        if case.cut:
            print(f"{split}  cut: {case.cut}", flush=True)
            return
        costs = f"{case.wall_s:>9.1f} s{case.slot_hours:>12.4g}{case.cost:>11.4g}"
        print(f"{split}{costs}{case.case.idle_share:>8.0%}", flush=True)

    own, others = planner.own_case(), list[SpotCase]()
    show(own, f"this run: {own.case.policy}")
    for case in planner.other_cases():
        others.append(case)
        show(case, case.label)
    said, best = spot_verdict(own, others), best_case([own, *others])
    without = "none taken: on the slots alone that are never taken away."
    doubted = doubts(recording, own_case(recording))
    print("", *notes(recording), *([without] if any(each.is_without for each in others) else []), "", sep="\n")
    print(*doubted, f"If the table holds all the same: {said}" if doubted else said, sep="\n")
    if file is not None:
        write_json(
            file,
            {
                "run": str(recording.run),
                "taken": recording.sentence(),
                "preemptions": [
                    {"at_s": each.at_s, "event": each.event, "slots": list(each.slots), "notice_s": each.notice_s}
                    for each in read
                ],
                "price": price,
                "num_steps": planner.num_steps,
                "predicted": own.as_json(),
                "doubts": doubted,
                "cases": [case.as_json() for case in others],
                "best": best.as_json() if best else None,
                "verdict": said,
            },
        )
