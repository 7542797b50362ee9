"""What a run wrote down of itself (`core.scheduling.facts.profile`), as a scenario: its slots, its work, its speeds and
costs.

1. Of the run since its last start, the latest profiles are taken. The first of them warms up: it is simulated and not
2. Speeds are the mean of those that the compared steps knew: a machine is not always equally fast. Costs are those of
   the last profile, which has seen the most changes.
3. The simulated completions have the recorded lengths, step by step; who of a group had which is not recorded, so they
   are dealt at random. Steps beyond the recorded ones begin again with the first.
4. Groups that teach nothing are not trained on, and the simulator trains on all: its trainer is faster by their share.
"""

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, isfinite
from pathlib import Path
from typing import Any

from ductile.core.instances.placement import many
from ductile.core.scheduling.costs.cost import mean_speeds
from ductile.core.scheduling.facts.profile import Setting, StepProfile
from ductile.events.resizes import TrainerResized
from ductile.events.run_state import RunState
from ductile.events.servers import ServerJoined
from ductile.observe import read_jsonl
from ductile.sim.scenario import Scenario, WorkLoad, recorded
from ductile.tasks.prompts import ExampleOrder
from ductile.user_files import read_text

MOST_STEPS = 10
"""Steps that are compared at most, the latest ones: earlier ones had other lengths and speeds."""
REST_S = 0.1
"""Seconds between two decisions: some 25 times what one takes on few slots (`elastic.controller`)."""


class NoRecording(ValueError):
    """There is nothing to simulate from. The text is a sentence that says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Recording:
    run: Path
    setting: Setting
    steps: tuple[StepProfile, ...]
    """Profiles of steps, in order, at least two; the first warms up."""
    counted: tuple[int, ...]
    """Places in `steps` that are compared: not the first, and none with an evaluation in it where there are others."""
    trained_share: float
    """Share of the rollouts that are trained on, 0 to 1; the groups of the others teach nothing."""
    num_resized_by_hand: int = 0
    """Resizes that no scheduler ordered: nothing simulates them."""

    @property
    def step_s(self) -> float:
        """Mean measured seconds of the steps that are compared."""
        return self.mean_s([step.end_s - step.start_s for step in self.steps])

    def mean_s(self, step_s: Sequence[float]) -> float:
        """Mean of `step_s`, one number a step, over the steps that are compared."""
        return fsum(step_s[place] for place in self.counted) / len(self.counted)

    def sentence(self) -> str:
        """A sentence about what was taken from the run."""
        first, last = self.steps[self.counted[0]].step, self.steps[self.counted[-1]].step
        compared = f"step {first}" if first == last else f"steps {first}-{last}"
        num_completions = sum(len(step.lengths) for step in self.steps)
        return (
            f"From {self.run}: {compared} of {self.setting.num_steps} ({len(self.counted)} compared, step "
            f"{self.steps[0].step} warms up), {many(num_completions, 'completion')}, speeds and "
            f"costs as measured up to step {self.steps[-1].step}."
        )


def read_recording(run: str | Path) -> Recording:
    """The recording of a run's latest part. Raises NoRecording."""
    folder = Path(run)
    if not folder.is_dir():
        raise NoRecording(f"there is no run {folder}: write the output_dir of one")
    rows = read_jsonl(folder / "events.jsonl")
    if not rows:
        if (folder / "summary.json").exists():
            raise NoRecording(f"{folder} is a run without slots, and without events: write that of `ductile rl`")
        raise NoRecording(f"{folder} holds no run that has begun: its events.jsonl is missing or empty")
    state = RunState.of(rows)
    if state.unreadable:
        raise NoRecording(f"{folder} was recorded by another version of ductile: {state.unreadable} in events.jsonl")
    if (setting := state.setting) is None:
        raise NoRecording(
            f"{folder} was recorded without its setting: its events.jsonl has no event of that kind. Runs of "
            "`ductile rl` write one when their slots have their roles; other commands write none"
        )
    if any(isinstance(event, ServerJoined) for event in state.sentences):
        raise NoRecording(
            f"{folder} is a run that had servers among its generators, whose speed it does not know: write one whose "
            "slots generated"
        )
    profiles = state.profiles
    if len(profiles) < 2:
        steps = "1 step" if profiles else "no step"
        raise NoRecording(f"{folder} has profiles of {steps}, and needs two: the first warms up. Let it run for longer")
    steps = tuple(profiles[-(MOST_STEPS + 1) :])
    metrics = {row["step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    places = range(1, len(steps))
    quiet = tuple(place for place in places if metrics.get(steps[place].step, {}).get("eval_reward") is None)
    share = _trained_share(folder, setting, [metrics[step.step] for step in steps if step.step in metrics])
    num_resized = sum(isinstance(each, TrainerResized) for each in state.resizes)
    by_hand = num_resized if setting.policy == "static" else 0
    return Recording(folder, setting, steps, quiet or tuple(places), share, by_hand)


def recorded_scenario(recording: Recording, seed: int = 0, num_steps: int | None = None) -> Scenario:
    """The run as it was, for so many steps; None: as many as were recorded. Raises NoRecording when nothing was
    generated."""
    setting, last = recording.setting, recording.steps[-1]
    if num_steps is None:  # the last simulated step is the run's last one only where the recorded one was
        num_steps = len(recording.steps) + (last.step < setting.num_steps)
    seen = tuple(length for step in recording.steps for length in step.lengths)
    if not seen:
        raise NoRecording(f"{recording.run} has no completions in its profiles: nothing was generated")
    speeds = mean_speeds([recording.steps[place].speeds for place in recording.counted])
    return Scenario(
        placement=setting.home,
        work=WorkLoad(
            num_steps=num_steps,
            groups_per_step=setting.groups_per_step,
            group_size=setting.group_size,
            prompt_tokens=max(1, round(sum(step.prompt_tokens for step in recording.steps) / len(recording.steps))),
            max_tokens=setting.max_tokens,
            draw=recorded(seen),
            given=_dealt(recording.steps, setting, num_steps, seed),
            n_minibatches=setting.n_minibatches,
            max_async_level=setting.max_async_level,
            max_off_policy_steps=setting.max_off_policy_steps,
            on_stale=setting.on_stale,
            seq_len=setting.seq_len,
            seed=seed,
        ),
        speeds=replace(
            speeds, train=replace(speeds.train, tokens_per_s=speeds.train.tokens_per_s / recording.trained_share)
        ),
        costs=last.costs,
        limits=setting.limits,
        coalesce_s=REST_S,
        cache_block=setting.block_size,
        score=bool(setting.home.score) and isfinite(last.speeds.score_tokens_per_s),
        rules=setting.rules,
        on_gpu=setting.on_gpu,
        share_devices=setting.share_devices,
        offloads=setting.offloads,
        servers=tuple(each for each in setting.instances if not each.slots),
    )


def _dealt(steps: Sequence[StepProfile], setting: Setting, num_steps: int, seed: int) -> Mapping[str, tuple[int, ...]]:
    """Lengths by group. Groups are named as the simulated loop asks them, one example after the other."""
    lengths: list[int] = []
    for step in steps:
        of_step = list(step.lengths)
        random.Random(step.step).shuffle(of_step)
        lengths += of_step
    size, num_groups = setting.group_size, num_steps * setting.groups_per_step
    order = ExampleOrder(range(num_groups), seed)
    given: dict[str, tuple[int, ...]] = {}
    for position in range(num_groups):
        epoch, example = order[position]
        first = position * size
        given[f"train/{epoch}/{example}"] = tuple(lengths[(first + k) % len(lengths)] for k in range(size))
    return given


def _trained_share(folder: Path, setting: Setting, rows: Sequence[Mapping[str, Any]]) -> float:
    config = folder / "config.toml"
    drops = tomllib.loads(read_text(config))["orchestrator"]["drop_zero_advantage"] if config.exists() else False
    if not drops or not rows:
        return 1.0
    equal = sum(row["groups_equal"] for row in rows) / len(rows)
    return max(0.05, 1 - equal / setting.groups_per_step)
