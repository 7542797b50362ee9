"""A trainer that has lost slots goes back to its last checkpoint by itself, on the slots that are left: what it learns
from there on is what a run learns that is resumed by hand from the same checkpoint, on the same slots."""

import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.joining import HEAD, join
from tests.end_to_end.runs import Run, checkpointed_steps, summary, write_config, write_sft
from tests.end_to_end.test_scheduled_equivalence import FLAGS, GROUP_SIZE, NUM_ROLLOUTS
from tests.end_to_end.watched import DRAWS, FOLDER, trained_in
from tests.fleet.server_processes import ServerProcesses
from tests.nightly import mostly_nightly

MAX_STEPS, SAVED = 4, 2
"""The checkpoint of step SAVED is there when a slot is lost, and is the only one until the last step."""
EVERY = {"max_steps": MAX_STEPS, "interval": SAVED}
LATER = range(SAVED + 1, MAX_STEPS + 1)
ENDS_WITHIN_S = 400.0
FEW_BITS = 1e-5
"""What sums of the same numbers in another order differ in, relatively."""
SOON_SILENT = ("--cluster.heartbeat-timeout-s", "5")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FATES = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSTOP: "was silent for"}


def pids_of(run: Run) -> dict[int, int]:
    """Those of the slots' first processes."""
    return {event["slot"]: event["pid"] for event in reversed(run.events("slot_started"))}


def until_in_the_step_after_next(run: Run) -> None:
    """Return when the step after the checkpoint is done, and the next one, the last, is under way."""
    run.until(lambda: any(row["step"] == SAVED + 1 for row in run.metrics()), deadline_s=ENDS_WITHIN_S)


def resumed_by_hand(start: Any, run: Run, config: Path, folder: Path, *flags: str, **how: Any) -> Run:
    """The same run, resumed by hand from the checkpoint that it went back to."""
    folder.mkdir()
    shutil.copytree(run.folder / "state" / f"step_{SAVED}", folder / "run" / "state" / f"step_{SAVED}")
    file = folder / config.name
    file.write_text(config.read_text().replace(str(run.folder), str(folder / "run")))
    again = start(file, "--resume", *flags, **how)
    assert again.ends(within_s=ENDS_WITHIN_S) == 0, again.said()
    return again


def assert_went_back_once(run: Run, lost: list[int], left: list[int]) -> dict[str, Any]:
    """Returns the event."""
    assert run.ends(within_s=ENDS_WITHIN_S) == 0, run.said()
    assert "Traceback" not in run.said()
    [back] = run.events("went_back")
    assert (back["step"], back["lost"], back["after"]) == (SAVED, lost, left)
    assert back["sentence"].startswith(f"Trainer goes back to the checkpoint of step {SAVED} on slot")
    assert back["sentence"].endswith(f"; step {SAVED + 1} is trained anew.")
    assert [row["step"] for row in run.metrics() if row["step"]] == list(range(1, MAX_STEPS + 1))
    assert summary(run.folder)["slots"]["train"] == left
    assert checkpointed_steps(run.folder) == [SAVED, MAX_STEPS]
    return back


def assert_learned_the_same(run: Run, by_hand: Run, tolerance: float) -> None:
    ours, theirs = ({row["step"]: row for row in each.metrics()} for each in (run, by_hand))
    for step in LATER:
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert ours[step][name] == pytest.approx(theirs[step][name], rel=tolerance, abs=0.0), (step, name)


@pytest.mark.parametrize("number", mostly_nightly(FATES, signal.SIGKILL))
def test_rl_goes_on_as_if_it_were_resumed_by_hand(tmp_path: Path, model: Path, start, number: signal.Signals) -> None:
    config = write_config(tmp_path / "rl", model, **EVERY, train='"1-2"', generate="0", score=0)
    config.write_text(config.read_text().replace("letters.Letters", "letters.Even"))
    flags = (*FLAGS, *(SOON_SILENT if number == signal.SIGSTOP else ()))

    def watched(name: str) -> dict[str, str]:
        (tmp_path / name).mkdir()
        return {"module": "tests.end_to_end.watched", FOLDER: str(tmp_path / name), DRAWS: "1"}

    run = start(config, *flags, **watched("ours"))
    until_in_the_step_after_next(run)
    first = pids_of(run)
    os.kill(first[2], number)
    back = assert_went_back_once(run, [2], [1])
    assert f"on slot 1, since slot 2 (train, pid {first[2]}) {FATES[number]}" in back["sentence"]
    alone = ("--cluster.component-placement.actor", "1")
    by_hand = resumed_by_hand(start, run, config, tmp_path / "hand", *flags, *alone, **watched("theirs"))
    assert_learned_the_same(run, by_hand, FEW_BITS)

    counted = trained_in(tmp_path / "ours", [back])
    assert Counter(sample.step for sample in counted) == dict.fromkeys(range(1, MAX_STEPS + 1), NUM_ROLLOUTS)
    assert {*Counter(sample.prompt for sample in counted).values()} == {GROUP_SIZE}, "each sample counts once"
    ours, theirs = ({each.tokens for each in trained} for trained in (counted, trained_in(tmp_path / "theirs")))
    assert theirs <= ours


@pytest.mark.nightly
def test_sft_goes_on_with_the_same_bits(tmp_path: Path, model: Path, start) -> None:
    config = write_sft(tmp_path / "sft", model, **EVERY, train='"0-1"')
    run = start(config, command="sft")
    until_in_the_step_after_next(run)
    os.kill(pids_of(run)[0], signal.SIGKILL)
    assert_went_back_once(run, [0], [1])
    alone = ("--cluster.component-placement.actor", "0")
    assert_learned_the_same(
        run, resumed_by_hand(start, run, config, tmp_path / "hand", *alone, command="sft"), tolerance=0.0
    )


@pytest.mark.nightly
def test_a_node_that_dies_costs_its_two_slots_at_once(tmp_path: Path, model: Path, start) -> None:
    config = write_sft(tmp_path / "sft", model, **EVERY, train='"0-3"')
    several = ("--cluster.num-nodes", "2", "--cluster.interface", HEAD, "--cluster.start-timeout-s", "250")
    run = start(config, *several, command="sft")
    agent = join(run.folder, 1, "--wait-s", "250")
    until_in_the_step_after_next(run)
    agent.kill()
    back = assert_went_back_once(run, [2, 3], [0, 1])
    assert "was lost with node 1 (" in back["sentence"]
    assert "(slots 2-3 are lost)" in back["sentence"]
    agent.communicate(timeout=30)
    alone = ("--cluster.component-placement.actor", "0-1")
    by_hand = resumed_by_hand(start, run, config, tmp_path / "hand", *alone, command="sft")
    assert_learned_the_same(run, by_hand, FEW_BITS)


@pytest.mark.nightly
def test_servers_take_the_versions_of_a_run_that_has_gone_back(tmp_path: Path, model: Path, start) -> None:
    """The server has had a later version than the one that the run goes back to, and generates for it again."""
    config = write_config(tmp_path / "rl", model, **EVERY, train='"1-2"', generate="0", score=0)
    text = config.read_text().replace('rollout = "0", inference = 0', 'rollout = "0"')
    with ServerProcesses(model, tmp_path) as servers:
        (server,) = servers.start()
        registry = f'[inference]\nregistry = {{ type = "file", folder = "{servers.registry}" }}\n'
        config.write_text(f"{text}\n{registry}topology_change_cooldown_seconds = 0\n")
        run = start(config, "--orchestrator.max-async-level", "0")  # nothing is generated for a step before its version

        def later() -> bool:
            return any(each["version"] > SAVED for each in run.events("weights_updated"))

        run.until(later, deadline_s=ENDS_WITHIN_S)
        os.kill(pids_of(run)[2], signal.SIGKILL)
        back = assert_went_back_once(run, [2], [1])
        assert server.process.poll() is None
    updates = [event for event in run.events("weights_updated") if event["outcomes"]]
    assert all(each["outcome"] == "committed" for update in updates for each in update["outcomes"])
    before, after = ([u["version"] for u in updates if (u["time"] > back["time"]) == is_after] for is_after in (0, 1))
    assert max(before) > SAVED
    assert after[0] == SAVED, "the version of the checkpoint, though the server has had a later one"
    assert after == sorted(set(after))
    assert run.metrics()[-1]["servers"] == 1.0


@pytest.mark.nightly
def test_without_a_checkpoint_it_begins_anew_and_ends_when_no_slot_is_left(tmp_path: Path, model: Path, start) -> None:
    config = write_sft(tmp_path / "sft", model, max_steps=1000, interval=1000, train='"0-1"')
    run = start(config, command="sft")
    run.until_step(1)
    os.kill(pids_of(run)[1], signal.SIGKILL)
    run.until(lambda: run.events("went_back"), deadline_s=ENDS_WITHIN_S)
    [back] = run.events("went_back")
    assert (back["step"], back["after"]) == (0, [0])
    assert "Trainer goes back to the beginning, as there is no checkpoint yet, on slot 0, since" in back["sentence"]
    run.until(lambda: len(run.events("slot_started")) == 3, deadline_s=ENDS_WITHIN_S)
    run.until(lambda: run.events("started_anew") and run.metrics(), deadline_s=ENDS_WITHIN_S)
    pid = run.events("slot_started")[-1]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert run.ends(within_s=ENDS_WITHIN_S) == 1, run.said()
    assert f"lot 0 (train, pid {pid}) was killed by SIGKILL while" in run.said()
    assert "; the trainer cannot go back to a checkpoint: no slot that trained is left." in run.said()
