"""Runs over three machines, as far as network namespaces are machines, in which nodes are killed, cut off, drained and
joined at moments that a seed chooses: `make node-trials`, forty of them.

Every run ends by itself with all of its steps, each sample is trained once in the history that counts, and the losses
are those of a run of the same placement on one machine that nothing befell: on-policy, and seeded by prompt,
completions do not depend on who generates them. `make test` has one of the trials
(`tests/cluster/test_node_trials.py`).

    NODE_TRIALS=80 python -m pytest tests/cluster/node_trials.py -s -k drained
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cluster.namespaces import Network, nodes
from tests.cluster.node_run import DEADLINE_S, NUM_NODES, SPARE, Moment, NodesRun
from tests.end_to_end.runs import Run, summary, write_config
from tests.end_to_end.watched import FOLDER, Trained, trained_in
from tests.tiny import make_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]

NUM_TRIALS = int(os.environ.get("NODE_TRIALS", "40"))
MAX_STEPS, SAMPLES_PER_STEP, GROUP_SIZE = 6, 32, 8
SAME, SAME_RESIZED = 1e-5, 1e-4
"""How far losses may be apart, and where the trainer's layout is another one."""
PATIENT_S, WATCHFUL_S = 60.0, 10.0
"""`cluster.heartbeat_timeout_s`: by far more than a partition takes, or little, where silence has to be noticed."""
DRAIN_S = 60.0

How = Literal["kill", "cut power", "part", "part until lost", "drain", "join", "grow"]
"""grow: the trainer onto the first slot of the spare node, once that has joined."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots of three nodes."""

    train: str
    generate: str
    per_node: int
    trainers: tuple[int, ...]
    """Nodes that train."""

    @property
    def generators(self) -> tuple[int, ...]:
        """Nodes that only generate, and not on the orchestrator's machine."""
        return tuple(node for node in range(1, NUM_NODES) if node not in self.trainers)


PLACEMENTS = {
    "at home": Placement("0", "1-2", 1, (0,)),
    "two": Placement("0,2", "1,3-5", 2, (0, 1)),
    "away": Placement("1", "0,2", 1, (1,)),
}


@dataclass(frozen=True, slots=True)
class Fault:
    how: How
    node: int
    at: Moment | None = None
    """None: at once."""


@dataclass(frozen=True, slots=True)
class Trial:
    seed: int
    kind: str
    placement: str
    faults: tuple[Fault, ...]

    @staticmethod
    def of(seed: int) -> "Trial":
        chance = random.Random(seed)
        kind = list(KINDS)[seed % len(KINDS)]
        return Trial(seed, kind, *KINDS[kind](chance))

    @property
    def lost(self) -> Counter[int]:
        """How often each node is lost."""
        return Counter(fault.node for fault in self.faults if fault.how in ("kill", "cut power", "part until lost"))

    @property
    def heartbeat_timeout_s(self) -> float:
        silent = any(fault.how in ("cut power", "part until lost") for fault in self.faults)
        return WATCHFUL_S if silent else PATIENT_S

    @property
    def tolerance(self) -> float:
        trainers = PLACEMENTS[self.placement].trainers
        moved = any(fault.how == "grow" or (fault.how == "drain" and fault.node in trainers) for fault in self.faults)
        return SAME_RESIZED if moved else SAME

    def __str__(self) -> str:
        faults = ", ".join(f"{fault.how} {fault.node} at {fault.at or 'once'}" for fault in self.faults)
        return f"trial {self.seed}, {self.kind}, {self.placement}: {faults}"


def moment(chance: random.Random) -> Moment:
    """While it generates, trains or publishes, with two steps to go at least."""
    command, most = chance.choice(
        (("Generate", 4), ("Generate", 4), ("ForwardBackward", 12), ("OptimStep", 1), ("Publish", 1), ("Receive", 3))
    )
    return Moment(chance.randrange(MAX_STEPS - 2), command, chance.randint(1, most), 0.1 * chance.random() ** 2)


Plan = tuple[str, tuple[Fault, ...]]


def generator_gone(how: How, *then: How) -> Callable[[random.Random], Plan]:
    """A node that only generates is struck; afterwards the same one."""

    def plan(chance: random.Random) -> Plan:
        placement = chance.choice(list(PLACEMENTS))
        node = chance.choice(PLACEMENTS[placement].generators)
        return placement, (Fault(how, node, moment(chance)), *(Fault(each, node) for each in then))

    return plan


def any_node(how: How, first: int = 1) -> Callable[[random.Random], Plan]:
    def plan(chance: random.Random) -> Plan:
        placement = chance.choice(list(PLACEMENTS))
        return placement, (Fault(how, chance.randrange(first, NUM_NODES), moment(chance)),)

    return plan


def grown(chance: random.Random) -> Plan:
    placement = chance.choice(list(PLACEMENTS))
    return placement, (Fault("join", SPARE, moment(chance)), Fault("grow", SPARE))


def combined(chance: random.Random) -> Plan:
    placement = chance.choice(list(PLACEMENTS))
    generating = chance.choice(PLACEMENTS[placement].generators)
    return placement, chance.choice(
        (
            (
                Fault("part", chance.randrange(NUM_NODES), moment(chance)),
                Fault("drain", chance.randrange(1, NUM_NODES)),
            ),
            (Fault("join", SPARE, moment(chance)), Fault("kill", generating, moment(chance)), Fault("grow", SPARE)),
            (Fault("drain", generating, moment(chance)), Fault("join", SPARE), Fault("part", SPARE)),
            (Fault("part", 0, moment(chance)), Fault("kill", generating)),
        )
    )


KINDS: Mapping[str, Callable[[random.Random], Plan]] = {
    "a generators' node is killed": generator_gone("kill"),
    "a node is drained": any_node("drain"),
    "a partition of 5 s": any_node("part", 0),
    "a node joins and trains": grown,
    "the power of a generators' node is cut": generator_gone("cut power"),
    "a node is killed and another one joins in its place": generator_gone("kill", "join"),
    "a partition until the node is lost, and it joins again": generator_gone("part until lost", "join"),
    "several": combined,
}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with nodes(NUM_NODES + 1) as network:
        yield network


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str], Sequence[Mapping[str, Any]]]:
    """Metrics of a run of a placement on one machine that nothing befalls."""
    known: dict[str, Sequence[Mapping[str, Any]]] = {}

    def metrics(placement: str) -> Sequence[Mapping[str, Any]]:
        if placement not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            config = write_trial_config(folder, model, placement)
            run = Run(config, module="tests.end_to_end.watched", **{FOLDER: str(folder)})
            try:
                assert run.ends(within_s=DEADLINE_S) == 0, run.said()
            finally:
                run.close()
            known[placement] = run.metrics()
        return known[placement]

    return metrics


@pytest.mark.parametrize("seed", range(NUM_TRIALS))
def test_a_run_goes_on(network: Network, model: Path, undisturbed, tmp_path: Path, seed: int) -> None:
    check(Trial.of(seed), network, model, undisturbed, tmp_path)


def check(trial: Trial, network: Network, model: Path, undisturbed, folder: Path) -> None:
    expected = undisturbed(trial.placement)
    config = write_trial_config(folder, model, trial.placement)
    flags = ("--cluster.heartbeat-timeout-s", f"{trial.heartbeat_timeout_s:g}", "--cluster.start-timeout-s", "120")
    disturbed = NodesRun(network, config, folder, *flags)
    try:
        happened = [fault for fault in trial.faults if befall(disturbed, fault, trial)]
        code = disturbed.ends()
        run, kinds = disturbed.run, ("node_lost", "node_joined", "slot_gone", "slot_not_emptied", "resized")
        told = [event["sentence"] for kind in kinds for event in run.events(kind)]
        print(f"\n{trial}; {len(happened)} of {len(trial.faults)} happened, exit code {code}; {' / '.join(told)}")
        assert code == 0, run.said()
        assert "Traceback" not in run.said(), run.said()
        assert_nodes_are_lost_once(run, trial, happened)
        assert_each_sample_is_trained_once(trained_in(folder))
        assert summary(run.folder)["steps"] == MAX_STEPS
        assert_same_losses(run.metrics(), expected, trial.tolerance)
    finally:
        for node in range(NUM_NODES + 1):
            network.mend(node)
        disturbed.close()


def befall(disturbed: NodesRun, fault: Fault, trial: Trial) -> bool:
    """Returns False where the run is over before."""
    folder = str(disturbed.run.folder)
    if not (disturbed.reach(fault.at) if fault.at else disturbed.is_at_work):
        return False
    match fault.how:
        case "kill":
            disturbed.kill(fault.node)
        case "cut power":
            disturbed.cut_power(fault.node)
        case "part":
            disturbed.part(fault.node)
        case "part until lost":
            disturbed.part_until_lost(fault.node)
        case "join":
            disturbed.join(fault.node)
        case "drain":
            return disturbed.command("drain", folder, "--node", str(fault.node), "--deadline-s", f"{DRAIN_S:g}") == 0
        case "grow":
            placement = PLACEMENTS[trial.placement]
            first = fault.node * placement.per_node
            if not disturbed.until_or_end(lambda: first in disturbed.started_slots):
                return False
            return disturbed.command("resize", folder, "--train", f"{placement.train},{first}") == 0
    return True


def write_trial_config(folder: Path, model: Path, placement: str) -> Path:
    slots = PLACEMENTS[placement]
    train, generate = f'"{slots.train}"', slots.generate
    config = write_config(folder, model, max_steps=MAX_STEPS, interval=2, train=train, generate=generate)
    text = config.read_text().replace(", inference = 3", "").replace("letters.Letters", "letters.Numbered")
    text = text.replace("max_steps =", 'trainer.loss.type = "grpo"\nmax_steps =', 1)
    text = text.replace("[orchestrator]\n", "[orchestrator]\nmax_async_level = 0\ndrop_zero_advantage = false\n", 1)
    text = text.replace("sampling.max_tokens = 8", "sampling = { max_tokens = 24, seed = 5 }", 1)
    config.write_text(text.replace("[orchestrator.eval]\n", "[orchestrator.eval]\nenabled = false\n", 1))
    return config


def assert_nodes_are_lost_once(run: Run, trial: Trial, happened: Sequence[Fault]) -> None:
    """And nothing else is."""
    lost = Counter(event["node"] for event in run.events("node_lost"))
    assert lost == Counter(
        {node: num for node, num in trial.lost.items() if any(node == each.node for each in happened)}
    )
    per_node = PLACEMENTS[trial.placement].per_node
    assert {event["slot"] // per_node for event in run.events("slot_lost")} <= {*lost}
    assert all("was lost with node" in event["sentence"] for event in run.events("slot_lost"))
    assert not run.events("slot_not_emptied")


def assert_each_sample_is_trained_once(trained: Sequence[Trained]) -> None:
    of_each_prompt = Counter(sample.prompt for sample in trained)
    assert set(of_each_prompt.values()) == {GROUP_SIZE}
    assert Counter(sample.step for sample in trained) == dict.fromkeys(range(1, MAX_STEPS + 1), SAMPLES_PER_STEP)


def assert_same_losses(
    metrics: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], tolerance: float
) -> None:
    rows, theirs = ([row for row in each if row["step"]] for each in (metrics, expected))
    assert [row["step"] for row in rows] == [row["step"] for row in theirs] == list(range(1, MAX_STEPS + 1))
    for row, other in zip(rows, theirs, strict=True):
        assert row["trained_tokens"] == other["trained_tokens"], row["step"]
        assert row["loss"] == pytest.approx(other["loss"], abs=tolerance), row["step"]
        assert row["reward_mean"] == pytest.approx(other["reward_mean"], abs=tolerance), row["step"]
