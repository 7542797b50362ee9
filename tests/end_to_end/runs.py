"""Runs of `ductile rl` and `ductile sft` in processes of their own, on a tiny model, for tests to watch and to kill."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ductile.observe import read_jsonl
from ductile.orchestrator.ending.interrupt import ONE_PRESS_S
from tests.cluster.processes import parent_of, processes_with, waits_for

CONFIG = """
model.name = "{model}"
seq_len = 64
max_steps = {max_steps}
output_dir = "{folder}"
cluster.device = "cpu"
cluster.component_placement = {{ actor = {train}, rollout = "{generate}", inference = {score} }}
trainer.optim.lr = 1e-2
ckpt.interval = {interval}

[orchestrator]
batch_size = 32
rollouts_per_example = 8
task = {{ type = "import", import_path = "tests.end_to_end.letters.Letters" }}
sampling.max_tokens = 8

[orchestrator.graders]
num_workers = 1
env = ["DUCTILE_TEST"]  # the mark by which `Run.ends` finds them, and whatever rewards leave

[orchestrator.eval]
num_examples = 8
sampling = {{ max_tokens = 8 }}
"""

SFT = """
model.name = "{model}"
data = {{ path = "{data}", batch_size = 48, seq_len = 64 }}
max_steps = {max_steps}
output_dir = "{folder}"
cluster.device = "cpu"
cluster.component_placement = {{ actor = {train} }}
optim.lr = 1e-3
ckpt.interval = {interval}
"""

STOPS_WITHIN_S = 60.0


def write_config(path: Path, model: Path, **changes: Any) -> Path:
    """1 train, 2 generate and 1 score slots, 3 steps, a checkpoint a step, unless told otherwise."""
    values = {"max_steps": 3, "interval": 1, "train": 0, "generate": "1-2", "score": 3, "folder": path / "run"}
    path.mkdir(exist_ok=True)
    file = path / "rl.toml"
    file.write_text(CONFIG.format(model=model, **values | changes))
    return file


def write_sft(path: Path, model: Path, **changes: Any) -> Path:
    """1 train slot, 30 steps of 48 samples of different lengths."""
    path.mkdir(exist_ok=True)
    data = path / "data.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1) * (1 + n % 6)} for n in range(96)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"max_steps": 30, "interval": 10, "train": 0, "folder": path / "run"}
    file = path / "sft.toml"
    file.write_text(SFT.format(model=model, data=data, **values | changes))
    return file


class Run:
    """One life of a run."""

    def __init__(
        self,
        config: Path,
        *flags: str,
        command: str = "rl",
        module: str = "ductile",
        terminal: bool = False,
        begin: "Callable[..., subprocess.Popen[bytes]] | None" = None,
        **environment: str,
    ) -> None:
        """terminal: on one of its own, which `self.terminal.close()` takes away. begin: starts a module with its
        arguments, elsewhere than here; takes what `subprocess.Popen` does besides."""
        self.folder = config.parent / "run"
        self.began_s = time.time()
        self.mark = f"DUCTILE_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.output = (config.parent / f"output_{value}").open("w+")
        self.terminal = Terminal(Path(self.output.name)) if terminal else None
        # A session of its own: signals to its process group are not ours. The suite itself may run under nohup.
        prefix = ["env", "--default-signal=HUP", "setsid", "--ctty"] if terminal else []
        screen = self.terminal.slave if self.terminal else self.output
        self.environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment, name: value}
        if begin is None:
            begin = lambda *words, **how: subprocess.Popen([*prefix, sys.executable, "-m", *words], **how)  # noqa: E731
        self.process = begin(
            *(module, command, "@", str(config), *flags),
            stdin=screen if self.terminal else subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
            env=self.environment,
            start_new_session=not terminal,
        )
        if self.terminal:
            os.close(self.terminal.slave)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Those of this life."""
        rows = read_jsonl(self.folder / "events.jsonl")
        return [row for row in rows if row["kind"] == kind and row["time"] >= self.began_s]

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / "metrics.jsonl")

    def until(self, condition, deadline_s: float = 150.0) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, f"the run ended before its time:\n{self.said()}"
            assert time.monotonic() < deadline, f"nothing came of it in {deadline_s} s:\n{self.said()}"
            time.sleep(0.01)

    def until_step(self, step: int) -> None:
        """Until this life has trained beyond `step`."""
        self.until(lambda: any(row["step"] >= step and row["time"] >= self.began_s for row in self.metrics()))

    def press_twice(self) -> None:
        """Press Ctrl-C, and again once the first has been heard of: two that come close are one (`ONE_PRESS_S`)."""
        self.process.send_signal(signal.SIGINT)
        self.until(lambda: "press again to stop at once" in self.said())
        time.sleep(2 * ONE_PRESS_S)
        assert self.process.poll() is None
        self.process.send_signal(signal.SIGINT)

    def pid_of(self, role: str) -> int:
        return next(event["pid"] for event in self.events("slot_started") if role in event["roles"])

    def graders(self) -> list[int]:
        """Those that serve requests, without the keepers that they live under."""
        found = [pid for pid, command in processes_with(self.mark).items() if "ductile.tasks.keeper" in command]
        parents = {parent_of(pid) for pid in found}
        return [pid for pid in found if pid not in parents]

    def ends(self, within_s: float = STOPS_WITHIN_S) -> int:
        """Wait for the exit code, and see that nothing is left running. What does not end says where it is."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            left = processes_with(self.mark)
            self.process.send_signal(signal.SIGABRT)  # `faulthandler` writes the stacks to the output
            self.process.wait(STOPS_WITHIN_S)
            raise AssertionError(f"it did not end within {within_s:g} s; {told(left)}\n{self.said()}") from None
        deadline = time.monotonic() + within_s
        while (left := processes_with(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, told(left)
        return code

    def said(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for pid in processes_with(self.mark):
            with suppress(ProcessLookupError):  # it was about to end
                os.kill(pid, signal.SIGKILL)
        self.output.close()
        if self.terminal:
            self.terminal.close()


def told(processes: Mapping[int, str]) -> str:
    """What runs, and what the kernel has each wait for."""
    lines = [f"{pid} in {waits_for(pid)}: {command}" for pid, command in processes.items()]
    return "\n".join(["what runs:", *lines])


class Terminal:
    """A pseudo terminal. What is written to it goes into `file`."""

    def __init__(self, file: Path) -> None:
        self._master, self.slave = pty.openpty()
        self._file, self._closing = file, threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As when the window is closed, or the line is cut: SIGHUP, and nothing can be written any more."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(5)
            os.close(self._master)

    def _copy(self) -> None:
        with self._file.open("ab") as file:
            while not self._closing.is_set():
                if select.select([self._master], [], [], 0.05)[0]:
                    try:
                        file.write(os.read(self._master, 65536))
                    except OSError:  # nobody has the other end any more
                        return
                    file.flush()


def checkpointed_steps(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step_")) for path in folder.glob("state/step_*/complete.json"))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
