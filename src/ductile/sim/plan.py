"""What if? A recorded run on other placements, with other policies: predicted seconds of a step, beside the measured.

Its own way is predicted too, so that a reader sees how far to trust the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ductile.config.checks.named_policy import named_policy
from ductile.core.instances.placement import SPELLED, Placement, many
from ductile.core.layout.choice.layout_text import compact
from ductile.core.scheduling.facts.profile import Setting
from ductile.core.scheduling.orders import Policy
from ductile.core.scheduling.policies.names import described
from ductile.core.scheduling.policies.static import InTurns
from ductile.sim.arms import COLLOCATED, RULES_POLICIES, collocate, named, splits
from ductile.sim.recording import Recording, recorded_scenario
from ductile.sim.run import Simulated, simulate
from ductile.sim.scenario import Scenario

POLICIES = ("static", "rules", RULES_POLICIES, "model")
CONFIGURED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    RULES_POLICIES: ("rules", ("use_pre_process_policy", "use_wait_before_last_iter_policy")),
    COLLOCATED: ("in_turns", ()),
}
"""Rows of the table that are no value of `cluster.policy`: which value they are, and with which keys."""
RULES_NOTE = f'{RULES_POLICIES}: policy "rules" with use_pre_process_policy and use_wait_before_last_iter_policy.'
COLLOCATED_NOTE = f'{COLLOCATED}: policy "in_turns" with all slots in `actor,rollout`: all generate, then all train.'
NOT_COLLOCATED_NOTE = (
    f"{COLLOCATED} is left out: nothing in this run says that its GPUs have memory for the trainer's state and a "
    "generator at once."
)
WORTH = 0.01
"""Smallest share of a step that counts as a difference."""
TRUST = 0.15
"""Largest error of a run's own predicted step, as a share of it, at which predictions of other ways to run it can be
trusted: most recordings of real runs are well within it (docs/simulator.md)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    policy: str
    placement: Placement
    step_s: float
    """Predicted seconds of a step, on average over the steps that are compared."""
    idle_share: float
    switches_per_step: float

    @staticmethod
    def of(policy: str, scenario: Scenario, recording: Recording, result: Simulated) -> "Case":
        step_s, switches_per_step = recording.mean_s(result.step_s), len(result.changes) / scenario.work.num_steps
        return Case(policy, scenario.placement, step_s, result.idle_share, switches_per_step)

    @property
    def label(self) -> str:
        """ "policy model", "collocated"."""
        return COLLOCATED if self.policy == COLLOCATED else f"policy {self.policy}"

    def toml(self) -> str:
        """A config that has it, laid over the run's own."""
        name, options = CONFIGURED.get(self.policy, (self.policy, ()))
        keys = [f"auto_scheduler = {'false' if name == 'static' else 'true'}", f'policy = "{name}"']
        keys += [f"{option} = true" for option in options]
        slots = [f'{SPELLED[role]} = "{compact(held)}"' for role, held in self.placement.by_role.items() if held]
        return "\n".join(["[cluster]", *keys, "", "[cluster.component_placement]", *slots])

    @property
    def slots(self) -> str:
        """ "train 0-1, generate 2-7"."""
        if self.placement.train == self.placement.generate:
            return f"train and generate {compact(self.placement.train)}"
        return ", ".join(f"{role} {compact(slots)}" for role, slots in self.placement.by_role.items() if slots)

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            **{role: list(slots) for role, slots in self.placement.by_role.items()},
            "step_s": self.step_s,
            "idle_share": self.idle_share,
            "switches_per_step": self.switches_per_step,
        }


def own_case(recording: Recording) -> Case:
    """The run as it was, predicted. Raises ImportPathError when its policy cannot be had any more."""
    return case_of(recording, recording.setting)


def case_of(recording: Recording, setting: Setting) -> Case:
    """The recorded work on the placement, and with the policy, of some setting. Raises ImportPathError."""
    scenario = recorded_scenario(recording).at(setting.home)
    policy = named_policy(
        setting.policy,
        pre_process=setting.use_pre_process_policy,
        wait_before_last_iter=setting.use_wait_before_last_iter_policy,
    )
    options = setting.use_pre_process_policy, setting.use_wait_before_last_iter_policy
    return Case.of(described(setting.policy, *options), scenario, recording, simulate(scenario, policy))


def other_cases(recording: Recording) -> Iterator[Case]:
    """Every split of the slots with every policy, and all slots together where they may share: each as soon as it is
    there."""
    scenario = recorded_scenario(recording)
    cases: list[tuple[Placement, str, Policy]] = [
        (placement, name, named(name)) for placement in splits(scenario) for name in POLICIES
    ]
    if scenario.limits.may_share:
        cases.append((collocate(scenario.placement, scenario.rules), COLLOCATED, InTurns()))
    for placement, name, policy in cases:
        there = scenario.at(placement)
        yield Case.of(name, there, recording, simulate(there, policy))


def notes(recording: Recording) -> tuple[str, str]:
    """What the rows of the table are that are no value of `cluster.policy`."""
    return RULES_NOTE, COLLOCATED_NOTE if recording.setting.limits.may_share else NOT_COLLOCATED_NOTE


def doubts(recording: Recording, own: Case) -> list[str]:
    """Why not to rely on what is predicted from this recording: sentences."""
    found: list[str] = []
    if recording.num_resized_by_hand:
        times = many(recording.num_resized_by_hand, "time")
        found.append(
            f"The trainer was resized by hand {times} while it ran, which is not simulated: predicted is a run that "
            "stays as this one began."
        )
    error = own.step_s / recording.step_s - 1
    if abs(error) > TRUST:
        found.append(
            f"Do not rely on this table: the run's own step is predicted {abs(error):.0%} too "
            f"{'long' if error > 0 else 'short'}, and other ways may be off as far."
        )
    return found


def better(own: Case, others: Sequence[Case]) -> Case | None:
    """The fastest way, if it is worth a change; of equally fast ones, one that leaves the placement as it is."""
    best = min(others, key=lambda case: case.step_s, default=own)
    best = next((case for case in others if _alike(case, own) and case.step_s <= best.step_s * (1 + WORTH)), best)
    if best.step_s > own.step_s * (1 - WORTH):
        return None
    return replace(best, placement=own.placement) if _alike(best, own) else best


def verdict(own: Case, others: Sequence[Case]) -> str:
    """What the table comes to, in a sentence or two."""
    best = better(own, others)
    if best is None:
        said = f"nothing here is faster than this run's own way, {own.label} begun with {own.slots}"
    else:
        where = "the same placement" if _alike(best, own) else best.slots
        said = f"{best.label} on {where} saves {1 - best.step_s / own.step_s:.0%} against this run's own way"
    beside: list[str] = []
    fixed = min((case for case in others if case.policy == "static"), key=lambda case: case.step_s, default=None)
    if fixed is not None and (best is None or best.policy != "static") and own.policy not in ("static", "in_turns"):
        beside.append(f"the best split whose slots keep their roles, {fixed.slots}, would be {_than(fixed, own)}")
    collocated = next((case for case in others if case.policy == COLLOCATED), None)
    if collocated is not None and (best is None or best.policy != COLLOCATED) and own.policy != "in_turns":
        beside.append(f"collocated would be {_than(collocated, own)}")
    return f"{'; '.join([said, *beside])}."


def _than(case: Case, own: Case) -> str:
    """ "5% slower than this run"."""
    change = case.step_s / own.step_s - 1
    if abs(change) < WORTH:
        return "as fast as this run"
    return f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than this run"


def _alike(one: Case, other: Case) -> bool:
    """Return whether both have as many slots of each role."""
    return all(len(one.placement.of(role)) == len(other.placement.of(role)) for role in SPELLED)
