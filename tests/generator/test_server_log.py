"""A server's log tells what the server does, a line each, and no secrets."""

import json
import re
import signal
import time
from pathlib import Path

import httpx

from ductile.generator.server.pause_gate import LONG_S
from ductile.messages.updates import EndUpdate, PauseServer, ResumeServer
from ductile.model.checkpoint import load_model
from tests.generator.conftest import Family
from tests.generator.test_serve import server
from tests.generator.weight_giver import Giver, perturbed

WRONG = "a-token-that-is-wrong"
TOLD = [
    "INFO listening at URL: model MODEL, version 0 of the weights (digest HEX), N sequences at a time",
    "INFO update begins: version 1 by http (epoch 1), N buckets",
    "INFO update committed: version 1 by http (epoch 1) is live after N s",
    "INFO update begins: version 2 by http (epoch 2), N buckets",
    "WARNING update aborted: version 2 by http (epoch 2), after N s: it was aborted",
    "INFO paused for N s by now (epoch 3, mode keep): it goes on when it is resumed, or N s after all have stopped",
    "INFO resumed after a pause of N s",
    "WARNING nobody has resumed this server: the lease of its pause is over",
    "WARNING refused: POST '/weights/commit' of CLIENT: this server needs its control token for this: "
    "Authorization: Bearer <token>, which is in FILE",
    "INFO leaving: nothing new is taken, and 0 sequences that run and 0 that wait have N s to end",
    "INFO shutting down: connections are closed",
]


def test_what_a_server_does_is_in_its_log(qwen3: Family, tmp_path: Path) -> None:
    with server(qwen3.folder, tmp_path) as (url, process):
        (file,) = (tmp_path / "ductile" / "servers").iterdir()
        token = json.loads(file.read_text())["token"]
        weights = {name: each.data for name, each in load_model(qwen3.folder).named_parameters()}
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
            one = Giver(client, perturbed(weights, 1), 1, epoch=1)
            one.give()
            other = Giver(client, perturbed(weights, 2), 2, epoch=2)
            assert other.prepare()[0] == 200
            assert other.end("abort")[0] == 200
            assert one.post("/pause", PauseServer(3, "keep", 30.0))[0] == 200
            time.sleep(1.2 * LONG_S)
            assert one.post("/resume", ResumeServer(3))[0] == 200
            assert one.post("/pause", PauseServer(3, "keep", 0.01))[0] == 200
            while client.get("/fleet/state").json()["paused"]:
                time.sleep(0.01)
            client.headers["Authorization"] = f"Bearer {WRONG}"
            assert one.post("/weights/commit", EndUpdate(one.update.update_id, 3, 2))[0] == 401
            process.send_signal(signal.SIGTERM)
            while not client.get("/fleet/state").json()["leaving"]:  # it goes once its fleet has heard that it does
                time.sleep(0.01)
        assert process.wait(60) == 0
        assert process.stdout is not None
        log = process.stdout.read()
    assert token not in log
    assert WRONG not in log
    assert [plain(line, url, qwen3.folder, file) for line in log.splitlines()] == TOLD


def plain(line: str, url: str, model: Path, file: Path) -> str:
    """Return a line without what differs from run to run."""
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line), line
    line = line[24:].replace(url, "URL").replace(str(model), "MODEL").replace(str(file), "FILE")
    line = re.sub(r"127\.0\.0\.1:\d+", "CLIENT", re.sub(r"\b[0-9a-f]{13}\b", "HEX", line))
    return re.sub(r"\b\d+(\.\d+)?(?= (s|sequences at a time|buckets)\b)", "N", line)
