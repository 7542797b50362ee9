"""The quickstart on one train slot and servers that are found: `make fleet-run`, some ten minutes on two cores.

A server is killed and another one joins on the way; then some steps on-policy, in which every token is compared.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ductile.observe import read_jsonl
from tests.fleet.server_processes import ServerProcesses

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
RUN_S = 1500.0
NUM_STEPS = int(os.environ.get("FLEET_RUN_STEPS", "20"))
KILLED_AFTER, JOINS_AFTER = NUM_STEPS // 4, NUM_STEPS // 2
COMPARED = "tests.end_to_end.compared_loss.compared"
GAIN = 0.25
LOGPROB_TOLERANCE = 1e-3

pytestmark = [pytest.mark.timeout(int(RUN_S) + 120)]


def write_config(folder: Path, registry: Path) -> Path:
    text = (QUICKSTART / "rl.toml").read_text()
    assert 'rollout = "1-2"\ninference = 3\n' in text
    text = text.replace('rollout = "1-2"\ninference = 3\n', "")
    text = text.replace('output_dir = "runs/quickstart"', f'output_dir = "{folder / "run"}"')
    text = text.replace('name = "examples/quickstart/model"', f'name = "{QUICKSTART / "model"}"')
    fleet = f'registry = {{ type = "file", folder = "{registry}", ttl_seconds = 3 }}\n'
    fleet += "topology_change_cooldown_seconds = 1\nhealth_check_interval_seconds = 5\nprobe_timeout_seconds = 4.5\n"
    file = folder / "rl.toml"
    file.write_text(f"{text}\n[inference]\n{fleet}")
    return file


def run(file: Path, *flags: str, meanwhile: Callable[[int], None] = lambda step: None) -> None:
    """Run to the end. meanwhile: called with the number of steps that are done, again and again."""
    words = [sys.executable, "-m", "ductile", "rl", "@", str(file), *flags]
    with (file.parent / "rl.log").open("ab") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    deadline_s = time.monotonic() + RUN_S
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline_s, "the run did not end in time"
            time.sleep(0.2)
            rows = read_jsonl(file.parent / "run" / "metrics.jsonl")
            meanwhile(rows[-1]["step"] if rows else 0)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (file.parent / "rl.log").read_text()[-4000:]


def table(title: str, rows: list[tuple[str, Any, str]]) -> None:
    print(f"\n{title}")
    for name, value, bar in rows:
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"  {name:<44}{shown:>14}   {bar}")


def test_a_run_learns_while_a_server_is_killed_and_another_one_joins(tmp_path: Path) -> None:
    with ServerProcesses(QUICKSTART / "model", tmp_path) as servers:
        first, second = servers.start(number=2)
        done: dict[str, int] = {}

        def meanwhile(step: int) -> None:
            if step >= KILLED_AFTER and "killed" not in done:
                done["killed"] = step
                first.kill()
            if step >= JOINS_AFTER and "joined" not in done:
                done["joined"] = step
                servers.start()

        file = write_config(tmp_path, servers.registry)
        flags = ("--orchestrator.on-stale", "wait", "--max-steps", str(NUM_STEPS))
        run(file, *flags, meanwhile=meanwhile)
        assert second.process.poll() is None
    rows, events = read_jsonl(tmp_path / "run" / "metrics.jsonl"), read_jsonl(tmp_path / "run" / "events.jsonl")
    of_kind = {kind: [event for event in events if event["kind"] == kind] for kind in {each["kind"] for each in events}}
    evaluated = [row["eval_reward"] for row in rows if "eval_reward" in row]
    updates = of_kind["weights_updated"]
    committed = [
        [each["instance"] for each in update["outcomes"] if each["outcome"] == "committed"] for update in updates
    ]
    joined, left = of_kind["server_joined"], [each for each in of_kind["server_left"] if each["is_lost"]]
    last = rows[-1]
    gain = evaluated[-1] - evaluated[0]
    table(
        f"GRPO of the quickstart, {NUM_STEPS} steps, servers found in a folder",
        [
            ("held-out reward, before and after", f"{evaluated[0]:.2f} {evaluated[-1]:.2f}", ""),
            ("gain", gain, f"at least {GAIN}"),
            ("servers that joined, that were lost", f"{len(joined)} {len(left)}", "3 1"),
            ("versions that went to servers", len(updates), f"at least {NUM_STEPS}"),
            ("longest update, seconds", max(update["seconds"] for update in updates), ""),
            ("longest pause of a server, seconds", max(update["pause_s"] for update in updates), ""),
            ("groups dropped", last["groups_dropped"], "0"),
            ("mean length, sampled", last["sampled_length_mean"], ""),
            ("mean length, trained", last["trained_length_mean"], "as sampled"),
            ("canaries that disagreed", len(of_kind.get("canary_disagreed", [])), "0"),
        ],
    )
    assert gain >= GAIN
    assert [each["server"] for each in left] == [first.url.removeprefix("http://")]
    assert len(joined) == 3
    assert all(committed), "a version was on no server"
    assert [update["version"] for update in updates] == sorted({update["version"] for update in updates})
    assert last["groups_dropped"] == 0
    assert last["trained_length_mean"] == pytest.approx(last["sampled_length_mean"], rel=0.02)
    assert not of_kind.get("canary_disagreed")


def test_every_token_has_the_log_prob_that_the_trainer_gives_it(tmp_path: Path) -> None:
    """On-policy, each token was sampled from the very weights under which the trainer sees it."""
    found = tmp_path / "differences.txt"
    with ServerProcesses(QUICKSTART / "model", tmp_path) as servers:
        servers.start(number=2)
        file = write_config(tmp_path, servers.registry)
        text = file.read_text().replace('type = "grpo"', f'type = "custom"\nkwargs = {{ file = "{found}" }}')
        file.write_text(
            text.replace("[trainer.loss]", '[trainer.loss]\nimport_path = "tests.end_to_end.compared_loss.compared"')
        )
        flags = ("--orchestrator.max-async-level", "0", "--max-steps", "4", "--no-orchestrator.eval.enabled")
        run(file, *flags)
    lines = [line.split() for line in found.read_text().splitlines()]
    num_tokens, worst = sum(int(number) for number, _ in lines), max(float(difference) for _, difference in lines)
    table(
        "Four steps on-policy",
        [("tokens", num_tokens, ""), ("largest difference of a log-prob", worst, f"below {LOGPROB_TOLERANCE:g}")],
    )
    assert num_tokens > 1000
    assert worst < LOGPROB_TOLERANCE
