"""Makes every decision of a recorded run again, with the policy that the run had, and says where one differs.

A policy is an object that may remember what it was asked, so it is asked in the run's order: anew from each start or
resume of the run, and no more once it was refused, as in the run. A decision is equal when everything in it is: orders,
reason, prediction, to the last bit.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ductile.config.checks.named_policy import named_policy
from ductile.core.instances.placement import many
from ductile.core.scheduling.facts.cluster_state import ClusterState
from ductile.core.scheduling.facts.profile import FORMAT
from ductile.core.scheduling.orders import Policy
from ductile.core.scheduling.policies.names import described
from ductile.core.scheduling.policies.rules import Home
from ductile.elastic.policy_decision import BadDecision, decide
from ductile.events.decisions import StateReader, decision_row
from ductile.observe import json_line, read_jsonl

Row = Mapping[str, Any]


class NoDecisions(ValueError):
    """There is nothing to replay. The text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that is not what it was."""

    number: int
    """Place of the decision among all of the run; the first is 1."""
    start: int
    """Start of the run in which it was made; the first is 1, each resume is one more."""
    state: ClusterState
    recorded: Row
    """The recorded decision, as fields of its line: `decision`, or `refused`."""
    replayed: Row

    @property
    def sentence(self) -> str:
        at = f"at {self.state.now_s:.1f} s of start {self.start}, in step {self.state.batch.step + 1}"
        was, now = said(self.recorded), said(self.replayed)
        return f"Decision {self.number}, {at}, has another {' and '.join(self._parts())}: it was {was}; now it is {now}"

    def _parts(self) -> list[str]:
        was, now = self.recorded.get("decision"), self.replayed.get("decision")
        if was is None or now is None:
            return ["outcome"]
        return [name.replace("_", " ") for name in sorted({*was, *now}) if was.get(name) != now.get(name)]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay. It ends at the first difference."""

    num_decisions: int
    """Decisions that were made again."""
    num_starts: int
    num_orders: int
    """Decisions among them that have orders."""
    policies: tuple[str, ...]
    difference: Difference | None
    num_refused: int = 0
    """Decisions among them in which the policy failed, as in the run: from then on it was not asked any more."""
    num_late: int = 0
    """Further decisions that were not in time in the run; they are not made again."""
    is_cut: bool = False
    """Whether the last line of the file is half written, as a killed run leaves it."""

    @property
    def sentence(self) -> str:
        if self.difference is not None:
            return self.difference.sentence
        policies = "policies" if len(self.policies) > 1 else "policy"
        return (
            f"{many(self.num_decisions, 'decision')}, {self.num_orders} of them with orders, made again by the "
            f"{policies} {'; '.join(self.policies)} in {many(self.num_starts, 'start')} of the run: all are equal."
            f"{self._besides}"
        )

    @property
    def _besides(self) -> str:
        said = ""
        if self.num_refused:
            said += f" In {self.num_refused} of them the policy failed, as it did in the run."
        if self.num_late:
            said += f" {many(self.num_late, 'decision')} more had not been in time."
        if self.is_cut:
            said += " The last line is half written, and was left out."
        return said


def replay_run(folder: Path) -> Replayed:
    """Raises NoDecisions, and ImportPathError when a policy of the user's own cannot be had any more."""
    if not folder.is_dir():
        raise NoDecisions(f"there is no run {folder}: write the output_dir of one")
    file = folder / "decisions.jsonl"
    rows = read_jsonl(file)
    if not rows:
        raise NoDecisions(
            f"{folder} has no decisions to replay: its decisions.jsonl is missing or empty. Runs with "
            "cluster.auto_scheduler write one"
        )
    try:
        return replace(replay(rows), is_cut=not file.read_bytes().endswith(b"\n"))
    except NoDecisions as error:
        raise NoDecisions(f"{file}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise NoDecisions(f"{file} cannot be read, or is no file of decisions: {error!r}") from error


def replay(rows: Iterable[Row], policy_of: Callable[[Row], Policy] = lambda named: named_policy(**named)) -> Replayed:
    """rows: lines of decisions.jsonl. policy_of: makes the policy that a start of the run names."""
    policy: Policy = Home()
    states, policies = StateReader(), dict[str, None]()
    num_decisions = num_starts = num_orders = num_refused = num_late = number = 0
    difference = None
    for row in rows:
        if (named := row.get("policy")) is not None:
            if row["version"] > FORMAT:
                raise NoDecisions(f"the decisions are of format {row['version']}, and this ductile reads {FORMAT}")
            policy, states = policy_of(named), StateReader()
            policies[described(**named)] = None
            num_starts += 1
            number = 0
        if not num_starts:
            raise NoDecisions("the decisions begin in the middle: their first line names no policy")
        number += 1
        if row.get("number", number) != number:
            raise NoDecisions(
                f"of start {num_starts}, line {number} is missing or cannot be read; the next one is {row['number']}, "
                "and what comes after a gap cannot be replayed"
            )
        state = states.state(row["state"])
        if "late" in row:
            policy = Home()
            num_late += 1
            continue
        num_decisions += 1
        try:
            replayed: Row = json.loads(json_line({"decision": decision_row(decide(policy, state)[0])}))
        except BadDecision as error:
            replayed = {"refused": str(error)}
            policy = Home()
            num_refused += 1
        num_orders += bool(replayed.get("decision", {}).get("orders"))
        recorded = {name: row[name] for name in ("decision", "refused") if name in row}
        if recorded != replayed:
            difference = Difference(num_decisions, num_starts, state, recorded, replayed)
            break
    return Replayed(num_decisions, num_starts, num_orders, tuple(policies), difference, num_refused, num_late)


def said(outcome: Row) -> str:
    """The decision in words: "slot 2 generate → train: nothing left to generate"."""
    if "refused" in outcome:
        return f"refused, as {outcome['refused']}"
    decision = outcome["decision"]
    reason = f'"{decision["reason"]}"' if decision.get("reason") else "no orders"
    return f"{reason} and training waits" if decision.get("hold_training") else reason
