"""Every way that buckets travel, with receivers (and senders) that are processes, which die, hang and refuse."""

import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest

from ductile.fabric import rendezvous
from ductile.messages.updates import Bucket, Offer, PrepareUpdate, Receiver, SendReport, WeightCarrier, WeightUpdate
from ductile.transport.sockets import LOOPBACK
from ductile.weights.carriers import disk
from ductile.weights.carriers.carrier import UpdateFailed
from ductile.weights.carriers.disk import DiskSender, folder_of
from ductile.weights.carriers.http import receive as take_lease
from ductile.weights.carriers.shared_memory import RingMemory, SlotRing
from ductile.weights.carriers.source import connect
from ductile.weights.sender import WeightSender
from tests.full_disk import small_disk
from tests.weights.member import TOKEN, Task, content, fill, fingerprint, offer_of

CARRIERS: list[WeightCarrier] = ["shared_memory", "point_to_point", "http", "disk"]
ACKNOWLEDGED: list[WeightCarrier] = ["shared_memory", "point_to_point", "http"]
"""Carriers whose sender hears of every bucket that is loaded."""
ENDS: list[WeightCarrier] = ["shared_memory", "point_to_point", "disk"]
"""Carriers whose receivers see the sender's end themselves. By HTTP the orchestrator aborts the update."""
SIZES = (1, 4095, 4096, 70_001, 3, 300_000, 8)
LAST = len(SIZES) - 1
WAIT_S = 60.0


class Member:
    """A process of `tests.weights.member`."""

    def __init__(self, folder: Path, name: str, task: Task) -> None:
        file = folder / f"{name}.json"
        file.write_bytes(msgspec.json.encode(task))
        command = [sys.executable, "-m", "tests.weights.member", str(file)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: Queue[tuple[str, str]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            self._lines.put((word, rest))
        self._lines.put(("end", ""))

    def until(self, word: str, rest: str | None = None) -> str:
        """What it says after the word, the first time from now on."""
        while True:
            found = self._lines.get(timeout=WAIT_S)
            if found[0] == word and rest in (None, found[1]):
                return found[1]
            assert found[0] in ("bucket", "url"), f"it said {found} instead of {word} {rest or ''}"

    def send_signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Fleet:
    """One update: senders in this process or in others, receivers in others."""

    def __init__(self, folder: Path, carrier: WeightCarrier) -> None:
        self._folder = folder
        self._carrier: WeightCarrier = carrier
        self.servers: dict[str, Member] = {}
        self.ranks: list[Member] = []
        """Senders in processes of their own."""
        self.receivers: list[Receiver] = []
        self._tasks: dict[str, Task] = {}
        self.senders: list[WeightSender] = []
        self.memories: list[RingMemory] = []
        """What each sender keeps for the next update."""
        self.reports: Queue[SendReport] = Queue()

    def receiver(self, name: str, by: WeightCarrier | None = None, **task: Any) -> str:
        self._tasks[name] = Task(**task)
        url = ""
        carrier: WeightCarrier = by or self._carrier
        if carrier == "http":
            self.servers[name] = Member(self._folder, name, self._tasks[name])
            url = self.servers[name].until("url")
        self.receivers.append(Receiver(name, carrier, url, TOKEN if url else ""))
        return name

    def update(self, **given: Any) -> WeightUpdate:
        folder = str(self._folder) if any(each.carrier == "disk" for each in self.receivers) else ""
        given = {"bucket_timeout_s": 10.0, "folder": folder, **given}
        return WeightUpdate("run-1.7", 3, 7, tuple(self.receivers), **given)

    def send(self, update: WeightUpdate, *sizes: Sequence[int]) -> tuple[Offer, ...]:
        offers: list[Offer] = []
        for rank, of_rank in enumerate(sizes):
            offer, memory = offer_of(f"rank-{rank}", tuple(of_rank)), RingMemory()
            self.memories.append(memory)
            sender = WeightSender(update, offer, partial(fill, sender=offer.sender), self.reports.put, memory)
            self.senders.append(sender)
            offers.append(sender.start())
        return tuple(offers)

    def prepare(self, update: WeightUpdate, offers: tuple[Offer, ...]) -> None:
        for receiver in self.receivers:
            prepare = PrepareUpdate(update, receiver.carrier, offers, receiver.instance)
            if receiver.carrier == "http":
                headers = {"Authorization": f"Bearer {TOKEN}"}
                body = msgspec.json.encode(prepare)
                request = urllib.request.Request(f"{receiver.url}/weights/prepare", body, headers)
                urllib.request.urlopen(request, timeout=WAIT_S).close()
            else:
                self._tasks[receiver.instance].prepare = prepare
                self.servers[receiver.instance] = Member(
                    self._folder, receiver.instance, self._tasks[receiver.instance]
                )

    def report(self) -> SendReport:
        return self.reports.get(timeout=WAIT_S)

    def end(self) -> None:
        for sender in self.senders:
            sender.abort()
            sender.finish(WAIT_S)
        for memory in self.memories:
            memory.close()
        for member in (*self.servers.values(), *self.ranks):
            member.end()


def expected(*sizes: Sequence[int]) -> str:
    return fingerprint(
        {
            (f"rank-{rank}", index): content(f"rank-{rank}", index, size)
            for rank, of_rank in enumerate(sizes)
            for index, size in enumerate(of_rank)
        }
    )


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[[WeightCarrier], Fleet]]:
    """Makes a fleet; afterwards nothing of it is left in this process."""
    made: list[Fleet] = []

    def make(carrier: WeightCarrier) -> Fleet:
        made.append(Fleet(tmp_path, carrier))
        return made[-1]

    threads, fds = {*threading.enumerate()}, _open_files()
    yield make
    for each in made:
        each.end()
    left = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in left:  # ends with the sockets of those that are gone by now
        thread.join(5.0)
    assert not [thread for thread in left if thread.is_alive()]
    assert _open_files() == fds
    assert not list(tmp_path.glob("*ductile*"))


def _open_files() -> dict[str, int]:
    """How many descriptors of each kind this process has, without those of the tests' template."""
    counts: dict[str, int] = defaultdict(int)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            counts[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
    return dict(counts)


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What stays in this process is there before anything is counted: a template, and a signal pipe of torch."""
    rendezvous.host_store()
    subprocess.run([sys.executable, "-m", "tests.warm_echo"], stdout=subprocess.DEVNULL, check=True)


def machine_address() -> str:
    """This machine as others reach it; loopback where it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("num_slots", "verify"), [(1, "crc"), (3, "sum")])
def test_all_receivers_get_every_byte_of_all_senders(
    fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier, num_slots: int, verify: str
) -> None:
    made = fleet(carrier)
    names = [made.receiver("a"), made.receiver("b")]
    at = "" if num_slots > 1 else f"{machine_address()}:0"
    update = made.update(num_slots=num_slots, verify=verify, rendezvous=at)
    sizes = (SIZES, SIZES[:3], ())
    made.prepare(update, made.send(update, *sizes))
    for name in names:
        assert made.servers[name].until("staged") == expected(*sizes)
    for report in (made.report() for _ in sizes):
        of_rank = sizes[int(report.sender[-1])]
        assert (report.failed, report.num_bytes) == ({}, sum(of_rank))
        assert int(report.digest, 16) == sum(range(1, len(of_rank) + 1))
    for sender in made.senders:
        sender.finish(WAIT_S)
    assert all(memory.num_bytes for memory in made.memories), "the next update has the same memory"


def test_buckets_of_more_bytes_than_a_socket_takes_at_once(fleet: Callable[[WeightCarrier], Fleet]) -> None:
    """To one that reads, and to one that stands still until it dies, whose part is never sent."""
    made, sizes = fleet("point_to_point"), (8 << 20, 5, 8 << 20)
    reads, stands = made.receiver("reads"), made.receiver("stands", hold_at=0)
    update = made.update(bucket_timeout_s=60.0)
    made.prepare(update, made.send(update, sizes))
    made.servers[stands].until("bucket", "0")
    made.servers[reads].until("bucket", "2")  # which the other one has no room for
    made.servers[stands].send_signal(signal.SIGKILL)
    assert made.servers[reads].until("staged") == expected(sizes)
    assert made.report().failed == {stands: f"{stands} ended the connection (Connection reset by peer)"}


def test_one_rank_sends_by_all_carriers_at_once(fleet: Callable[[WeightCarrier], Fleet]) -> None:
    made = fleet("http")
    for carrier in CARRIERS:
        made.receiver(carrier, carrier)
    update = made.update()
    made.prepare(update, made.send(update, SIZES))
    for server in made.servers.values():
        assert server.until("staged") == expected(SIZES)
    assert made.report().failed == {}


@pytest.mark.parametrize("carrier", ACKNOWLEDGED)
@pytest.mark.parametrize(
    ("signum", "at"),
    [
        (signal.SIGKILL, 0),
        (signal.SIGKILL, 3),
        (signal.SIGKILL, LAST),
        (signal.SIGSTOP, 3),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.nightly),
        pytest.param(signal.SIGSTOP, LAST, marks=pytest.mark.nightly),
    ],
)
def test_a_receiver_that_dies_or_hangs_is_dropped_and_the_others_get_everything(
    fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier, signum: int, at: int
) -> None:
    made = fleet(carrier)
    lost, *others = made.receiver("lost", hold_at=at), made.receiver("b"), made.receiver("c")
    update = made.update(bucket_timeout_s=4.0 if signum == signal.SIGSTOP else 60.0)
    made.prepare(update, made.send(update, SIZES))
    made.servers[lost].until("bucket", str(at))
    made.servers[lost].send_signal(signum)
    for name in others:
        assert made.servers[name].until("staged") == expected(SIZES)
    report = made.report()
    assert report.failed.keys() == {lost}
    assert report.failed[lost].startswith("lost ")
    assert not made.memories[0].num_bytes, "the lost one may still read there"
    if signum == signal.SIGSTOP:
        assert f"did not acknowledge bucket {at} within 4 s" in report.failed[lost]


@pytest.mark.parametrize("carrier", ACKNOWLEDGED)
def test_a_receiver_that_refuses_a_bucket_says_why(
    fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier
) -> None:
    made = fleet(carrier)
    full, other = made.receiver("full", fail_at=2), made.receiver("b")
    update = made.update(bucket_timeout_s=60.0)
    made.prepare(update, made.send(update, SIZES))
    assert made.servers[other].until("staged") == expected(SIZES)
    assert "no room" in made.servers[full].until("failed")
    (failed,) = made.report().failed.items()
    assert failed[0] == "full"
    assert "no room" in failed[1]


@pytest.mark.parametrize("carrier", ENDS)
@pytest.mark.parametrize("at", [0, 3, LAST])
def test_the_death_of_a_sender_fails_its_receivers_at_once(
    fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier, at: int, tmp_path: Path
) -> None:
    made = fleet(carrier)
    made.receiver("a")
    made.receiver("b")
    update = made.update(bucket_timeout_s=60.0)
    sender = Member(tmp_path, "sender", Task(hold_at=at, send=update, sizes=SIZES))
    made.ranks.append(sender)
    location = sender.until("location")
    made.prepare(update, (msgspec.structs.replace(offer_of("rank-0", SIZES), location=location),))
    sender.until("bucket", str(at))
    for server in made.servers.values():
        if at and carrier != "disk":
            server.until("bucket", str(at - 1))
    sender.send_signal(signal.SIGKILL)
    for server in made.servers.values():
        assert "rank-0 " in server.until("failed")
    if carrier == "disk":
        sender.process.wait()
        DiskSender(update, "rank-1", ["a"]).remove(WAIT_S)  # the next one finds what was left, and removes it


@pytest.mark.parametrize("carrier", ACKNOWLEDGED)
def test_a_receiver_that_never_comes_is_left_out(
    fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier
) -> None:
    """And one of which the orchestrator knows that it will not come is not waited for."""
    made = fleet(carrier)
    made.receiver("here")
    absent = [Receiver(name, carrier, "http://127.0.0.1:9", TOKEN) for name in ("late", "refused")]
    present, made.receivers = made.receivers, [*made.receivers, *absent]
    update, made.receivers = made.update(bucket_timeout_s=2.0), present
    offers = made.send(update, SIZES)
    made.senders[0].leave_out("refused", "it has another model")
    made.prepare(update, offers)
    assert made.servers["here"].until("staged") == expected(SIZES)
    failed = made.report().failed
    assert failed.keys() == {"late", "refused"}
    assert failed["refused"] == "refused was left out: it has another model"


@pytest.mark.parametrize("carrier", ["shared_memory", "point_to_point"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_receiver_that_stops_as_soon_as_it_has_come_is_left_out(
    fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier, others: int
) -> None:
    made = fleet(carrier)
    if others:
        made.receiver("here")
    present, made.receivers = made.receivers, [*made.receivers, Receiver("stopped", carrier)]
    update, made.receivers = made.update(bucket_timeout_s=60.0), present
    offers = made.send(update, SIZES)
    made.prepare(update, offers)
    stopped = connect(offers[0].location, "rank-0", "stopped", carrier, update.secret, WAIT_S, threading.Event())
    assert stopped.next(WAIT_S) is not None
    made.senders[0].leave_out("stopped", "it did not answer 2 probes in a row")
    if others:
        assert made.servers["here"].until("staged") == expected(SIZES)
    assert made.report().failed == {"stopped": "stopped was left out: it did not answer 2 probes in a row"}
    stopped.close()


def test_a_server_whose_host_takes_no_connection_is_left_out(fleet: Callable[[WeightCarrier], Fleet]) -> None:
    """As one that has lost its power: it answers nothing at all."""
    made = fleet("http")
    made.receiver("here")
    with ExitStack() as stack:
        host = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=0))
        for _ in range(4):  # the kernel takes no more until somebody accepts these
            connecting = stack.enter_context(socket.socket())
            connecting.setblocking(False)
            connecting.connect_ex(host.getsockname())
        gone = Receiver("gone", "http", f"http://{LOOPBACK}:{host.getsockname()[1]}", TOKEN)
        present, made.receivers = made.receivers, [*made.receivers, gone]
        update, made.receivers = made.update(bucket_timeout_s=60.0), present
        made.prepare(update, made.send(update, SIZES))
        made.servers["here"].until("bucket", "0")
        made.senders[0].leave_out("gone", "it did not answer 2 probes in a row")
        assert made.servers["here"].until("staged") == expected(SIZES)
        assert made.report().failed == {"gone": "gone was left out: it did not answer 2 probes in a row"}


@pytest.mark.parametrize("carrier", ACKNOWLEDGED)
def test_an_aborted_update_ends_on_both_sides(fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier) -> None:
    made = fleet(carrier)
    name = made.receiver("slow", load_s=0.5)
    update = made.update(bucket_timeout_s=60.0)
    made.prepare(update, made.send(update, SIZES))
    made.servers[name].until("bucket", "1")
    made.senders[0].abort()
    assert made.report().failed == {name: f"{name} was left out: the update was aborted"}
    if carrier != "http":
        made.servers[name].until("failed")


@pytest.mark.parametrize("carrier", ["shared_memory", "point_to_point"])
def test_who_does_not_know_the_secret_gets_nothing(
    fleet: Callable[[WeightCarrier], Fleet], carrier: WeightCarrier
) -> None:
    made = fleet(carrier)
    thief, honest = made.receiver("thief"), made.receiver("honest")
    update = made.update(bucket_timeout_s=3.0)
    offers = made.send(update, SIZES)
    everybody = made.receivers
    made.receivers = everybody[:1]
    made.prepare(msgspec.structs.replace(update, secret="guessed"), offers)
    assert made.servers[thief].until("failed").startswith("rank-0 ")
    made.receivers = everybody[1:]
    made.prepare(update, offers)
    assert made.servers[honest].until("staged") == expected(SIZES)
    assert made.report().failed == {thief: "thief did not connect within 3 s"}


def test_a_sender_that_does_not_know_the_secret_is_believed_nothing(fleet: Callable[[WeightCarrier], Fleet]) -> None:
    made = fleet("shared_memory")
    name = made.receiver("a")
    update = made.update(bucket_timeout_s=1.0)
    made.prepare(msgspec.structs.replace(update, secret="another"), made.send(update, SIZES))
    assert made.servers[name].until("failed").startswith("rank-0 ")
    assert made.report().failed.keys() == {name}


def test_a_token_that_is_refused_is_shown_nowhere_and_not_tried_again(
    fleet: Callable[[WeightCarrier], Fleet],
) -> None:
    made = fleet("http")
    name = made.receiver("a")
    wrong = msgspec.structs.replace(made.receivers[0], token="a-wrong-secret")
    update = msgspec.structs.replace(made.update(bucket_timeout_s=60.0), receivers=(wrong,))
    made.prepare(update, made.send(update, SIZES))
    report = made.report()
    assert "HTTP 401" in report.failed[name]  # the server's reply has the token in it
    assert "a-wrong-secret" not in repr(report) + repr(update)
    assert update.secret not in repr(update)


@pytest.mark.parametrize(("crowded", "fails"), [(2, False), (1000, True)])
def test_a_bucket_for_which_a_server_has_no_room_yet_is_sent_again_for_a_while(
    fleet: Callable[[WeightCarrier], Fleet], crowded: int, fails: bool
) -> None:
    made = fleet("http")
    name = made.receiver("a", crowded=crowded)
    update = made.update(bucket_timeout_s=0.5 if fails else 30.0)
    made.prepare(update, made.send(update, SIZES))
    report = made.report()
    assert report.failed == ({name: f"{name} {report.failed[name][len(name) + 1 :]}"} if fails else {})
    if fails:
        assert "HTTP 503" in report.failed[name] or "did not acknowledge" in report.failed[name]


def test_of_a_server_that_gives_more_than_its_lease_says_no_more_is_read() -> None:
    sent = 0

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal sent
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while True:
                    sent += self.wfile.write(b"x" * 1024)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Endless) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        offer = Offer("donor", (), (Bucket(0, 2000, ()),), f"http://127.0.0.1:{server.server_port}/weights/buckets/x")
        loaded: list[object] = []
        with pytest.raises(UpdateFailed, match="bucket 0 has 2000 bytes, and more of them came"):
            take_lease(WeightUpdate("u", 1, 1, ()), offer, lambda *given: loaded.append(given), threading.Event())
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert not loaded
        assert sent < 100 << 20


def test_memory_that_cannot_be_mapped_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    before = _open_files()
    monkeypatch.setattr(mmap, "mmap", none)
    with pytest.raises(OSError, match="no memory"):
        SlotRing("test", 1, 10)
    assert _open_files() == before


def test_a_full_disk_fails_its_carrier_and_no_other(fleet: Callable[[WeightCarrier], Fleet], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        made = fleet("disk")
        made.receiver("by-disk")
        made.receiver("by-memory", "shared_memory")
        update = msgspec.structs.replace(made.update(), folder=str(disk))
        made.prepare(update, made.send(update, (700_000, 700_000)))
        assert made.servers["by-memory"].until("staged") == expected((700_000, 700_000))
        (failed,) = made.report().failed.items()
        assert failed[0] == "by-disk"
        assert "No space left on device" in failed[1]
        assert "gave the update up" in made.servers["by-disk"].until("failed")
        assert os.listdir(disk) == []


class Hanging:
    """A folder that takes no bucket from a number on, as a mount whose server is gone, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, what: str) -> None:
        self.let_go = threading.Event()
        real = getattr(disk, what)

        def write(file: Path, *content: Any) -> None:
            if file.name in (f"bucket-{at}", "disk"):
                assert self.let_go.wait(WAIT_S)
            real(file, *content)

        monkeypatch.setattr(disk, what, write)


@pytest.mark.parametrize(("what", "at"), [("_write", 0), ("_write", 3), ("_sweep", -1)])
def test_a_disk_that_hangs_fails_its_carrier_and_no_other(
    fleet: Callable[[WeightCarrier], Fleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, at: int
) -> None:
    hanging, folder = Hanging(monkeypatch, at, what), tmp_path / "disk"
    folder.mkdir()
    made = fleet("disk")
    made.receiver("by-disk")
    made.receiver("by-memory", "shared_memory")
    made.receiver("by-socket", "point_to_point")
    update = msgspec.structs.replace(made.update(bucket_timeout_s=2.0), folder=str(folder))
    made.prepare(update, made.send(update, SIZES))
    for name in ("by-memory", "by-socket"):
        assert made.servers[name].until("staged") == expected(SIZES)
    (failed,) = made.report().failed.items()
    assert failed[0] == "by-disk"
    assert f"did not take bucket {max(at, 0)} within 2 s" in failed[1]
    hanging.let_go.set()
    made.senders[0].finish(WAIT_S)


@pytest.mark.parametrize("ends", ["abort", "total_timeout_s"])
def test_an_update_that_ends_waits_for_no_disk(
    fleet: Callable[[WeightCarrier], Fleet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    hanging, folder = Hanging(monkeypatch, 1, "_write"), tmp_path / "disk"
    folder.mkdir()
    made = fleet("disk")
    made.receivers.append(Receiver("by-disk", "disk"))
    more = {} if ends == "abort" else {ends: 0.5}
    update = msgspec.structs.replace(made.update(bucket_timeout_s=60.0, **more), folder=str(folder))
    made.send(update, SIZES)
    if ends == "abort":
        made.senders[0].abort()
    why = "the update was aborted" if ends == "abort" else "the update took more than 0.5 s"
    assert made.report().failed == {"by-disk": f"by-disk was left out: {why}"}
    hanging.let_go.set()
    made.senders[0].finish(WAIT_S)


def test_a_folder_of_another_sender_is_not_loaded(fleet: Callable[[WeightCarrier], Fleet]) -> None:
    """As where a server sees another disk under the same path."""
    made = fleet("disk")
    name = made.receiver("a")
    update = made.update()
    offers = made.send(update, SIZES)
    made.prepare(msgspec.structs.replace(update, secret="another"), offers)
    assert "is not the folder that rank-0 writes to" in made.servers[name].until("failed")


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "/x"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a folder"):
        folder_of(WeightUpdate(name, 0, 0, (), folder="/x"), "rank-0")


def test_the_memory_of_a_sender_can_only_be_read() -> None:
    ring = SlotRing("test", 1, 10)
    try:
        fd = os.open(ring.location, os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        os.close(fd)
    finally:
        ring.close()


def test_memory_of_a_slot_is_got_before_it_is_filled_and_not_sooner() -> None:
    ring = SlotRing("test", 3, 100_000)
    got_bytes = [os.stat(ring.location).st_blocks * 512]
    for slot, num_bytes in ((1, 0), (1, 5000), (1, 4999), (0, 100_000), (1, 100_000)):
        ring.slot(slot, num_bytes)
        got_bytes.append(os.stat(ring.location).st_blocks * 512)
    ring.close()
    assert got_bytes == [0, 0, 8192, 8192, 8192 + 102_400, 2 * 102_400]


def test_a_sender_that_gets_no_memory_says_so(
    fleet: Callable[[WeightCarrier], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none)
    made = fleet("shared_memory")
    made.receivers.append(Receiver("a", "shared_memory"))
    made.send(made.update(), SIZES)
    why = "rank-0 could not go on: OSError: [Errno 28] No space left on device"
    assert made.report().failed == {"a": f"a has not got everything: {why}"}


def test_a_sender_keeps_its_memory_for_updates_of_the_same_size() -> None:
    memory, before = RingMemory(), _open_files()
    first = memory.take(3, 10_000)
    assert memory.num_bytes == 0, "whoever has taken it has it alone"
    memory.keep(first)
    assert memory.num_bytes == 3 * 12_288
    assert memory.take(3, 9_000) is first
    memory.keep(first)
    other = memory.take(3, 20_000)
    assert other is not first
    memory.keep(other)
    memory.close()
    assert memory.num_bytes == 0
    assert _open_files() == before


def test_what_comes_after_the_end_of_a_senders_memory_is_not_kept() -> None:
    """As from a thread that was still at work."""
    memory, before = RingMemory(), _open_files()
    late = memory.take(3, 10_000)
    memory.close()
    memory.keep(late)
    assert memory.num_bytes == 0
    memory.keep(memory.take(1, 10))
    assert _open_files() == before


class SlowToLetGo(RingMemory):
    """Between a look at what it keeps and the change of it there is time for other threads."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "_kept":
            time.sleep(0.05)
        return found


def test_two_that_take_at_once_never_get_the_same_memory() -> None:
    memory = SlowToLetGo()
    memory.keep(memory.take(1, 10))
    taken: list[SlotRing] = []
    threads = [threading.Thread(target=lambda: taken.append(memory.take(1, 10))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(ring) for ring in taken}) == 3
    for ring in taken:
        ring.close()
