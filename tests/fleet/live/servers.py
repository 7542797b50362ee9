"""Real `ductile inference` servers that a test kills, stops, and has fail at a point of its choice.

    servers = Servers(model, folder)
    a = servers.start("a")
    a.fault("bucket-mid", "hold")     it will wait there; a.reached("bucket-mid") once it does
    a.kill(); a.start()               another process on the same port
    servers.close()                   and nothing of them is left

What a test reads of a server it reads over HTTP, by the messages of `ductile.messages.updates`, never by the product's
own client: who asserts must not trust what is asserted on.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from ductile.messages.updates import LiveDigest, ServerState
from tests.cluster.processes import is_running
from tests.generator.fault_points import FAULTS

MARK = "DUCTILE_TEST"
"""Environment variable by which processes of a rig are found when it has ended."""
START_S = 30.0

M = TypeVar("M")


class LiveServer:
    """One server: several processes one after the other, all on one port."""

    def __init__(self, name: str, model: Path, folder: Path, mark: str, **settings: Any) -> None:
        """settings: of `InferenceRunConfig`, beside those of a tiny model on the CPU."""
        self.name, self.folder, self.mark = name, folder, mark
        self.faults, self.log = folder / "faults", folder / "output.log"
        self.faults.mkdir(parents=True, exist_ok=True)
        server = {"port": 0, **settings.pop("server", {})}
        self.api_key: str | None = server.get("api_key")
        self.config = {
            "model": {"name": str(model), "max_model_len": 512},
            "server": server,
            "max_num_seqs": 16,
            "num_blocks": 256,
            "cluster": {"device": "cpu"},
        } | settings
        self.url, self.port = "", int(server["port"])
        self.incarnations: list[str] = []
        """Of its processes, in their order, as far as anybody has asked."""
        self.pids: list[int] = []
        self.process: subprocess.Popen[str] | None = None
        self.http = httpx.Client(timeout=10, trust_env=False, verify=False)

    def __repr__(self) -> str:
        return self.name

    def begin(self) -> None:
        """Have a process; it does not serve yet."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} runs already"
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.config["server"] = self.config["server"] | {"port": self.port}
        config = self.folder / "config.json"
        config.write_text(json.dumps(self.config))
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fleet.live.faulty_server", str(config), str(os.getpid())],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    FAULTS: str(self.faults),
                    MARK: self.mark,
                    "XDG_RUNTIME_DIR": str(self.folder.parent),
                },
            )
        self.pids.append(self.process.pid)

    def serve(self) -> None:
        """Return when it serves."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), line + self.process.stdout.read() + self.log.read_text()
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])
        wait_for(self._answers, START_S, f"{self.name} serves")

    def start(self) -> "LiveServer":
        self.begin()
        self.serve()
        return self

    def _answers(self) -> bool:
        try:
            state = self.state(timeout_s=2.0)
        except httpx.HTTPError:
            return False
        if state.incarnation not in self.incarnations:
            self.incarnations.append(state.incarnation)
        return True

    # -- What becomes of it ---------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(10)
            assert self.process.stdout is not None
            self.process.stdout.close()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Another process with the folder's weights, on the same port."""
        self.kill()
        self.clear()
        self.start()

    def fault(self, point: str, what: str) -> None:
        """what: "hold" (until `clear`), "exit", "drop" (it does not reply) or "late 1.5" (it goes on later); of other
        points (`tests.fleet.live.faulty_server`) whatever they need."""
        temporary = self.faults / f".{point}"
        temporary.write_text(what)
        temporary.rename(self.faults / point)

    def reached(self, point: str) -> bool:
        """It has met the fault at the point since `clear`."""
        return (self.faults / f"{point}.reached").exists()

    def clear(self, point: str = "") -> None:
        """Take back the fault at the point, or all of them."""
        for file in [self.faults / point] if point else [*self.faults.iterdir()]:
            file.unlink(missing_ok=True)

    # -- What it says ---------------------------------------------------------------------------------------------

    def state(self, timeout_s: float = 5.0) -> ServerState:
        return self._decoded(self.get("/fleet/state", timeout_s), ServerState)

    def get(self, route: str, timeout_s: float = 5.0) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return self.http.get(self.url + route, headers=headers, timeout=timeout_s)

    def post(self, route: str, body: Any, token: str, timeout_s: float = 10.0) -> httpx.Response:
        return self.http.post(
            self.url + route,
            content=msgspec.json.encode(body),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=timeout_s,
        )

    @property
    def live(self) -> tuple[int, str]:
        """Version and digest, which the server reads anew from the weights that it samples from."""
        headers = {"Authorization": f"Bearer {self.control_token}"}
        live = self._decoded(self.http.get(f"{self.url}/weights/digest", headers=headers), LiveDigest)
        return live.version, live.digest

    @property
    def control_token(self) -> str:
        file = self.folder.parent / "ductile" / "servers" / f"127.0.0.1-{self.port}.json"
        return self.api_key or json.loads(file.read_text())["token"]

    def _decoded(self, response: httpx.Response, type: type[M]) -> M:
        assert response.status_code == 200, f"{self.name}: {response.status_code} {response.text}"
        return msgspec.json.decode(response.content, type=type)

    @property
    def open_files(self) -> list[str]:
        found = []
        for file in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(file))
        return found

    @property
    def private_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    @property
    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


class Servers:
    """All servers of a rig: they start at the same time, and none is left."""

    def __init__(self, model: Path, folder: Path, mark: str) -> None:
        self._model, self.folder, self.mark = model, folder, mark
        self.all: dict[str, LiveServer] = {}

    def __getitem__(self, name: str) -> LiveServer:
        return self.all[name]

    def start(self, *names: str, model: Path | None = None, **settings: Any) -> list[LiveServer]:
        made = [
            LiveServer(name, model or self._model, self.folder / name, self.mark, **json.loads(json.dumps(settings)))
            for name in names
        ]
        for server in made:
            self.all[server.name] = server
            server.begin()
        for server in made:
            server.serve()
        return made

    def remove(self, server: LiveServer) -> None:
        self.all.pop(server.name, None)
        server.kill()
        server.http.close()

    def close(self) -> None:
        for server in self.all.values():
            server.kill()
            server.http.close()
        left = [pid for server in self.all.values() for pid in server.pids if is_running(pid)]
        assert not left, f"servers {left} still run"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for(happened: Callable[[], bool], within_s: float, what: str) -> float:
    """Return the seconds that it took."""
    began_s = time.monotonic()
    while not happened():
        assert time.monotonic() - began_s < within_s, f"for {within_s:g} s it did not happen: {what}"
        time.sleep(0.01)
    return time.monotonic() - began_s
