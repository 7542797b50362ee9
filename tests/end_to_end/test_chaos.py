"""Slots die and stand still while they change roles and hand rollouts over, at moments that a seed chooses.

The suite has one trial, and `make chaos` ten of each policy, with what happened in each. More:

    CHAOS_TRIALS=50 pytest tests/end_to_end/test_chaos.py -rA
"""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import Run, checkpointed_steps, summary
from tests.end_to_end.test_scheduling import BOTH_RULES, SCORED, write_scheduled
from tests.end_to_end.watched import FOLDER, trained_in

MAX_STEPS = 4
SAMPLES_PER_STEP, GROUP_SIZE = 32, 8
VERDICT_WITHIN_S = 120.0
"""Of a run that takes 8 s on an idle machine, is told to wait 4 s for a sign of life, and may begin again."""
HEARTBEAT_TIMEOUT_S = 4.0
FLAGS = (
    "--cluster.heartbeat-timeout-s", f"{HEARTBEAT_TIMEOUT_S:g}", "--cluster.command-timeout-s", "20",
    "--trainer.resize.timeout-s", "5", "--trainer.dist-timeout-seconds", "20",
)  # fmt: skip
POLICIES = {
    "restless": ("tests.end_to_end.moves.Restless",),
    "model": ("model", *SCORED),
    "both rules": ("rules", *BOTH_RULES, *SCORED),
}
"""With their flags."""
IN_SUITE = [("restless", 3)]
"""Killed in a commit."""

NUM_TRIALS = os.environ.get("CHAOS_TRIALS")
WHAT_HAPPENED = "was killed by SIGKILL while|was silent for|did not reply|gave no sign|made no progress"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "seed"), itertools.product(POLICIES, range(int(NUM_TRIALS))) if NUM_TRIALS else IN_SUITE
)
def test_a_slot_is_struck_in_a_change(tmp_path: Path, model: Path, start, policy: str, seed: int) -> None:
    name, *flags = POLICIES[policy]
    config = write_scheduled(tmp_path, model, name, max_steps=MAX_STEPS, interval=100)
    config.write_text(config.read_text().replace("letters.Letters", "letters.Numbered"))
    environment = {FOLDER: str(tmp_path), "STRIKE_SEED": str(seed), "RESTLESS_SEED": str(seed)}
    run = start(config, *FLAGS, *flags, module="tests.end_to_end.watched", **environment)
    code = run.ends(within_s=VERDICT_WITHIN_S)
    print(f"trial {seed} of {policy}: {verdict(run, code)}")
    assert "Traceback" not in run.said()
    assert not run.events("policy_failed")
    assert_nothing_is_left(run)
    went_back = run.events("went_back")
    assert_no_sample_is_trained_twice(tmp_path, went_back)
    strike_file = tmp_path / "strike.json"
    strike = json.loads(strike_file.read_text()) if strike_file.exists() else {"how": "never"}
    if code == 0:
        assert summary(run.folder)["steps"] == MAX_STEPS
        assert len(trained_in(tmp_path, went_back)) == MAX_STEPS * SAMPLES_PER_STEP
    if strike["how"] in ("never", "pause"):
        assert code == 0, run.said()
        assert not run.events("slot_lost")
    elif code == 0 and not noticed_in_time(run, strike):
        pass  # nobody needed the slot for the rest of the run
    elif code == 0:
        assert_says_what_happened(" ".join(event["sentence"] for event in run.events("slot_lost") + went_back), strike)
    else:
        assert code == 1
        assert_says_what_happened(run.said(), strike)
        assert ("Go on with: ductile rl @" in run.said()) == bool(checkpointed_steps(run.folder))


def assert_says_what_happened(said: str, strike: dict[str, Any]) -> None:
    assert re.search(rf"lot {strike['slot']} \([a-z, ]*pid {strike['pid']}\) ({WHAT_HAPPENED})", said), (strike, said)


def noticed_in_time(run: Run, strike: dict[str, Any]) -> bool:
    """Whether the run was still at work when the slot's end, or its silence, had to be seen."""
    notice_s = 1.0 if strike["how"] == "kill" else HEARTBEAT_TIMEOUT_S + 2.0
    return summary_written_s(run) > strike["time"] + notice_s


def summary_written_s(run: Run) -> float:
    return (run.folder / "summary.json").stat().st_mtime


def assert_nothing_is_left(run: Run) -> None:
    """`Run.ends` has looked for processes."""
    pids = [run.process.pid, *(event["pid"] for event in run.events("slot_started"))]
    assert not [path for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in pids)]


def assert_no_sample_is_trained_twice(folder: Path, went_back: Sequence[dict[str, Any]] = ()) -> None:
    trained = trained_in(folder, went_back)
    assert max(Counter(sample.prompt for sample in trained).values(), default=0) <= GROUP_SIZE
    # Two siblings may be equal by chance, if they are short.
    long = Counter((sample.tokens, sample.logprobs) for sample in trained if sample.num_completion_tokens > 3)
    assert max(long.values(), default=0) <= 1


def verdict(run: Run, code: int) -> str:
    """A line for people."""
    file = Path(run.folder.parent / "strike.json")
    struck = "never struck"
    if file.exists():
        strike = json.loads(file.read_text())
        struck = "{how} slot {slot} {roles} at {command} {nth} + {delay_s:.3f} s".format(**strike)
    told = [event["sentence"] for kind in ("slot_lost", "went_back", "died", "failed") for event in run.events(kind)]
    return f"{struck}; exit code {code}; {' / '.join(told)}"
