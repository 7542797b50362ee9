"""Strangers at every port of a run over two nodes, a server and a router: nothing gets in, and nothing goes down.

1. `PORTS` lists who opens which port. Ports that the processes have open and that are not in it fail the test, and so
   does code that opens a socket in a file that `OPENED_IN` does not have.
2. At each port of ours strangers have `NUM_ATTEMPTS` attempts (`tests.cluster.strangers`), all ports at once, while the
   run is at work.
3. Afterwards the run goes on, the server serves, nobody has been let in, and memory and descriptors are as before.

torch's ports ask nobody for a key: the last tests show what a stranger can do there, as docs/cluster.md says it.
"""

import ast
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, TCPStore

from ductile.cluster.agent import hello
from ductile.fabric import rendezvous
from ductile.fabric.groups import Groups
from ductile.messages.agents import FromAgent
from ductile.messages.control import VERSION, ControlRequest, DrainRequest, FleetRequest, ResizeRequest, Status
from ductile.messages.updates import PauseServer
from ductile.orchestrator.control.control import Run as LiveRun
from ductile.transport.codec import encode_message
from tests import ranks
from tests.cluster.joining import GONE_S, HEAD, join, stderr_of
from tests.cluster.listening import (
    Address,
    OpenSocket,
    forget_peak,
    listening,
    listening_on_unix,
    memory_bytes,
    open_sockets,
)
from tests.cluster.processes import is_running, processes_with
from tests.cluster.strangers import MIB, PATIENCE_S, SIGNATURE, Recording, Strangers, recorded, wait_for
from tests.end_to_end.runs import Run, write_config, write_sft
from tests.fleet.server_processes import ServerProcess, ServerProcesses
from tests.tiny import make_model_folder

SOURCE = Path(__file__).parents[2] / "src" / "ductile"
START_S = 250.0
MOST_GROWTH_BYTES = 256 * MIB
KEY, TOKEN = "the-key-of-servers-and-clients", "the-token-of-the-registry"
SECRETS = {"STRANGERS_KEY": KEY, "STRANGERS_TOKEN": TOKEN}

PORTS = {
    "agents": "orchestrator: `ductile.cluster.reception`",
    "slots": "orchestrator: `ductile.transport.router`",
    "control": "orchestrator: `ductile.orchestrator.control.endpoint`",
    "registry": "orchestrator: `ductile.fleet.registry.registry_server`, with inference.registry.serve",
    "segments": "each slot of a run over several nodes: `ductile.fabric.remote_segments`",
    "server": "`ductile inference`: `ductile.generator.server.serve`",
    "router": "`ductile router`: `ductile.fleet.router.router_server`",
    "torch's store": "a process of the orchestrator's node: `ductile.fabric.rendezvous`",
    "torch's gloo": "each slot that trains with others: torch",
}
"""Who opens a port of those processes. A rank's socket for servers that are given weights from point to point is open
while it sends: `tests/weights/test_strangers.py`."""

NUM_GROUPS = 2
"""Process groups of torch of which each train slot is a member: gloo opens a port for each."""

OPENED_IN = {
    "fabric/remote_segments.py": "segments",
    "fabric/rendezvous.py": "torch's store",
    "fleet/registry/registry_server.py": "registry",
    "orchestrator/control/endpoint.py": "control",
    "transport/frames.py": "agents, slots",
    "transport/http_server/listener.py": "server, router",
    "weights/carriers/control.py": "weights from point to point",
}
"""Files that open a socket at which somebody may connect, with the ports of theirs."""

OPENS = {"bind", "create_server", "start_server", "start_unix_server", "create_unix_server", "create_datagram_endpoint"}
NO_SOCKET = {
    "config/checks/named_policy.py": "arguments of a function",
    "fabric/transfer.py": "tensors",
    "trainer/resize.py": "tensors",
}
"""Files that call something by the name of what opens sockets."""


def test_no_socket_is_opened_in_a_file_that_is_not_known() -> None:
    files = {file: text for file in SOURCE.rglob("*.py") if re.search("|".join(OPENS), text := file.read_text("utf-8"))}
    found = {
        file.relative_to(SOURCE).as_posix()
        for file, text in files.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OPENS
    }
    assert found == {*OPENED_IN, *NO_SOCKET}


@dataclass
class Scene:
    """A run over two nodes, with a server that generates for it, or none, and a router before the server."""

    run: Run
    agent: "subprocess.Popen[bytes]"
    agents_session: Recording
    """What the agent of node 1 and the orchestrator have said to each other."""
    registry: str = ""
    servers: list[ServerProcess] = field(default_factory=list[ServerProcess])
    router: "subprocess.Popen[str] | None" = None
    router_url: str = ""

    @property
    def pids(self) -> set[int]:
        return {*processes_with(self.run.mark)}

    @property
    def public_key(self) -> str:
        return json.loads((self.run.folder / "cluster.json").read_text())["public_key"]

    def known(self) -> dict[Address, str]:
        """Ports of which somebody says where they are."""
        invitation = json.loads((self.run.folder / "cluster.json").read_text())
        control = json.loads((self.run.folder / "control.json").read_text())
        urls = {"registry": self.registry, "router": self.router_url}
        found = {_address(invitation["address"]): "agents", (control["host"], control["port"]): "control"}
        found |= {_address(url.removeprefix("http://")): name for name, url in urls.items() if url}
        return found | {_address(each.url.removeprefix("http://")): "server" for each in self.servers}

    def ports(self) -> dict[Address, str]:
        """Every port that the processes have open, by the name that `PORTS` has for it. One that opens and closes in
        between is none."""
        slots = {event["pid"] for event in self.run.events("slot_started")}
        named: dict[Address, str] = {}
        nameless: dict[Address, set[int]] = {}

        def all_named() -> bool:
            known, opened = self.known(), listening(self.pids)
            nameless.clear()
            for address in named.keys() - opened.keys():
                del named[address]
            for address, pids in opened.items():
                if address in known:
                    named[address] = known[address]
                elif named.get(address) in (None, "torch's gloo") and _greets(address):
                    named[address] = "slots" if self.run.process.pid in pids else "segments"
                elif address not in named and not pids & {*slots, self.run.process.pid} and _is_store(address):
                    named[address] = "torch's store"
                elif address not in named and pids <= slots:
                    named[address] = "torch's gloo"  # as it says nothing; how many there are is known
                elif address not in named and _is_open(address):
                    nameless[address] = pids
            return not nameless and Counter(named.values())["segments"] >= len(slots)

        with suppress(AssertionError):
            wait_for(all_named, "every port has a name", PATIENCE_S)
        commands = processes_with(self.run.mark)
        told = {address: [commands.get(pid, "ended").strip() for pid in pids] for address, pids in nameless.items()}
        assert not told, f"ports that nobody knows, by the processes that have them open: {told}; known: {named}"
        return named


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _greets(address: Address) -> bool:
    """Whether ZeroMQ is there: it says so before it is asked."""
    try:
        with socket.create_connection(address, 1.0) as one:
            one.settimeout(1.0)
            return one.recv(len(SIGNATURE)) == SIGNATURE
    except OSError:
        return False


def _is_open(address: Address) -> bool:
    try:
        socket.create_connection(address, 1.0).close()
    except OSError:
        return False
    return True


def _store(address: Address) -> TCPStore:
    """As any process of any user may connect."""
    wait = timedelta(seconds=10)
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=wait)


def _is_store(address: Address) -> bool:
    try:
        return not _store(address).check(["a key that nobody has set"])
    except RuntimeError:
        return False


# -- The scene --------------------------------------------------------------------------------------------------------

SEVERAL = ["--cluster.num-nodes", "2", "--cluster.interface", HEAD, "--cluster.start-timeout-s", f"{START_S:g}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def write_rl(folder: Path, model: Path, registry: str) -> Path:
    """Both slots train, and a server generates."""
    file = write_config(folder, model, max_steps=1000, train='"0-1"', interval=1000)
    text = re.sub(r"(component_placement = \{ actor = \"0-1\").*", r"\1 }", file.read_text())
    text = re.sub(r"num_examples = 8\nsampling = .*", "enabled = false", text)
    file.write_text(
        f'{text}\n[orchestrator.client]\napi_key_var = "STRANGERS_KEY"\n\n[inference]\n'
        f'registry = {{ type = "http", url = "{registry}", serve = true, token_var = "STRANGERS_TOKEN" }}\n'
        "topology_change_cooldown_seconds = 0\n"
        "health_check_interval_seconds = 40\nprobe_timeout_seconds = 30\nupdate_bucket_timeout_seconds = 60\n"
    )
    return file


def joined(stack: ExitStack, run: Run) -> Scene:
    """Have node 1 join the run, through a port that records what is said."""
    folder = run.folder
    run.until((folder / "cluster.json").exists, START_S)
    invitation = json.loads((folder / "cluster.json").read_text())
    (host, port), recording = stack.enter_context(recorded(_address(invitation["address"])))
    name, _, mark = run.mark.partition("=")
    secret = (folder / "cluster.key").read_text().strip()
    agent = join(f"{host}:{port}", 1, "--wait-s", f"{START_S:g}", DUCTILE_CLUSTER_KEY=secret, **{name: mark})
    stack.callback(end, agent)
    return Scene(run, agent, recording)


@pytest.fixture
def scene(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with socket.create_server((HEAD, 0)) as taken:  # freed at the end
        registry = f"http://{HEAD}:{taken.getsockname()[1]}"
    with ExitStack() as stack:
        run = Run(write_rl(tmp_path, model, registry), *SEVERAL)
        stack.callback(run.close)
        name, _, mark = run.mark.partition("=")
        servers = stack.enter_context(ServerProcesses(model, tmp_path))
        announced = ["--registry.type", "http", "--registry.url", registry, "--registry.token-var", "STRANGERS_TOKEN"]
        limits = ["--server.api-key-var", "STRANGERS_KEY", "--server.timeout-s", "5"]
        server = servers.begin(*announced, *limits, **{name: mark})
        scene = joined(stack, run)
        scene.registry, scene.servers = registry, [server]
        log = tmp_path / "server-0.log"
        run.until(lambda: "serving " in log.read_text(), START_S)
        server.url = re.findall(r"serving .* on (\S+)", log.read_text())[0]
        words = [sys.executable, "-m", "ductile", "router", "--server.port", "0", "--urls", server.url, *limits]
        with (tmp_path / "router.log").open("w") as said:
            router = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, name: mark}
            )
        stack.callback(end, router)
        assert router.stdout is not None
        scene.router, scene.router_url = router, router.stdout.readline().split()[-1]
        run.until(lambda: len(run.metrics()) >= 1, START_S)
        yield scene


def end(process: "subprocess.Popen[Any]") -> None:
    process.kill()
    process.wait(GONE_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


# -- What they try ----------------------------------------------------------------------------------------------------

SERVER_REQUESTS = [
    ("POST", "/weights/prepare", b"{}"),
    ("POST", "/weights/commit", b'{"update_id": "x", "epoch": 99999999999}'),
    ("POST", "/weights/buckets/x/slot-0/0", b"x" * 1000),
    ("POST", "/pause", msgspec.json.encode(PauseServer(1 << 40, "abort", 600.0))),
    ("POST", "/resume", b"{}"),
    ("POST", "/weights/lease", b"{}"),
    ("POST", "/v1/completions", b'{"prompt": "1+1=", "max_tokens": 2}'),
    ("POST", "/inference/v1/generate", b'{"token_ids": [5], "sampling_params": {"max_tokens": 2}}'),
    ("POST", "/health", b"{}"),
    ("GET", "/v1/models", b""),
    ("GET", "/fleet/state", b""),
    ("GET", "/metrics", b""),
    ("GET", "/weights/digest", b""),
    ("GET", "/weights/buckets/guessed/0", b""),
    ("GET", "/kv/guessed", b""),
    ("GET", "/../../../../etc/passwd", b""),
]
REGISTRY_REQUESTS = [
    ("PUT", "/servers", b'{"url": "http://127.0.0.1:9", "incarnation": "mine"}'),
    ("PUT", "/authority", b'{"owner": "me", "ttl_s": 3600}'),
    ("DELETE", "/servers?url=http://127.0.0.1:9&incarnation=x", b""),
    ("GET", "/servers", b""),
]
WRONG_KEYS = [KEY[:-1], KEY + "x", KEY.upper(), TOKEN[::-1], "", "a" * 5000, "\xe9" * 8]
WRONG_LINES = [
    msgspec.json.encode(ControlRequest(VERSION, token, ask))
    for token in ("", "0" * 64, "\u0130" * 8)
    for ask in (Status(), ResizeRequest((0,)), FleetRequest("evict", "x"), DrainRequest((0, 1)))
]


@contextmanager
def strangers_at(scene: Scene, ports: dict[Address, str]) -> Iterator[list[Strangers]]:
    """Have strangers try each port of ours, all at once. Those who are silent are there until the end."""
    said: FromAgent = hello("127.0.0.9", None)
    frames = [b"t" * 32, b"0", encode_message(said)]

    def attempt(one: Strangers, address: Address, name: str) -> None:
        if name in ("agents", "slots", "segments"):
            one.try_curve(address, scene.public_key, frames, scene.agents_session)
        elif name == "control":
            one.try_lines(address, WRONG_LINES)
        else:
            one.try_http(address, REGISTRY_REQUESTS if name == "registry" else SERVER_REQUESTS, WRONG_KEYS)

    ours = sorted((address, name) for address, name in ports.items() if not name.startswith("torch's "))
    with ExitStack() as stack:
        strangers = [stack.enter_context(Strangers(seed)) for seed in range(len(ours))]
        with ThreadPoolExecutor(len(ours)) as pool:
            attempts = [pool.submit(attempt, one, *port) for one, port in zip(strangers, ours, strict=True)]
        for each in attempts:
            each.result()
        yield strangers


def assert_unharmed(scene: Scene, ports: dict[Address, str], before: set[int], most_bytes: dict[int, int]) -> None:
    """The processes are those that were there, have their ports, and are not larger than they were by much."""
    assert all(map(is_running, before))
    assert Counter(scene.ports().values()) == Counter(ports.values())
    for pid, limit in most_bytes.items():
        assert memory_bytes(pid) < limit, processes_with(scene.run.mark)[pid]
    assert [event["node"] for event in scene.run.events("node_joined")] == [1]
    for kind in ("node_lost", "slot_lost", "server_left", "trainer_resized"):
        assert scene.run.events(kind) == []


def connected_to(pids: Iterable[int], strangers: Iterable[Strangers]) -> list[OpenSocket]:
    """Return the descriptors that processes still have for strangers."""
    theirs = {pair for one in strangers for pair in one.connections}
    return [each for each in open_sockets(pids) if (each.there, each.here) in theirs]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_strangers_at_every_port_get_nothing_and_nothing_goes_down(scene: Scene, tmp_path: Path) -> None:
    run = scene.run
    ports = scene.ports()
    assert Counter(ports.values()) == dict.fromkeys(PORTS, 1) | {"segments": 2, "torch's gloo": 2 * NUM_GROUPS}
    assert all(ipaddress.ip_address(host).is_loopback for host, _ in ports)
    assert listening_on_unix(scene.pids) == set()
    before = {run.process.pid, scene.agent.pid, *(event["pid"] for event in run.events("slot_started"))}
    before |= {each.process.pid for each in scene.servers}
    for pid in before:
        forget_peak(pid)
    most_bytes = {pid: memory_bytes(pid) + MOST_GROWTH_BYTES for pid in before}
    with strangers_at(scene, ports) as strangers:
        after = len(run.metrics())
        run.until(lambda: len(run.metrics()) >= after + 2, START_S)
        assert_unharmed(scene, ports, before, most_bytes)
        for one in strangers:
            one.assert_hung_up()
        pids = scene.pids
        with suppress(AssertionError):
            wait_for(lambda: not connected_to(pids, strangers), "descriptors are given back")
        assert connected_to(pids, strangers) == []

    key = {"Authorization": f"Bearer {KEY}"}
    asked = {"prompt": "1+1=", "max_tokens": 2, "ignore_eos": True}
    replied = httpx.post(f"{scene.router_url}/v1/completions", json=asked, headers=key, timeout=GONE_S, verify=False)
    assert replied.json()["usage"]["completion_tokens"] == 2

    def takes_requests() -> bool:
        """Return whether the server does. It pauses for a moment with each version of the run."""
        state = httpx.get(f"{scene.servers[0].url}/fleet/state", headers=key, timeout=GONE_S, verify=False).json()
        return (state["paused"], state["leaving"]) == (False, False)

    wait_for(takes_requests, "the server takes requests")
    listed = httpx.get(
        f"{scene.registry}/servers", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=GONE_S, verify=False
    )
    assert [lease["url"] for lease in listed.json()] == [scene.servers[0].url]
    wait_for(lambda: [each.status for each in LiveRun(run.folder).fleet().servers] == ["ready"], "the server is ready")

    secret = (run.folder / "cluster.key").read_text().strip()
    assert secret.encode() not in scene.agents_session.of("client") + scene.agents_session.of("server")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(START_S) == 130, run.said()
    assert "The run is over." in stderr_of(scene.agent)
    logs = [run.said(), *(file.read_text() for file in [*tmp_path.glob("*.log"), *(run.folder / "logs").glob("*.log")])]
    for said in logs:
        assert "Traceback" not in said, said
        assert not any(word in said for word in (secret, *SECRETS.values()))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_run_at_which_strangers_try_learns_what_it_learns_alone(tmp_path: Path, model: Path) -> None:
    changes = {"max_steps": 100_000, "train": '"0-1"', "interval": 100_000}
    losses = list[list[float]]()
    for name in ("tried", "alone"):
        with ExitStack() as stack:
            run = Run(write_sft(tmp_path / name, model, **changes), *SEVERAL, command="sft")
            stack.callback(run.close)
            scene = joined(stack, run)
            run.until(lambda: len(run.metrics()) >= 2, START_S)  # noqa: B023
            if name == "tried":
                with strangers_at(scene, scene.ports()):
                    after = len(run.metrics())
            run.until(lambda: len(run.metrics()) > after, START_S)  # noqa: B023
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(START_S) == 130, run.said()
            assert run.events("slot_lost") == run.events("node_lost") == []
            losses.append([row["loss"] for row in run.metrics()][:after])
    assert losses[0] == losses[1]


# -- torch's ports ----------------------------------------------------------------------------------------------------


class Mark:
    """An object that, unpickled, leaves the number of the process that did it in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return leave_mark, (str(self._folder),)


def leave_mark(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()


def rank_of_a_run(address: str) -> tuple[list[float], int]:
    """Slot 0 of two that train: the sum of both ranks' gradients, and then a checkpoint's plan."""
    groups = Groups(0, 0, "cpu", rendezvous.connect(address, PATIENCE_S), PATIENCE_S)
    group = groups.group((0, 1))
    gradient, plans = torch.ones(4), [None, None]
    dist.all_reduce(gradient, group=group)
    dist.all_gather_object(plans, "a plan", group=group)
    groups.destroy()
    return gradient.tolist(), os.getpid()


def stranger_of_it(address: str, folder: Path) -> tuple[list[str], list[float]]:
    """A process that knows nothing but the store's port: the keys that it has read, and rank 0's gradient."""
    store = rendezvous.connect(address, PATIENCE_S)
    wait_for(store.list_keys, "rank 0 has said in the store where it is", PATIENCE_S)
    keys = store.list_keys()
    groups = Groups(1, 0, "cpu", store, PATIENCE_S)
    group = groups.group((0, 1))
    mine, plans = torch.full((4,), 1000.0), [None, None]
    dist.all_reduce(mine, group=group)
    dist.all_gather_object(plans, Mark(folder), group=group)
    groups.destroy()
    return keys, (mine - 1000.0).tolist()


def test_whoever_reaches_torchs_ports_can_be_a_rank_and_run_code_in_the_others(tmp_path: Path) -> None:
    """What docs/cluster.md says of torch's sockets: ranks are asked for no key. He reads what a rank sends, changes its
    sum, and has it unpickle what he likes; and the rank in whose place he is comes in vain."""
    store = rendezvous.host_store()
    address = f"{rendezvous.LOOPBACK}:{store.port}"
    (rank, its_reply), (stranger, his_reply) = (
        ranks.start(rank_of_a_run, address),
        ranks.start(stranger_of_it, address, tmp_path),
    )
    try:
        summed, pid = ranks.result_of(its_reply, "rank 0")
        keys, read = ranks.result_of(his_reply, "the stranger")
    finally:
        ranks.stop(rank, stranger)
    assert keys
    assert read == [1.0] * 4
    assert summed == [1001.0] * 4
    assert (tmp_path / str(pid)).exists(), "rank 0 has run the stranger's code"


def test_whoever_reaches_torchs_store_can_have_ranks_wait_in_vain() -> None:
    """A key that ranks wait for is set, changed and deleted by anybody."""
    store = rendezvous.host_store()
    store.set("agreed", b"ours")
    stranger = _store((rendezvous.LOOPBACK, store.port))
    assert stranger.get("agreed") == b"ours"
    stranger.set("agreed", b"a stranger's")
    assert store.get("agreed") == b"a stranger's"
    assert stranger.delete_key("agreed")
    store.set_timeout(timedelta(milliseconds=100))
    with pytest.raises(DistStoreError):
        store.get("agreed")
