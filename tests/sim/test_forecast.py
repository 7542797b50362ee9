"""What the model predicts, beside what the simulator then does."""

import numpy as np
import pytest

from ductile.core.cluster.handoff import length_model
from ductile.core.cluster.policies.forecast import NEVER, Plans, forecast, work
from ductile.core.cluster.policies.static import InTurns
from ductile.sim.run import simulate
from tests.sim.scenarios import scenario


class Asks:
    """Follows `InTurns`, and asks the forecast when the third step begins."""

    def __init__(self):
        self.expected_s = self.asked_at_s = None

    def decide(self, state):
        if self.expected_s is None and state.batch.step == 2 and state.batch.to_start == state.batch.num_rollouts:
            self.asked_at_s = state.now_s
            num_slots = len(state.slots)
            plan = Plans(*np.array([[num_slots, 0, -1, num_slots, 0, NEVER, 0, 0]], float).T)
            self.expected_s = float(forecast(state, work(state, length_model(state)), plan, num_slots)[0])
        return InTurns().decide(state)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_step_takes_about_as_long_as_was_expected_at_its_start(seed):
    """Of 192 answers; with a quarter of them, whether one hits the limit is luck, and half of the step's time."""
    policy = Asks()
    result = simulate(scenario({"actor,rollout": "0-5"}, groups_per_step=48, num_steps=3, seed=seed), policy)
    took_s = result.wall_s - policy.asked_at_s
    assert policy.expected_s == pytest.approx(took_s, rel=0.2)
