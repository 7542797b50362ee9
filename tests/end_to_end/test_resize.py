"""Runs that are resized from a shell while they train, and what one sees of it."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ductile.messages.control import RunFailed
from ductile.orchestrator.control.control import Run as LiveRun
from tests.end_to_end.runs import Run, checkpointed_steps, summary, write_config, write_sft

NUM_STEPS = 20


def ductile(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ductile", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def resize(run: Run, train: str, *words: object) -> str:
    done = ductile("resize", "--run", run.folder, "--train", train, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_sft_learns_the_same_on_whatever_slots(tmp_path: Path, model: Path, start):
    plain = start(write_sft(tmp_path / "plain", model, max_steps=NUM_STEPS), command="sft")
    assert plain.ends(within_s=90) == 0, plain.said()
    run = start(write_sft(tmp_path / "resized", model, max_steps=NUM_STEPS), command="sft")
    for step, train, way in [
        (3, [0, 1, 2], "from slot 0 to slots 0-2"),
        (8, [3, 5], "from slots 0-2 to slots 3,5"),
        (13, [0, 3], "from slots 3,5 to slots 0,3"),
    ]:
        run.until_step(step)
        assert LiveRun(run.folder).resize(train).sentence.startswith(f"Trainer resized {way} in ")
    assert run.ends(within_s=90) == 0, run.said()
    assert [row["step"] for row in run.metrics()] == list(range(1, NUM_STEPS + 1))
    for expected, row in zip(plain.metrics(), run.metrics(), strict=True):
        assert row["tokens"] == expected["tokens"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    events = run.events("resized")
    assert [event["after"] for event in events] == [[0, 1, 2], [3, 5], [3, 0]], "slot 3 keeps what it has"
    assert all(
        event["took_s"] > event["pause_s"] > 0 and event["num_bytes"] > 0 and event["carrier"] for event in events
    )
    last = run.metrics()[-1]
    assert (last["train_slots"], last["resizes"]) == (2, 3)
    assert summary(run.folder)["slots"] == {"train": [3, 0]}, "those of the end"
    assert sum(row["seconds/resize"] for row in run.metrics()) == pytest.approx(sum(e["pause_s"] for e in events))


@pytest.mark.slow
@pytest.mark.nightly
def test_sft_learns_the_same_in_whatever_layout(tmp_path: Path, model: Path, start):
    """By text, by number of slots, by what the config lists; and what cannot be is refused in words."""
    max_steps = 60  # many more than are resized: a command may take as long to start as several steps
    plain = start(write_sft(tmp_path / "plain", model, max_steps=max_steps), command="sft")
    assert plain.ends(within_s=90) == 0, plain.said()
    listed = ("--resize.layouts", '["pp=2,dp_shard=1,tp=2"]')
    run = start(write_sft(tmp_path / "resized", model, max_steps=max_steps), *listed, command="sft")
    for step, words, way in [
        (2, ("--train", "0-3"), "from slot 0 to slots 0-3 as pp 2 · tp 2"),
        (5, ("--layout", "tp=2"), "from slots 0-3 as pp 2 · tp 2 to slots 0-3 as dp_shard 2 · tp 2"),
        (8, ("--layout", "cp=2,dp_shard=2"), "from slots 0-3 as dp_shard 2 · tp 2 to slots 0-3 as dp_shard 2 · cp 2"),
        (11, ("--train", "0-2"), "from slots 0-3 as dp_shard 2 · cp 2 to slots 0-2"),
        (14, ("--train", "1,2"), "from slots 0-2 to slots 1-2 as cp 2"),
    ]:
        run.until_step(step)
        done = ductile("resize", run.folder, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(f"Trainer resized {way} in "), done.stdout
    refused = ductile("resize", run.folder, "--layout", "tp=3,dp=2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the layout 'tp=3,dp=2': 'dp' is no axis: write dp_shard (shards of a copy)" in refused.stderr.replace(
        "\n", " "
    )
    assert "trainer: slots 1-2 as cp 2" in ductile("status", run.folder).stdout
    run.until_step(run.metrics()[-1]["step"] + 2)
    run.process.send_signal(signal.SIGINT)
    assert run.ends(within_s=90) == 130, run.said()
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["train_slots"] == 2, "steps in the last layout are among those compared"
    for expected, row in zip(plain.metrics()[: len(rows)], rows, strict=True):
        assert row["tokens"] == expected["tokens"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_rl_is_resized_in_the_middle_of_its_loop(tmp_path: Path, model: Path, start):
    config = write_config(tmp_path, model, max_steps=10_000, interval=5_000)
    run = start(config)
    run.until_step(1)
    control = tmp_path / "run" / "control.json"
    assert stat.S_IMODE(control.stat().st_mode) == 0o600
    assert "from slot 0 to slots 0,4-5" in resize(run, "0,4-5")
    refused = ductile("resize", run.folder, "--layout", "tp=3,dp=2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the layout 'tp=3,dp=2': 'dp' is no axis" in refused.stderr.replace("\n", " ")
    seen = ductile("status", "--run", run.folder)
    assert "trainer: slots 0,4-5" in seen.stdout
    known = json.loads(ductile("status", "--run", run.folder, "--json").stdout)
    assert (known["command"], known["epoch"], known["max_steps"]) == ("rl", 1, 10_000)
    roles = {slot["slot"]: slot["roles"] for slot in known["slots"]}
    assert roles == {0: ["train"], 1: ["generate"], 2: ["generate"], 3: ["score"], 4: ["train"], 5: ["train"]}
    assert all(sum(slot["seconds"].values()) > 0 for slot in known["slots"])
    live = LiveRun(run.folder)
    assert live.resize(train=[5, 1], timeout_s=60).outcome == "resized", "a slot may train and generate"
    assert set(live.status().trainer.slots) == {1, 5}
    assert [set(change.after) for change in live.status().changes] == [{0, 4, 5}, {1, 5}]
    drained = ductile("drain", run.folder, "--slot", "2", "--deadline-s", "60")
    assert (drained.returncode, drained.stdout[:14]) == (0, "Slot 2 is gone"), drained.stdout + drained.stderr
    pids = {event["slot"]: event["pid"] for event in run.events("slot_started")}
    os.kill(pids[5], signal.SIGTERM)
    run.until(lambda: {event["slot"] for event in run.events("slot_gone")} == {2, 5})
    known = live.status()
    assert (known.trainer.slots, known.lost) == ((1,), {})
    assert {slot.slot for slot in known.slots if slot.doing == "gone"} == {2, 5}
    with pytest.raises(RunFailed, match="slot 2 does not run"):
        live.drain([2])
    assert live.bring_back([2]).sentence == "Slot 2 is back."
    assert next(slot.roles for slot in live.status().slots if slot.slot == 2) == ("generate",)
    run.until_step(run.metrics()[-1]["step"] + 2)
    run.process.send_signal(signal.SIGINT)
    assert run.ends(within_s=30) == 130, run.said()
    last = run.metrics()[-1]["step"]
    assert [row["step"] for row in run.metrics()] == list(range(last + 1))
    assert checkpointed_steps(run.folder)[-1] == last
    assert not [*run.events("slot_lost"), *run.events("slot_not_emptied"), *run.events("request_restarted")]
    assert not control.exists()
    gone = ductile("status", "--run", run.folder)
    assert (gone.returncode, "no run is at work" in gone.stderr.lower()) == (2, True)


@pytest.mark.slow
def test_after_a_resize_deaths_count_by_what_a_slot_does_now(tmp_path: Path, model: Path, start):
    config = write_sft(tmp_path, model, max_steps=100000, interval=1)
    run = start(config, "--cluster.max-restarts", "0", command="sft")
    run.until_step(1)
    resize(run, "1-2")
    pids = {event["slot"]: event["pid"] for event in run.events("slot_started")}
    os.kill(pids[0], signal.SIGKILL)  # it has left
    run.until(lambda: run.events("slot_lost"))
    step = run.metrics()[-1]["step"]
    run.until_step(step + 2)
    assert "from slots 1-2 to slots 0-1" in resize(run, "0-1"), "it starts anew"
    os.kill(pids[1], signal.SIGKILL)
    assert run.ends() == 1
    assert f"slot 1 (train, pid {pids[1]}) was killed by SIGKILL" in run.said().replace("Slot 1", "slot 1")
    stale = ductile("resize", "--run", run.folder, "--train", "0-1")
    assert (stale.returncode, "no run is at work" in stale.stderr.lower()) == (2, True)
    saved = max(checkpointed_steps(run.folder))
    again = start(config, "--resume", "--max-steps", str(saved + 2), command="sft")
    assert again.ends(within_s=60) == 0, again.said()
    assert summary(run.folder)["slots"] == {"train": [0]}, "as the config says"
    assert [row["step"] for row in again.metrics()] == list(range(1, saved + 3))
