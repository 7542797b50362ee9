"""Runs over three machines, as far as network namespaces are machines, in which nodes are killed, cut off, drained and
joined at moments that a seed chooses: `make node-trials`, forty of them in under half an hour on two cores.

Every run ends by itself with all of its steps, each sample is trained once in the history that counts, and the losses
are those of a run of the same placement on one machine that nothing befell: on-policy, and seeded by prompt,
completions do not depend on who generates them, nor on the checkpoint from which it goes on. Where the trainer has lost
slots, its losses are also those of a run that is resumed by hand from that checkpoint on the same layout.

    NODE_TRIALS=80 python -m pytest tests/cluster/node_trials.py -s -k 17]

`make test` has one of the trials (`tests/cluster/test_node_trials.py`).
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.namespaces import Network, nodes
from tests.cluster.node_faults import MAX_STEPS, PLACEMENTS, Fault, Placement, Trial, lost_by
from tests.cluster.node_run import DEADLINE_S, NUM_NODES, NodesRun
from tests.end_to_end.runs import Run, checkpointed_steps, summary, write_config
from tests.end_to_end.watched import FOLDER, Trained, trained_in
from tests.tiny import make_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * DEADLINE_S)]

NUM_TRIALS = int(os.environ.get("NODE_TRIALS", "40"))
SAMPLES_PER_STEP, GROUP_SIZE = 32, 8
SAME, SAME_RELAYOUT = 1e-5, 1e-4
"""How far losses may be apart, and where the trainer's layout is another one."""
DRAIN_S, JOIN_S, AGAIN_S = 60.0, 60.0, 1.0
NO_SLOT = "the trainer cannot go back to a checkpoint: no slot that trained is left"

Metrics = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with nodes(NUM_NODES + 1) as network:
        yield network


@dataclass(slots=True)
class OneMachine:
    """Runs of the trials' config on this machine, which nothing befalls."""

    model: Path
    folder: Path
    _known: dict[str, Metrics] = field(default_factory=dict)

    def undisturbed(self, name: str) -> Metrics:
        """Metrics of a placement."""
        if name not in self._known:
            config = write_trial_config(self.folder / name.replace(" ", "_"), self.model, PLACEMENTS[name])
            self._known[name] = self._run(config)
        return self._known[name]

    def resumed(self, run: Run, step: int, num_train: int, folder: Path) -> Metrics:
        """Metrics of a run that is resumed by hand from a checkpoint of another one, with so many slots that train."""
        alone = Placement(tuple(range(num_train)), (num_train,), num_train + 1)
        config = write_trial_config(folder, self.model, alone)
        if not step:
            return self._run(config)
        shutil.copytree(run.folder / "state" / f"step_{step}", folder / "run" / "state" / f"step_{step}")
        return self._run(config, "--resume")

    def _run(self, config: Path, *flags: str) -> Metrics:
        run = Run(config, *flags, module="tests.end_to_end.watched", **{FOLDER: str(config.parent)})
        try:
            assert run.ends(within_s=DEADLINE_S) == 0, run.said()
        finally:
            run.close()
        return run.metrics()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> OneMachine:
    folder = tmp_path_factory.mktemp("machine")
    return OneMachine(make_model_folder(folder / "model"), folder)


@pytest.mark.parametrize("seed", range(NUM_TRIALS))
def test_a_run_goes_on(network: Network, machine: OneMachine, tmp_path: Path, seed: int) -> None:
    check(Trial.of(seed), network, machine, tmp_path)


def check(trial: Trial, network: Network, machine: OneMachine, folder: Path) -> None:
    expected = machine.undisturbed(trial.name)
    config = write_trial_config(folder, machine.model, trial.placement, "Unhurried" if trial.has_time else "Numbered")
    flags = ("--cluster.heartbeat-timeout-s", f"{trial.heartbeat_timeout_s:g}", "--cluster.start-timeout-s", "120")
    disturbed = NodesRun(network, config, folder, *flags)
    lives = [disturbed]
    try:
        happened = tuple(fault for fault in trial.faults if befall(disturbed, fault, trial.placement))
        code, run = disturbed.ends(), disturbed.run
        print(f"\n{trial}; {len(happened)} of {len(trial.faults)} happened; {story(run)}; exit code {code}")
        assert "Traceback" not in run.said(), run.said()
        assert_nodes_are_lost_once(run, happened, trial.placement)
        others = {fault.node for fault in trial.faults if fault.how != "part"}
        assert not any(code for node, code in disturbed.codes().items() if node not in others), run.said()
        went_back = run.events("went_back")
        if code:
            saved = assert_no_slot_is_left(run, code, happened, trial.placement)
            went_back.append({"time": run.events("died")[-1]["time"], "step": saved})
            disturbed.close()
            lives.append(NodesRun(network, config, folder, *flags, "--resume" if saved else "--clean"))
            run = lives[-1].run
            assert lives[-1].ends() == 0, run.said()
        assert_each_sample_is_trained_once(trained_in(folder, went_back))
        assert summary(run.folder)["steps"] == MAX_STEPS
        assert_same_losses(run.metrics(), expected, SAME_RELAYOUT if trial.relayouts else SAME)
        backs = run.events("went_back")
        if backs and not any(fault.how == "grow" for fault in happened):
            by_hand = machine.resumed(run, backs[-1]["step"], len(backs[-1]["after"]), folder / "by_hand")
            assert_same_losses([row for row in run.metrics() if row["step"] > backs[-1]["step"]], by_hand, SAME)
    finally:
        for node in range(NUM_NODES + 1):
            network.mend(node)
        for life in lives:
            life.close()


def befall(disturbed: NodesRun, fault: Fault, placement: Placement) -> bool:
    """Returns False where the run is over before."""
    folder, node = str(disturbed.run.folder), fault.node
    if not (disturbed.reach(fault.at) if fault.at else disturbed.is_at_work):
        return False
    match fault.how:
        case "kill":
            disturbed.kill(node)
        case "cut power":
            disturbed.cut_power(node)
        case "part":
            disturbed.part(node)
        case "part until lost":
            disturbed.part_until_lost(node)
        case "join":
            # In the place of another one when that is known to be lost: before, its number is refused.
            if not disturbed.until_or_end(lambda: disturbed.num_lost(node) == disturbed.num_struck[node]):
                return False
            disturbed.join(node, JOIN_S)
        case "drain":
            return disturbed.command("drain", folder, "--node", f"{node}", "--deadline-s", f"{DRAIN_S:g}") == 0
        case "grow":
            first = node * placement.per_node
            if not disturbed.until_or_end(lambda: disturbed.has_started(node, first)):
                return False
            slots = ",".join(str(slot) for slot in sorted({*placement.train, first}))
            # A run that goes back to a checkpoint cannot be asked for some seconds.
            while disturbed.is_at_work:
                if disturbed.command("resize", folder, "--train", slots) == 0:
                    return True
                time.sleep(AGAIN_S)
            return False
    return True


def write_trial_config(folder: Path, model: Path, placement: Placement, task: str = "Numbered") -> Path:
    train, generate = (",".join(map(str, slots)) for slots in (placement.train, placement.generate))
    config = write_config(folder, model, max_steps=MAX_STEPS, interval=2, train=f'"{train}"', generate=generate)
    text = config.read_text()
    for before, after in {
        ", inference = 3": "",
        "letters.Letters": f"letters.{task}",
        "ckpt.interval": 'trainer.loss.type = "grpo"\nckpt.keep_last = "None"\nckpt.interval',
        "[orchestrator]\n": "[orchestrator]\nmax_async_level = 0\ndrop_zero_advantage = false\n",
        "sampling.max_tokens = 8": "sampling = { max_tokens = 24, seed = 5 }",
        "[orchestrator.eval]\n": "[orchestrator.eval]\nenabled = false\n",
    }.items():
        assert before in text
        text = text.replace(before, after, 1)
    config.write_text(text)
    return config


def story(run: Run) -> str:
    kinds = ("node_lost", "node_joined", "slot_gone", "slot_not_emptied", "slot_restarted", "resized", "went_back")
    rows = sorted((event for kind in kinds for event in run.events(kind)), key=lambda event: event["time"])
    return " / ".join(event["sentence"] for event in rows)


def assert_nodes_are_lost_once(run: Run, happened: tuple[Fault, ...], placement: Placement) -> None:
    """With a sentence each; and nothing else is lost."""
    lost = Counter(event["node"] for event in run.events("node_lost"))
    assert lost == lost_by(happened), run.said()
    slots = {event["slot"]: event["sentence"] for event in run.events("slot_lost")}
    assert {slot // placement.per_node for slot in slots} <= {*lost}, slots
    assert all("was lost with node" in sentence for sentence in slots.values()), slots
    assert not run.events("slot_not_emptied"), run.said()


def assert_no_slot_is_left(run: Run, code: int, happened: tuple[Fault, ...], placement: Placement) -> int:
    """Returns the step of the last checkpoint."""
    saved = max(checkpointed_steps(run.folder), default=0)
    assert code == 1
    assert {slot // placement.per_node for slot in placement.train} <= {*lost_by(happened)}, run.said()
    assert NO_SLOT in run.said()
    assert ("Go on with: ductile rl @" in run.said()) == bool(saved)
    return saved


def assert_each_sample_is_trained_once(trained: Sequence[Trained]) -> None:
    assert Counter(sample.step for sample in trained) == dict.fromkeys(range(1, MAX_STEPS + 1), SAMPLES_PER_STEP)
    assert {*Counter(sample.prompt for sample in trained).values()} == {GROUP_SIZE}


def assert_same_losses(metrics: Metrics, expected: Metrics, tolerance: float) -> None:
    """Of all steps, or of the later ones."""
    rows, theirs = ({row["step"]: row for row in each if row["step"]} for each in (metrics, expected))
    assert [*rows] == list(range(MAX_STEPS - len(rows) + 1, MAX_STEPS + 1))
    assert len(rows) == len(metrics) or len(rows) == MAX_STEPS
    for step, row in rows.items():
        for name in ("trained_tokens", "loss", "reward_mean"):
            assert row[name] == pytest.approx(theirs[step][name], abs=tolerance), (step, name)
