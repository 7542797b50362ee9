"""One run of each command, on this machine: what the same command as a job of SLURM, or on Ray, has to come out as. And
how long each took to start.

    started = runs.launch("sft", "here", ...)      a command to its end, timed
    runs.reference("sft")                          the run on this machine, made once
"""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ductile.observe import read_jsonl
from tests.tiny import make_model_folder

STEPS = 10
MORE_STEPS = 24
"""Steps of the reference of `sft`, for jobs that are interrupted; shorter ones are compared with its beginning."""
RUN_S = 300.0
NUM_COMPLETIONS = 20
ROOT = Path(__file__).parents[3]
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
"""Clusters of the tests ask for no token, also where this machine has one for others."""

RL = """
model.name = "{model}"
seq_len = 64
max_steps = {steps}
cluster.device = "cpu"
cluster.start_timeout_s = 250
trainer.optim.lr = 1e-3
trainer.model.compute_dtype = "float32"
ckpt.interval = 5

[orchestrator]
batch_size = 32
rollouts_per_example = 8
max_async_level = 0
max_off_policy_steps = 0
num_samples_kept = 32
task = {{ type = "import", import_path = "tests.end_to_end.letters.Letters" }}
sampling.max_tokens = 8
eval.enabled = false
"""
SFT = """
model.name = "{model}"
data = {{ path = "{data}", batch_size = 48, seq_len = 64 }}
max_steps = {steps}
cluster.device = "cpu"
cluster.start_timeout_s = 250
optim.lr = 1e-3
ckpt.interval = 5
"""
INFERENCE = """
model.name = "{model}"
cluster.device = "cpu"
"""
HERE = {
    "rl": "[deployment]\nnum_train_gpus = 1\nnum_infer_gpus = 1\n",
    "sft": "[deployment]\nnum_gpus = 2\n",
}
"""Overlays: two slots, on one node, or on as many as `cluster.num_nodes` says."""


@dataclass(frozen=True, slots=True)
class Started:
    """How long a run took from its command to its first sign of work."""

    command: str
    where: str
    slots_s: float | None
    """Until the last of its slots was there; None for servers."""
    work_s: float
    """Until its first step was done, or its first completion was there."""

    def __str__(self) -> str:
        slots = "" if self.slots_s is None else f"{self.slots_s:.1f}"
        return f"{self.command:<12}{self.where:<52}{slots:>8}{self.work_s:>20.1f}"


class Runs:
    """The folder that commands run in, with a config for each and overlays beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Started] = []
        self._references: dict[str, Path] = {}
        data, model = folder / "data.jsonl", make_model_folder(folder / "tiny")
        rows = [{"prompt": f"{n}+1=", "completion": str(n + 1) * (1 + n % 6)} for n in range(96)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.write("rl.toml", RL.format(model=model, steps=STEPS))
        self.write("sft.toml", SFT.format(model=model, data=data, steps=STEPS))
        self.write("inference.toml", INFERENCE.format(model=model))
        for command, text in HERE.items():
            self.write(f"here.{command}.toml", text)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def say(self, *words: str, within_s: float = RUN_S, **environment: str) -> str:
        """Run a command of ductile's to its end; return what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "ductile", *words],
            cwd=self.folder,
            env={**os.environ, **RAY, **environment},
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, command: str, where: str, name: str, *words: str) -> Path:
        """Run a command on two slots to its end; return its folder, `name`. where: for the table of times."""
        began_s = time.time()
        self.say(command, "@", f"{command}.toml", "@", f"here.{command}.toml", *words, "--output-dir", name)
        self.time(command, where, name, began_s)
        return self.folder / name

    def time(self, command: str, where: str, name: str, began_s: float) -> None:
        """Note how long a run took to start. began_s: Unix time of the command."""
        events, rows = read_jsonl(self.folder / name / "events.jsonl"), steps(self.folder / name)
        work_s = rows[0]["time"]
        slots_s = max(each["time"] for each in events if each["kind"] == "slot_started" and each["time"] <= work_s)
        self.started.append(Started(command, where, slots_s - began_s, work_s - began_s))

    def reference(self, command: str) -> Path:
        """Return the folder of the run on this machine."""
        if command not in self._references:
            more = ["--max-steps", str(MORE_STEPS)] if command == "sft" else []
            self._references[command] = self.run(command, "this machine, 2 slots", f"here-{command}", *more)
        return self._references[command]

    def assert_same(self, command: str, name: str, num_steps: int = STEPS) -> None:
        """The run in the folder `name` has taken the steps of the reference: the same tokens, losses to 1e-5."""
        rows, expected = steps(self.folder / name), steps(self.reference(command))[:num_steps]
        assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], abs=1e-5)
        if command == "rl":
            assert len(texts(self.folder / name)) == num_steps * 32
            assert texts(self.folder / name) == texts(self.reference(command))

    def table(self) -> str:
        head = f"{'command':<12}{'where':<52}{'slots, s':>8}{'first work, s':>20}"
        return "\n".join(["", "start-up, from the command on:", head, *map(str, self.started)])


def steps(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [row for row in read_jsonl(file) if row["step"] > 0] if file.exists() else []


def texts(run: Path) -> list[tuple[int, str, str]]:
    """Return step, prompt and completion of every rollout, in an order of their own."""
    return sorted((row["step"], row["prompt"], row["completion"]) for row in read_jsonl(run / "samples.jsonl"))


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    token_ids: list[int]
    logprobs: list[float]


def completions(url: str, key: str = "", within_s: float = RUN_S) -> tuple[list[Completion], float]:
    """Return greedy completions of `NUM_COMPLETIONS` prompts by a server, as soon as there is one at the URL; and when
    the first was there, as Unix time."""
    until, found, first_s = time.monotonic() + within_s, list[Completion](), 0.0
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=within_s) as client:
        while True:
            try:
                model = client.get("models").raise_for_status().json()["data"][0]["id"]
                break
            except httpx.TransportError:
                assert time.monotonic() < until, f"no server at {url} within {within_s:g} s"
                time.sleep(0.1)
        for number in range(NUM_COMPLETIONS):
            asked = {"model": model, "prompt": f"{number}+{number}=", "max_tokens": 24, "temperature": 0, "logprobs": 1}
            reply = client.post("completions", json={**asked, "ignore_eos": True, "return_token_ids": True})
            choice = reply.raise_for_status().json()["choices"][0]
            found.append(Completion(choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"]))
            first_s = first_s or time.time()
    return found, first_s


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]
