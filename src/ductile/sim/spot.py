"""What would a run cost on slots that may be taken away? A recorded run, to its end, under a schedule of preemptions,
on other placements and with other policies: expected time, cost, and the best mix.

The policies, the loop, the drains and the returns of slots are those of a live run, in virtual time. A slot is paid for
as long as it is there. Slots that are never taken away are the first to train.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ductile.config.checks.named_policy import named_policy
from ductile.core.instances.placement import Placement, many, slots_of
from ductile.core.scheduling.orders import Policy
from ductile.core.scheduling.policies.names import described
from ductile.core.scheduling.policies.static import InTurns
from ductile.elastic.policy_decision import BadDecision
from ductile.sim.arms import COLLOCATED, collocate, named, splits
from ductile.sim.plan import POLICIES, Case
from ductile.sim.preempted import NotSurvived
from ductile.sim.preemptions import Preemption
from ductile.sim.recording import Recording, recorded_scenario
from ductile.sim.run import Simulated, simulate
from ductile.sim.scenario import Scenario

HOUR_S = 3600.0
Preemptions = Sequence[Preemption]


@dataclass(frozen=True, slots=True)
class SpotCase:
    """One row of the table."""

    case: Case
    wall_s: float
    """Predicted seconds of the whole run; of one that is cut, 0."""
    slot_hours: float
    cost: float
    """Price of the slots for as long as they are there, in the unit of the price that was given."""
    cut: str = ""
    """Why the run would be cut before its end; "" where it would not be."""
    is_without: bool = False
    """The slots that are taken away are not used at all."""

    @property
    def label(self) -> str:
        return f"{self.case.policy}{', none taken' if self.is_without else ''}"

    def as_json(self) -> dict[str, Any]:
        row = {**self.case.as_json(), "wall_s": self.wall_s, "slot_hours": self.slot_hours, "cost": self.cost}
        return {**row, "cut": self.cut or None, "without_preempted": self.is_without}


@dataclass(frozen=True, slots=True)
class SpotPlanner:
    """Predicts a recorded run of `num_steps` steps under a schedule."""

    recording: Recording
    schedule: Preemptions
    price: float
    """Price of a slot for an hour."""
    num_steps: int

    @property
    def preempted(self) -> tuple[int, ...]:
        """Slots that are taken away at some time."""
        return tuple(sorted({slot for each in self.schedule for slot in each.slots}))

    def own_case(self) -> SpotCase:
        """Predict the run as it was configured. Raises ImportPathError when its policy cannot be had any more."""
        setting = self.recording.setting
        options = setting.use_pre_process_policy, setting.use_wait_before_last_iter_policy
        policy = named_policy(setting.policy, pre_process=options[0], wait_before_last_iter=options[1])
        return self._case(described(setting.policy, *options), self._scenario().at(setting.home), policy)

    def other_cases(self) -> Iterator[SpotCase]:
        """Predict each split of the slots with each policy, and, where that is possible, on the slots alone that are
        never taken away: each as soon as it is there."""
        scenario = self._scenario()
        home, preempted = scenario.placement, {*self.preempted}
        stable = [slot for slot in home.slots if slot not in preempted and slot not in home.score]
        others = [slot for slot in home.slots if slot in preempted and slot not in home.score]
        yield from self._cases(scenario, [*stable, *others], is_without=False)
        if others and len(stable) > 1 and preempted.isdisjoint(home.score):
            yield from self._cases(scenario, stable, is_without=True)

    def _cases(self, scenario: Scenario, slots: Sequence[int], *, is_without: bool) -> Iterator[SpotCase]:
        score = scenario.placement.score
        scenario = scenario.at(Placement(tuple(slots[:1]), tuple(slots[1:]), score, "split anew"))
        cases: list[tuple[Placement, str, Policy]] = [
            (self._renamed(placement, slots), name, named(name)) for placement in splits(scenario) for name in POLICIES
        ]
        if scenario.limits.may_share:
            cases.append((collocate(scenario.placement, scenario.rules), COLLOCATED, InTurns()))
        for placement, name, policy in cases:
            yield self._case(name, scenario.at(placement), policy, is_without)

    @staticmethod
    def _renamed(placement: Placement, slots: Sequence[int]) -> Placement:
        """A split of as many slots as these, with these in their order: `splits` takes them by number."""
        count = len(placement.train)
        return replace(placement, train=tuple(sorted(slots[:count])), generate=tuple(sorted(slots[count:])))

    def _scenario(self) -> Scenario:
        return recorded_scenario(self.recording, num_steps=self.num_steps)

    def _case(self, name: str, scenario: Scenario, policy: Policy, is_without: bool = False) -> SpotCase:
        try:
            result = simulate(scenario, policy, preemptions=self.schedule)
        except (NotSurvived, BadDecision) as error:
            return SpotCase(Case(name, scenario.placement, 0.0, 0.0, 0.0), 0.0, 0.0, 0.0, str(error), is_without)
        hours = result.slot_seconds / HOUR_S
        case = _case(name, scenario.placement, result, self.num_steps)
        return SpotCase(case, result.wall_s, hours, hours * self.price, "", is_without)

    def sentence(self) -> str:
        """Say what is predicted."""
        times = many(sum(each.event == "preempt" for each in self.schedule), "notice")
        steps, taken = many(self.num_steps, "step"), slots_of(self.preempted)
        return f"Predicted: {steps}, with {taken} taken away by {times}, at {self.price:g} a slot and hour."


def _case(name: str, placement: Placement, result: Simulated, num_steps: int) -> Case:
    return Case(name, placement, result.wall_s / num_steps, result.idle_share, len(result.changes) / num_steps)


def best_case(cases: Sequence[SpotCase]) -> SpotCase | None:
    """Return the cheapest of those that are not cut; of equally cheap ones the fastest."""
    whole = [each for each in cases if not each.cut]
    return min(whole, key=lambda each: (round(each.cost, 6), each.wall_s), default=None)


def spot_verdict(own: SpotCase, others: Sequence[SpotCase]) -> str:
    """Return what the table comes to, as a sentence."""
    best = best_case([own, *others])
    if best is None:
        return f"No way survives this schedule: {own.cut}."
    how = f"{best.case.label} begun with {best.case.slots}"
    where = f"{how}, without the slots that are taken away" if best.is_without else how
    fastest = min((each for each in (own, *others) if not each.cut), key=lambda each: each.wall_s)
    beside = ""
    if fastest.wall_s < 0.99 * best.wall_s:
        beside = f"; the fastest, {fastest.case.label} begun with {fastest.case.slots}, takes {fastest.wall_s:.0f} s"
        beside += f" and costs {fastest.cost:.4g}"
    if own.cut:
        return (
            f"The best mix is {where}: {best.wall_s:.0f} s, {best.cost:.4g}{beside}; this run's own way would be cut."
        )
    if best is own:
        return f"The best mix is this run's own way, {where}: {best.wall_s:.0f} s, {best.cost:.4g}{beside}."
    saves = 1 - best.cost / own.cost if own.cost else 0.0
    return (
        f"The best mix is {where}: {best.wall_s:.0f} s, {best.cost:.4g}, which is {saves:.0%} cheaper than this run's "
        f"own way{beside}."
    )
