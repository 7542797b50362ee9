"""The published set-up is simulated on what a run on GPUs allows."""

import re
import tomllib
from dataclasses import replace

import pytest

from ductile.core.scheduling.policies.arrange import BOTH
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.core.scheduling.policies.static import InTurns
from ductile.sim.arms import splits
from ductile.sim.run import simulate
from published import INPUTS, collocated, scenario, shipped

PUBLISHED = tomllib.loads(INPUTS.read_text(encoding="utf-8"))


def small(model):
    """A part of the work."""
    made = scenario(PUBLISHED, model, 64, steps=1)
    return replace(made, work=replace(made.work, groups_per_step=12))


@pytest.mark.parametrize("policy", [Model(), Rules(True, True)], ids=["model", "rules"])
@pytest.mark.parametrize("model", PUBLISHED["model"][1:], ids=lambda model: model["name"])
def test_a_slot_that_trains_never_generates_besides(model, policy):
    moves = [move for change in simulate(small(model), policy).changes for move in change.decision.moves]
    assert moves
    assert not [move for move in moves if move.after == BOTH]


@pytest.mark.parametrize("model", PUBLISHED["model"], ids=lambda model: model["name"])
def test_only_collocated_slots_share(model):
    made = small(model)
    placed = [made, shipped(made, PUBLISHED["speeds"]), *map(made.at, splits(made))]
    assert not any(each.limits.may_share for each in placed)
    assert collocated(made, model).limits.may_share


def test_collocated_slots_pay_for_making_room():
    model = PUBLISHED["model"][0]
    made = small(model)
    free = simulate(collocated(made, {**model, "offload_s": 0.0, "onload_s": 0.0}), InTurns())
    paid = simulate(collocated(made, {**model, "offload_s": 3.0, "onload_s": 2.0}), InTurns())
    assert paid.wall_s >= free.wall_s + 5.0


def test_every_input_says_where_it_comes_from():
    """On its line, or in the comment above it."""
    marked, above = re.compile(r"\[(published|follows|estimate)\b"), ""
    for line in INPUTS.read_text(encoding="utf-8").partition("[[published]]")[0].splitlines():
        if line.startswith("#"):
            above += line
        elif "=" in line and not line.startswith("name"):
            assert marked.search(line) or marked.search(above), line
            above = "" if marked.search(line) else above
        elif not line:
            above = ""
