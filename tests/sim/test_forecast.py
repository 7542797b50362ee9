"""What the model predicts, beside what the simulator then does."""

from itertools import accumulate

import numpy as np
import pytest

from ductile.core.scheduling.migration_targets import length_model
from ductile.core.scheduling.policies.forecast import NEVER, Plans, forecast, work
from ductile.core.scheduling.policies.model import Model
from ductile.core.scheduling.policies.static import InTurns
from ductile.sim.run import simulate
from tests.core.scheduling.scenes import scene
from tests.sim.scenarios import scenario


class Asks:
    """Follows `InTurns`, and asks the forecast when the third step begins."""

    def __init__(self):
        self.expected_s = self.asked_at_s = None

    def decide(self, state):
        if self.expected_s is None and state.batch.step == 2 and state.batch.to_start == state.batch.num_rollouts:
            self.asked_at_s = state.now_s
            self.expected_s = finish_s(state, generators=len(state.slots), trainers=0)
        return InTurns().decide(state)


class Notes:
    """Follows `Model`, and notes when it expected each step to end as it let the training begin."""

    def __init__(self):
        self.expected_s = {}

    def decide(self, state):
        decision = Model().decide(state)
        if decision.prediction is not None and decision.moves and state.trainer.held and state.unfinished:
            self.expected_s.setdefault(state.batch.step, (state.now_s, state.now_s + decision.prediction.go_s))
        return decision


def finish_s(state, generators, trainers, delay_generate_s=0.0):
    """Of one plan, followed to the end."""
    plan = Plans(*np.array([[generators, trainers, -1, generators, 0, NEVER, 0, delay_generate_s]], float).T)
    return float(forecast(state, work(state, length_model(state)), plan, len(state.slots))[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_step_takes_about_as_long_as_was_expected_at_its_start(seed):
    """Of 192 completions; with a quarter of them, whether one hits the limit is luck, and half of the step's time."""
    policy = Asks()
    result = simulate(scenario({"actor,rollout": "0-5"}, groups_per_step=48, num_steps=3, seed=seed), policy)
    took_s = result.wall_s - policy.asked_at_s
    assert policy.expected_s == pytest.approx(took_s, rel=0.2)


def test_when_training_begins_beside_generation_the_rest_takes_about_as_long_as_was_expected():
    policy = Notes()
    result = simulate(scenario({"actor,rollout": "0-5"}, groups_per_step=48, num_steps=3), policy)
    ends_s = list(accumulate(result.step_s))
    assert policy.expected_s
    for step, (asked_at_s, expected_s) in policy.expected_s.items():
        assert expected_s - asked_at_s == pytest.approx(ends_s[step] - asked_at_s, rel=0.25)


def test_others_train_while_generators_prefill_what_has_migrated():
    """There is more to train than to generate, so a short delay of generation delays nothing."""
    state = scene(running={5: [300] * 4}, ready=50, ready_tokens=40_000, roles={slot: ("train",) for slot in range(5)})
    assert finish_s(state, 1, 5, delay_generate_s=1.0) == pytest.approx(finish_s(state, 1, 5), rel=0.02)
