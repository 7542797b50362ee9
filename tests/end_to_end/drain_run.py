"""Slots of real runs of the quickstart's model get notice, five seconds each, and are empty in time; and a real run
takes as long as the spot planner says under the same schedule of signals: `make drains`, some ten minutes on two cores.

    30 notices     in ten runs, half of them with a scheduler: `ductile drain` or SIGTERM, of whichever slot, once or
                   twice at a time; slots come back in between. No sample is lost, none is trained twice
    the planner    a run is recorded, another one has slots taken away and given back: predicted seconds to real ones
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from ductile.cluster.cpu_cap import CapNotPermitted, CpuCap
from ductile.messages.control import RunFailed
from ductile.orchestrator.control.control import Run as LiveRun
from ductile.sim.preemptions import read_preemptions
from ductile.sim.recording import read_recording
from ductile.sim.spot import SpotPlanner
from tests.end_to_end.runs import Run
from tests.end_to_end.watched import FOLDER, trained_in

ROOT = Path(__file__).parents[2]
NUM_RUNS = int(os.environ.get("DRAIN_RUNS", "10"))
NOTICES_EACH = 3
DEADLINE_S = 5.0
BATCH, GROUP = 64, 8
CONFIG = """
model.name = "{root}/examples/quickstart/model"
seq_len = 128
max_steps = 120
output_dir = "{folder}"
cluster.device = "cpu"
cluster.drain_deadline_s = {deadline_s}
cluster.component_placement = {{ actor = 0, rollout = "1-2", inference = 3 }}
trainer.optim.lr = 1e-4
trainer.loss.type = "grpo"
ckpt.interval = 1000

[orchestrator]
batch_size = {batch}
rollouts_per_example = {group}
task = {{ type = "import", import_path = "tests.end_to_end.letters.Even" }}
drop_zero_advantage = false
sampling.max_tokens = {max_tokens}
eval.enabled = false

[orchestrator.graders]
env = ["DUCTILE_TEST"]
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_config(folder: Path, max_tokens: int = 48) -> Path:
    file = folder / "rl.toml"
    known = {"root": ROOT, "folder": folder / "run", "deadline_s": DEADLINE_S, "batch": BATCH, "group": GROUP}
    file.write_text(CONFIG.format(**known, max_tokens=max_tokens))
    return file


def pid_of(run: Run, slot: int) -> int:
    started = [*run.events("slot_started"), *run.events("slot_back")]
    return [event["pid"] for event in started if event["slot"] == slot][-1]


def give_notice(run: Run, slot: int, by_signal: bool) -> None:
    """Returns when the slot is gone, or could not be emptied."""
    num_gone = len(run.events("slot_gone"))
    if by_signal:
        os.kill(pid_of(run, slot), signal.SIGTERM)
        run.until(lambda: len(run.events("slot_gone")) > num_gone or run.events("slot_not_emptied"))
        assert not run.events("slot_not_emptied"), run.said()
        return
    try:
        LiveRun(run.folder).drain([slot], deadline_s=DEADLINE_S)
    except RunFailed as error:
        raise AssertionError(f"{error}\n{run.said()}") from error


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_slots_are_empty_in_time_and_nothing_is_lost(tmp_path: Path, start, seed: int) -> None:
    chance = random.Random(seed)
    scheduled = ["--cluster.auto-scheduler"] if seed % 2 else []
    config = write_config(tmp_path)
    run = start(config, *scheduled, module="tests.end_to_end.watched", **{FOLDER: str(tmp_path)})
    run.until_step(1)
    there, gone = {0, 1, 2, 3}, list[int]()
    for number in range(NOTICES_EACH):
        time.sleep(chance.uniform(0.1, 1.5))
        slot, by_signal = chance.choice(sorted(there)), chance.random() < 0.5
        give_notice(run, slot, by_signal)
        there.discard(slot)
        gone.append(slot)
        left = run.events("slot_gone")[-1]
        how = "SIGTERM" if by_signal else "ductile drain"
        print(f"run {seed} notice {number}: slot {slot} {left['roles']} by {how}, empty after {left['emptied_s']} s")
        if len(there) < 3 or chance.random() < 0.5:
            LiveRun(run.folder).bring_back(gone)
            there, gone = {0, 1, 2, 3}, []
    step = run.metrics()[-1]["step"]
    run.until_step(step + 2)
    run.process.send_signal(signal.SIGINT)
    assert run.ends(within_s=60) == 130, run.said()
    assert not run.events("slot_not_emptied"), run.said()
    assert len(run.events("slot_gone")) == NOTICES_EACH
    assert all(event["emptied_s"] <= DEADLINE_S for event in run.events("slot_gone"))
    assert not [*run.events("slot_lost"), *run.events("slot_restarting"), *run.events("policy_failed")], run.said()
    assert not [event for event in run.events("request_restarted") if "begins again" in event["sentence"]]
    rows = [row for row in run.metrics() if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "no optimizer step is lost"
    trained = trained_in(tmp_path)
    assert Counter(sample.step for sample in trained) == dict.fromkeys(range(1, len(rows) + 1), BATCH)
    assert {*Counter(sample.prompt for sample in trained).values()} == {GROUP}, "each sample is trained once"
    assert rows[-1]["groups_dropped"] == 0


def capped() -> list[str]:
    """Flags by which slots do not take each other's cores: then one that is gone makes the others no faster."""
    try:
        CpuCap(0.5).close()
    except CapNotPermitted:
        return []
    return ["--cluster.cpu-slot-fraction", "0.4"]


def work_s(run: Run) -> float:
    """Seconds from the end of the first step, which warms up, to the end of the last one."""
    return run.metrics()[-1]["time"] - next(row["time"] for row in run.metrics() if row["step"] == 1)


def test_a_run_takes_as_long_as_the_spot_planner_says(tmp_path: Path, start) -> None:
    num_recorded, num_steps = 8, 20
    for name in ("recorded", "real"):
        (tmp_path / name).mkdir()
    cap = capped()
    flags = [*cap, "--orchestrator.max-async-level", "0"]  # generation is never hidden behind training
    recorded = start(write_config(tmp_path / "recorded", 96), *flags, "--max-steps", str(num_recorded))
    assert recorded.ends(within_s=300) == 0, recorded.said()
    recording = read_recording(recorded.folder)
    step_s = recording.step_s
    schedule = tmp_path / "spot.csv"
    lines = [("preempt", 2, 3 * step_s), ("return", 2, 3 * step_s + max(5 * step_s, 2 * DEADLINE_S))]
    lines += [("preempt", 0, lines[-1][2] + 2 * step_s)]
    rows = [f"{at_s:.2f},{event},{slot},{DEADLINE_S:g}" for event, slot, at_s in lines]
    schedule.write_text("\n".join(["at_s,event,slots,notice_s", *rows, ""]))
    planner = SpotPlanner(recording, read_preemptions(schedule, range(4)), 1.0, num_steps)
    predicted = planner.own_case()
    assert not predicted.cut, predicted.cut
    real = start(write_config(tmp_path / "real", 96), *flags, "--max-steps", str(num_steps))
    real.until(lambda: real.events("setting"))
    began_s = real.events("setting")[-1]["time"]
    for event, slot, at_s in lines:
        time.sleep(max(0.0, began_s + at_s - time.time()))
        if event == "preempt":
            os.kill(pid_of(real, slot), signal.SIGTERM)
        else:
            LiveRun(real.folder).bring_back([slot])
    assert real.ends(within_s=400) == 0, real.said()
    assert [event["slot"] for event in real.events("slot_gone")] == [2, 0], real.said()
    rest = (num_steps - 1) / num_steps
    predicted_s, real_s, quiet_s = rest * predicted.wall_s, work_s(real), rest * num_steps * step_s
    ratio = predicted_s / real_s
    print(
        f"\nSteps 2-{num_steps}, {len(lines)} events: predicted {predicted_s:.1f} s, real {real_s:.1f} s, "
        f"ratio {ratio:.3f}; {quiet_s:.1f} s without them, slots {'are capped' if cap else 'share cores'}"
    )
    assert 0.85 <= ratio <= 1.15
