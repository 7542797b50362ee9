"""A decision is the same on every machine, and no last bit of a measurement turns it.

`make perturbed` follows whole runs, and does the arithmetic of other processors.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.costs.fits import by_slots, line, migration_cost
from ductile.core.scheduling.policies.model import Model
from ductile.sim.run import simulate
from tests.nightly import mostly_nightly
from tests.sim.scenarios import scenario
from tests.sim.test_traces import FOLDER, POLICIES, trace

PERTURBED_RUNS = int(os.environ.get("PERTURBED_RUNS", "5"))
ONE_PART = 1e-12
PROCESSORS = {
    "without AVX-512": {"NPY_DISABLE_CPU_FEATURES": "X86_V4", "OPENBLAS_CORETYPE": "Haswell"},
    "without AVX2": {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4", "OPENBLAS_CORETYPE": "Prescott"},
    "without libm's FMA": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2"},
}


class Asked:
    """`Model`, with every state that it was asked about and what it decided."""

    def __init__(self):
        self.states, self.decisions = [], []

    def decide(self, state):
        self.states.append(state)
        self.decisions.append(Model().decide(state))
        return self.decisions[-1]


@pytest.fixture(scope="module")
def golden():
    asked = Asked()
    simulate(scenario(), asked)
    return asked


def numbers():
    """Every number that the golden runs and the fits of made-up measurements come to, to the last bit."""
    draw, found = random.Random(3), []
    points = [(n, 90.0 * n + draw.randint(0, 99), 0.01 + 0.002 * n + draw.random() / 500) for n in range(1, 60)]
    found += [
        DecodeSpeed.fit(points),
        line([(each[1], each[2]) for each in points]),
        by_slots({1: 0.1, 2: 0.0612, 3: 0.0391, 7: 0.0187}),
        migration_cost([(1e6 * each[0], each[2]) for each in points], (0.05, 1e-9)),
    ]
    asked = Asked()
    result = simulate(scenario(), asked)
    found += [each.prediction for each in asked.decisions], result.wall_s, result.step_s
    return repr(found)


@pytest.mark.nightly
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_number_is_the_same_on_another_processor(processor):
    code = "from tests.sim.test_reproducible import numbers; print(numbers())"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | PROCESSORS[processor], capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert other.stdout.strip() == numbers()


def perturbed(values, draw):
    """A dataclass of measurements, each number of it off by one part in 10^12 at the most."""
    changed = {}
    for name in values.__dataclass_fields__:
        value = getattr(values, name)
        if isinstance(value, DecodeSpeed | TrainSpeed):
            changed[name] = perturbed(value, draw)
        elif name == "rank_speeds":
            changed[name] = tuple((shape, speed * (1 + draw.uniform(-ONE_PART, ONE_PART))) for shape, speed in value)
        else:
            changed[name] = value * (1 + draw.uniform(-ONE_PART, ONE_PART))
    return replace(values, **changed)


def test_a_perturbation_reaches_every_speed_and_cost():
    draw = random.Random(0)
    speeds, costs = scenario().speeds, SwitchCosts(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert perturbed(costs, draw) != costs
    assert perturbed(speeds, draw).decode != speeds.decode
    assert perturbed(speeds, draw).train != speeds.train
    assert isinstance(perturbed(speeds, draw), Speeds)


@pytest.mark.parametrize("num_perturbations", mostly_nightly([100, 1000], 100))
def test_no_last_bit_of_a_measurement_turns_a_decision(golden, num_perturbations):
    """They are dealt to the states of the golden run in turn."""
    for seed in range(num_perturbations):
        draw, at = random.Random(seed), seed % len(golden.states)
        state = golden.states[at]
        changed = replace(state, speeds=perturbed(state.speeds, draw), costs=perturbed(state.costs, draw))
        decision, before = Model().decide(changed), golden.decisions[at]
        assert decision.orders == before.orders, seed
        assert (decision.hold_training, decision.reason) == (before.hold_training, before.reason), seed


class Perturbed:
    """A policy that is told speeds and costs which are off by so little, anew each time it is asked."""

    def __init__(self, policy, seed):
        self.policy, self.draw = policy, random.Random(seed)

    def decide(self, state):
        told = replace(state, speeds=perturbed(state.speeds, self.draw), costs=perturbed(state.costs, self.draw))
        return self.policy.decide(told)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", POLICIES)
def test_no_last_bit_of_what_is_measured_turns_a_run(name):
    for seed in range(PERTURBED_RUNS):
        assert trace(Perturbed(POLICIES[name], seed)) == (FOLDER / f"{name}.txt").read_text(), seed


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_no_last_bit_of_the_world_turns_a_run():
    """The simulated slots themselves are faster or slower by so little, and so all events come earlier or later."""
    for seed in range(PERTURBED_RUNS):
        draw, given = random.Random(seed), scenario()
        world = replace(given, speeds=perturbed(given.speeds, draw), costs=perturbed(given.costs, draw))
        assert trace(Model(), world) == (FOLDER / "model.txt").read_text(), seed
