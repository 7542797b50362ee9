"""The policy of docs/scheduling.md does what the page says, as it is written there."""

import re
from pathlib import Path

import pytest

from ductile.core.scheduling.facts.cluster_state import (
    BatchProgress,
    ClusterState,
    Lengths,
    Limits,
    SlotState,
    TrainerState,
    Unfinished,
)
from ductile.core.scheduling.orders import Decision, Migration, Prediction, RoleChange, roles_after, violations
from ductile.sim.run import simulate
from tests.core.scheduling.scenes import scene
from tests.sim.scenarios import scenario

PAGE = Path(__file__).parents[4] / "docs/scheduling.md"


def eager():
    found = re.search(r"<!-- tested: policy -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    names = {}
    exec(found[1], names)
    return names["Eager"]()


def test_it_is_twenty_lines():
    found = re.search(r"class Eager.*?```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in found[0].split("\n") if line.strip()]) <= 21


def test_generators_without_work_train():
    state = scene(running={2: [9], 3: [9, 9]}, trained=5)
    decision = eager().decide(state)
    assert violations(state, decision) == []
    assert [slot for slot, roles in roles_after(state, decision).items() if "train" in roles] == [0, 1, 4, 5]


def test_a_whole_run_with_it():
    result = simulate(scenario(), eager())
    assert any("nothing left to generate there" in each.decision.reason for each in result.changes)


@pytest.mark.parametrize(
    "kind",
    [
        ClusterState,
        SlotState,
        BatchProgress,
        TrainerState,
        Unfinished,
        Limits,
        Lengths,
        Decision,
        RoleChange,
        Migration,
        Prediction,
    ],
)
def test_the_tables_have_all_that_a_policy_is_told_and_may_order(kind):
    section = PAGE.read_text().partition("## Your own policy")[2].partition("## When it helps")[0]
    names = {name for name in vars(kind) if not name.startswith("_")} | {*kind.__annotations__}
    methods = {"count", "index", "moves", "migrations"}  # of tuples, and of those who carry decisions out
    missing = [name for name in sorted(names - methods) if not re.search(rf"\b{name}\b", section)]
    assert missing == []
