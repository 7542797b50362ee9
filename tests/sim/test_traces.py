"""Golden traces: what each policy decides in one small run, sentence by sentence, and the picture of it.

When a policy changes on purpose, `python -m tests.sim.test_traces` writes them anew; read the difference before you
commit it.
"""

from pathlib import Path

import pytest

from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.rules import Rules
from ductile.sim.run import simulate
from ductile.sim.timeline import gantt
from tests.sim.scenarios import scenario

FOLDER = Path(__file__).parent / "traces"
POLICIES = {"rules": Rules(), "rules_policies": Rules(True, True), "model": Model()}


def trace(policy, world=None):
    result = simulate(world or scenario(), policy)
    lines = [f"{each.at_s:6.1f} s  {each.decision.reason}" for each in result.changes]
    return "\n".join([*lines, "", gantt(result.spans), ""])


@pytest.mark.parametrize("name", POLICIES)
def test_the_policy_decides_what_it_decided(name):
    assert trace(POLICIES[name]) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in POLICIES:
        (FOLDER / f"{name}.txt").write_text(trace(POLICIES[name]))
