"""`ductile plan runs/x`: with this run's lengths and speeds, which way to use its slots would be the fastest?"""

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
        description="Predict a recorded run's step on other placements and with other policies, in virtual time.",
    )
    parser.add_argument("--json", type=path_argument, metavar="F", help="write the table to this file too")
    asked = parse_with_folder(parser, words)
    # Help comes at once: what simulates is loaded when there is something to simulate.
    from ductile.config.reading.imports import ImportPathError
    from ductile.elastic.policy_decision import BadDecision
    from ductile.sim.recording import read_recording

    try:
        _plan(read_recording(asked.run), asked.json)
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
