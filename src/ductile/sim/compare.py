"""The work of `ductile simulate` on a good config: every arm in virtual time, a table, pictures, JSON."""

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from ductile.config.schema.simulate import SimulateConfig
from ductile.core.instances.placement import many
from ductile.disk import write_whole
from ductile.observe import write_json
from ductile.sim.arms import ArmOutcome, run_arms
from ductile.sim.configured import configured
from ductile.sim.recording import read_recording
from ductile.sim.scenario import Scenario
from ductile.sim.timeline import causes, gantt, svg


def compare(config: SimulateConfig) -> list[ArmOutcome]:
    """Prints a table and a chart of the last arm; writes `simulated.json` and an SVG of each arm to `output_dir`.

    Raises NoRecording, PlacementError, ImportPathError, BadDecision, OSError or ValueError, each with a sentence.
    """
    recording = read_recording(config.run) if config.run is not None else None
    if recording is not None:
        print(f"{recording.sentence()}\n")
    outcomes = _run(configured(config, recording), config)
    _write(Path(config.output_dir), outcomes)
    last = outcomes[-1]
    print(f"\n{last.name}:\n{gantt(last.result.spans)}\n\nWritten: {config.output_dir}/")
    return outcomes


def _run(scenario: Scenario, config: SimulateConfig) -> list[ArmOutcome]:
    work = scenario.work
    running = run_arms(scenario, config.arms, stay=config.run is not None)
    print(
        f"{many(work.num_steps, 'step')} of {work.groups_per_step} x {many(work.group_size, 'rollout')} on "
        f"{many(scenario.placement.num_slots, 'slot')}\n\n"
        f"{'arm':16}{'train':>9}{'generate':>10}{'wall':>11}{'speed':>8}{'idle':>8}{'switches':>10}  idle by cause"
    )
    outcomes: list[ArmOutcome] = []
    for outcome in running:
        outcomes.append(outcome)
        result, first = outcome.result, outcomes[0].result
        print(
            f"{outcome.name:16}{len(outcome.placement.train):>9}{len(outcome.placement.generate):>10}"
            f"{result.wall_s:>9.1f} s{f'{first.wall_s / result.wall_s:.2f}x':>8}{result.idle_share:>8.1%}"
            f"{len(result.changes):>10}  {causes(result.idle, result.wall_s * result.num_slots)}",
            flush=True,
        )
    return outcomes


def _write(folder: Path, outcomes: Sequence[ArmOutcome]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "simulated.json", {"arms": [outcome.as_json() for outcome in outcomes]})
    for outcome, file in zip(outcomes, _file_names([outcome.name for outcome in outcomes]), strict=True):
        title = f"{outcome.name}: {outcome.result.wall_s:.1f} s, {outcome.result.idle_share:.1%} idle"
        write_whole(folder / file, svg(outcome.result.spans, title))


def _file_names(names: Sequence[str]) -> list[str]:
    """A file name for each arm, which may be a policy's path ("mine/eager.py:Eager"); no two are the same."""
    files: dict[str, None] = {}
    for name in names:
        stem = re.sub(r"[^\w.-]+", "_", name)
        tries = (f"{stem}{f'_{number}' if number > 1 else ''}.svg" for number in count(1))
        files[next(each for each in tries if each not in files)] = None
    return list(files)
