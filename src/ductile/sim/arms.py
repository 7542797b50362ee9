"""The same work done in different ways, to compare."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ductile.config.checks.named_policy import named_policy
from ductile.config.reading.errors import did_you_mean
from ductile.config.reading.imports import ImportPathError
from ductile.core.instances.placement import Placement
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules, dims_allowed
from ductile.core.layout.choice.layout_text import compact
from ductile.core.scheduling.orders import Policy
from ductile.core.scheduling.policies.names import NAMES
from ductile.core.scheduling.policies.static import InTurns, Static
from ductile.elastic.policy_decision import BadDecision
from ductile.sim.run import Simulated, simulate
from ductile.sim.scenario import Scenario

BEST_STATIC, COLLOCATED, RULES_POLICIES = "best_static", "collocated", "rules_policies"
PLACED = (BEST_STATIC, COLLOCATED)
"""Arms that choose their placement. Collocated: all slots hold both roles; they generate, then they train."""


@dataclass(frozen=True, slots=True)
class ArmOutcome:
    name: str
    placement: Placement
    """Placement that the run began with."""
    result: Simulated

    def as_json(self) -> dict[str, Any]:
        result = self.result
        return {
            "arm": self.name,
            **{role: compact(slots) for role, slots in self.placement.by_role.items()},
            "wall_s": result.wall_s,
            "step_s": list(result.step_s),
            "tokens_per_s": result.tokens_per_s,
            "slot_seconds": dict(result.totals),
            **({"slot_seconds_by_node": result.by_node} if len(result.by_node) > 1 else {}),
            "idle_share": result.idle_share,
            "idle_by_cause": {
                cause: spent_s / (result.wall_s * result.num_slots) for cause, spent_s in result.idle.items()
            },
            "num_switches": len(result.changes),
            "switch_share": result.totals.get("switch", 0.0) / (result.wall_s * result.num_slots),
            "decisions": [{"at_s": each.at_s, "reason": each.decision.reason} for each in result.changes],
        }


def run_arms(scenario: Scenario, names: Sequence[str], *, stay: bool = False) -> Iterator[ArmOutcome]:
    """The outcome of each arm, as soon as it is there. Dynamic arms begin where the best static one does, if that is
    among the arms before them; with `stay` where the scenario begins.

    Raises ImportPathError for an arm that does not exist, before any is run.
    """
    return _run_arms(scenario, [(name, None if name in PLACED else named(name)) for name in names], stay)


def _run_arms(scenario: Scenario, arms: Sequence[tuple[str, Policy | None]], stay: bool) -> Iterator[ArmOutcome]:
    for name, policy in arms:
        if policy is not None:
            yield _run(name, scenario, policy)
        elif name == COLLOCATED and scenario.share_devices is False:
            raise ValueError(f"the arm {COLLOCATED} needs slots with memory for two roles (cluster.share_devices)")
        elif name == COLLOCATED:
            yield _run(name, scenario.at(collocate(scenario.placement, scenario.rules)), InTurns())
        else:
            outcomes = [_run(name, scenario.at(split), Static()) for split in splits(scenario)]
            best = min(outcomes, key=lambda outcome: outcome.result.wall_s)
            if not stay:
                scenario = scenario.at(best.placement)
            yield best


def named(name: str) -> Policy:
    """The policy of an arm. Raises ImportPathError."""
    if name == RULES_POLICIES:
        return named_policy("rules", pre_process=True, wait_before_last_iter=True)
    if name not in NAMES and "." not in name and ":" not in name:
        known = (*PLACED, *NAMES, RULES_POLICIES)
        near = did_you_mean(name, known)
        raise ImportPathError(
            f"{name!r} is neither an arm nor an import path: write one of {', '.join(known)}, or "
            f"package.module.Class or file.py:Class for a policy of your own.{near}"
        )
    return named_policy(name)


def splits(scenario: Scenario) -> list[Placement]:
    """The ways to divide the slots between training and generating: all of few slots, eighths of many; as far as the
    trainer has a layout on so many. At the least that of the scenario itself."""
    score = scenario.placement.score
    slots = [slot for slot in scenario.placement.slots if slot not in score]
    counts = range(1, len(slots)) if len(slots) <= 8 else sorted({len(slots) * part // 8 for part in range(1, 8)})
    allowed = [n for n in dims_allowed(len(slots), scenario.rules) if scenario.limits.min_train <= n < len(slots)]
    fitting = {max((n for n in allowed if n <= count), default=0) for count in counts} - {0}
    return [
        Placement(tuple(slots[:count]), tuple(slots[count:]), score, f"{count} of {len(slots)} slots for training")
        for count in sorted(fitting)
    ] or [scenario.placement]


def collocate(placement: Placement, rules: LayoutRules = NO_RULES) -> Placement:
    """A placement in which all slots generate, but for the scorers, and as many of them train as the rules allow."""
    slots = tuple(slot for slot in placement.slots if slot not in placement.score)
    most = max(dims_allowed(len(slots), rules), default=len(placement.train))
    return Placement(slots[:most], slots, placement.score, "all slots hold both roles")


def _run(name: str, scenario: Scenario, policy: Policy) -> ArmOutcome:
    try:
        return ArmOutcome(name, scenario.placement, simulate(scenario, policy))
    except BadDecision as error:
        raise BadDecision(f"arm {name}: the policy cannot be used: {error}") from error
