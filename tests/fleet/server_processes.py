"""Real servers (`ductile inference`) that announce themselves in a folder, for tests to kill and to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

START_S = 90.0


@dataclass
class ServerProcess:
    process: "subprocess.Popen[bytes]"
    url: str = ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@dataclass
class ServerProcesses:
    """`with ServerProcesses(model, folder) as servers:`. None is left at the end."""

    model: Path
    folder: Path
    all: list[ServerProcess] = field(default_factory=list)

    @property
    def registry(self) -> Path:
        return self.folder / "registry"

    def start(self, *flags: str, number: int = 1) -> list[ServerProcess]:
        """Start so many at once, and wait until they are announced."""
        self.registry.mkdir(parents=True, exist_ok=True)
        begun = [self.begin(*flags) for _ in range(number)]
        deadline_s = time.monotonic() + START_S
        while not all(each.url for each in begun):
            leases = self._leases()
            for each in begun:
                each.url = leases.get(each.process.pid, "")
                said = self._log(each.process.pid)
                assert each.process.poll() is None, f"a server did not start: {said}"
            assert time.monotonic() < deadline_s, "servers did not announce themselves in time"
            time.sleep(0.1)
        return begun

    def __enter__(self) -> "ServerProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.all:
            each.signal(signal.SIGCONT)
            each.process.terminate()
        for each in self.all:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(10)
            each.kill()

    def begin(self, *flags: str, **environment: str) -> ServerProcess:
        """Start one, and do not wait. It announces itself in the folder, unless the flags say another place."""
        words = [sys.executable, "-m", "ductile", "inference", "--model.name", str(self.model), "--server.port", "0"]
        words += ["--cluster.device", "cpu", "--registry.ttl-seconds", "3", *flags]
        if "--registry.type" not in flags:
            words += ["--registry.type", "file", "--registry.folder", str(self.registry)]
        with (self.folder / f"server-{len(self.all)}.log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        self.all.append(ServerProcess(process))
        return self.all[-1]

    def _leases(self) -> dict[int, str]:
        found = dict[int, str]()
        for file in self.registry.glob("*.json"):
            with suppress(OSError, ValueError, KeyError):
                lease = json.loads(file.read_bytes())
                found[lease["pid"]] = lease["url"]
        return found

    def _log(self, pid: int) -> str:
        number = next(number for number, each in enumerate(self.all) if each.process.pid == pid)
        return (self.folder / f"server-{number}.log").read_text()
