"""Generators and scorers are killed at moments that a seed chooses, in runs with two of each and with one of each.
Every run ends with all steps trained, and each sample once. So does one in which a generator hangs at new weights, or
refuses them.

The suite has one trial, and a scorer on two slots that loses one. All sixty, in about ten minutes, with what happened
in each: `make chaos`.
"""

import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, summary, write_config
from tests.end_to_end.test_chaos import (
    MAX_STEPS,
    SAMPLES_PER_STEP,
    VERDICT_WITHIN_S,
    assert_no_sample_is_trained_twice,
    assert_nothing_is_left,
)
from tests.end_to_end.test_scheduling import SCORED
from tests.end_to_end.watched import FAULT, FOLDER, trained_in
from tests.nightly import mostly_nightly

NUM_TRIALS = os.environ.get("KILL_TRIALS")
IN_SUITE = (3,)
"""One of each, with two optimizer steps a batch."""
COMMAND_TIMEOUT_S = 20.0
FATES = {"was killed by SIGKILL": signal.SIGKILL, r"was silent for [0-9]+ s": signal.SIGSTOP}
"""A slot's end as it is told, and the signal: it is silent for 3 s, and for what the machine needs to see it."""
LATEST_S = 2.5
"""Of a run whose steps take about this long on an idle machine."""


@dataclass(frozen=True, slots=True)
class Kill:
    role: str
    after_s: float
    """Counted from when the slots have their roles, or from the kill before it."""
    which: int
    """Place of the slot among those that have the role."""


def kills_of(seed: int) -> list[Kill]:
    chance = random.Random(seed)
    return [
        Kill(chance.choice(("generate", "score")), chance.uniform(0, LATEST_S), chance.randrange(2))
        for _ in range(chance.randint(1, 3))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(NUM_TRIALS)) if NUM_TRIALS else IN_SUITE)
def test_killed_generators_and_scorers_cost_no_step_and_no_sample(tmp_path: Path, model: Path, start, seed: int):
    places = {"generate": "1-2", "score": '"3-4"'} if seed % 2 == 0 else {"generate": "1", "score": "2"}
    config = write_config(tmp_path, model, max_steps=MAX_STEPS, interval=100, **places)
    several = "sampling.max_tokens = 40\ndrop_zero_advantage = false\n"
    several += f"n_minibatches = {1 + (seed % 4 > 1)}"
    text = config.read_text().replace("sampling.max_tokens = 8", several, 1)
    config.write_text(text.replace("letters.Letters", "letters.Numbered"))
    run = start(config, *SCORED, module="tests.end_to_end.watched", **{FOLDER: str(tmp_path)})
    run.until(lambda: run.events("setting"))
    struck = [kill for kill in kills_of(seed) if strike(run, kill)]
    code = run.ends(within_s=VERDICT_WITHIN_S)
    told = [event["sentence"] for kind in ("slot_lost", "slot_restarted") for event in run.events(kind)]
    print(f"trial {seed}: {struck}; exit code {code}; {' / '.join(told)}")
    assert code == 0, run.said()
    assert "Traceback" not in run.said()
    assert_nothing_is_left(run)
    assert_no_sample_is_trained_twice(tmp_path)
    assert summary(run.folder)["steps"] == MAX_STEPS
    assert [row["step"] for row in run.metrics()] == list(range(MAX_STEPS + 1))
    assert len(trained_in(tmp_path)) == MAX_STEPS * SAMPLES_PER_STEP
    assert not run.events("slot_given_back")


@pytest.mark.slow
@pytest.mark.parametrize("how", FATES if NUM_TRIALS else ["was killed by SIGKILL"])
def test_a_scorer_on_two_slots_that_loses_one_comes_back_on_both(tmp_path: Path, model: Path, start, how: str):
    config = write_config(tmp_path, model, max_steps=MAX_STEPS, interval=100, generate="1", score='"2-3"')
    several = "sampling.max_tokens = 40\ndrop_zero_advantage = false\n"
    text = config.read_text().replace("sampling.max_tokens = 8", several, 1)
    config.write_text(text.replace("letters.Letters", "letters.Numbered"))
    silent_s = "3" if FATES[how] == signal.SIGSTOP else "60"
    flags = (*SCORED, "--scorer.tp", "2", "--cluster.heartbeat-timeout-s", silent_s)
    run = start(config, *flags, module="tests.end_to_end.watched", **{FOLDER: str(tmp_path)})
    run.until_step(1)
    os.kill(next(event["pid"] for event in run.events("slot_started") if event["slot"] == 3), FATES[how])
    assert run.ends(within_s=VERDICT_WITHIN_S) == 0, run.said()
    assert "Traceback" not in run.said()
    assert_nothing_is_left(run)
    assert_no_sample_is_trained_twice(tmp_path)
    assert [row["step"] for row in run.metrics()] == list(range(MAX_STEPS + 1))
    assert len(trained_in(tmp_path)) == MAX_STEPS * SAMPLES_PER_STEP
    [lost] = run.events("slot_lost")
    [back] = run.events("slot_restarted")
    assert (lost["slot"], back["slot"]) == (3, 3)
    assert re.search(how, lost["sentence"])
    assert [(each["id"], each["slots"]) for each in back["began"]] == [("scorer-2-3+1", [2, 3])]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "num_generators"), mostly_nightly([("hangs", 1), ("refuses", 2)], ("refuses", 2)))
def test_a_generator_that_does_not_take_its_weights_costs_no_step(
    tmp_path: Path, model: Path, start, fault: str, num_generators: int
):
    slots = "1" if num_generators == 1 else "1-2"
    config = write_config(tmp_path, model, max_steps=3, interval=100, generate=slots, score=num_generators + 1)
    flags = ("--cluster.command-timeout-s", f"{COMMAND_TIMEOUT_S:g}", "--cluster.group-timeout-s", "120")
    run = start(config, *flags, module="tests.end_to_end.watched", **{FOLDER: str(tmp_path), FAULT: fault})
    assert run.ends(within_s=2 * VERDICT_WITHIN_S) == 0, run.said()
    assert "Traceback" not in run.said()
    assert_nothing_is_left(run)
    assert summary(run.folder)["steps"] == 3
    [lost] = run.events("slot_lost")
    said = f"did not reply to Receive within {COMMAND_TIMEOUT_S:g} s" if fault == "hangs" else "no room for new weights"
    assert said in lost["sentence"]
    assert [event["slot"] for event in run.events("slot_restarted")] == [lost["slot"]]


def strike(run: Run, kill: Kill) -> bool:
    """Returns whether the run was still at work, and the slot there."""
    time.sleep(kill.after_s)
    started = [*run.events("slot_started"), *run.events("slot_restarted")]
    pids = {event["slot"]: event["pid"] for event in started if kill.role in event["roles"]}
    pid = pids[sorted(pids)[kill.which % len(pids)]]
    if run.process.poll() is not None:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it was killed before, and is not there again yet
        return False
    return True
