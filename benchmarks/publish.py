"""Seconds until a version is staged in every instance, against what memory and loopback can do, in one run.

Four processes hold a model of 1 GiB in bf16, in shards: cut along rows (dp 4), or as tp 2 and pp 2 cut it. 1, 2 or 4
processes hold what a server holds: live weights, and `StagedWeights` beside them. An update is ductile's own from end
to end, without run, server and orchestrator: every rank offers its boxes in buckets and sends them to all instances
(`WeightSender`), every instance loads them (`carriers.receive`; by HTTP a bare server with the same sink), and changes
over.

transport         limit, by as many processes, of as many bytes, none waiting for another
  shared_memory   memcpy: every rank copies its part once, every instance the whole model once
  point_to_point  loopback: every rank sends its part to every instance by a plain TCP connection, to where it stays
  http            the same
  disk            memcpy, as shared_memory

Everything is as a run has it by default: buckets of that size, so many under way, and both sides take the digest of all
bytes, which the limit does not. `seconds` is from the command to the ranks until the last instance has everything and
its digest is that of the ranks; the median of several updates, as `limit_s` is of several runs of the limit between
them. `pause_s` is the time in which an instance samples nothing: the longest change-over. `trainer_extra_bytes` and
`instance_extra_bytes` are the most memory of a rank and, in its first update, of an instance above what their weights
take.
`pipeline_ratio`: the update of a rank from its first bucket on, over its slowest stage alone; the largest of all ranks.
`cpu_s` and `limit_cpu_s` are what all processes together take of the cores: where these are few they decide the
seconds, and other work on the machine changes them less.

Peers, from the same memory into the same memory: torch.save and torch.load through tmpfs and through a disk, and a
plain gloo broadcast of one tensor after the other. What awex and checkpoint-engine need is not here (`left_out`).

    python benchmarks/publish.py            (--mib 64 for a try)
"""

import argparse
import gc
import multiprocessing
import os
import resource
import shutil
import socket
import statistics
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from budget import Budget, CannotGoOn, arguments
from ductile.cluster.node import FREED_MEMORY_STAYS
from ductile.core.layout.geometry.holdings import View, row_major
from ductile.core.layout.geometry.topology import MIB
from ductile.fabric import pages, rendezvous
from ductile.fleet.updates.update_parties import UpdateOptions
from ductile.messages.updates import (
    Bucket,
    Offer,
    PrepareUpdate,
    Receiver,
    SendReport,
    ServerState,
    UpdateProgress,
    WeightCarrier,
    WeightUpdate,
    total_of,
)
from ductile.parallel.parts import SlotParts
from ductile.trainer.own_weights import OwnWeights
from ductile.weights.buckets import OwnedTensor, offer_of
from ductile.weights.carriers import receive
from ductile.weights.carriers.shared_memory import RingMemory
from ductile.weights.live_weights import LiveWeights
from ductile.weights.sender import WeightSender
from ductile.weights.staged_weights import StagedWeights
from provenance import provenance, write

import msgspec  # isort: skip

RANKS = 4
LAYOUTS = ("dp4", "tp2.pp2")
INSTANCES = (1, 2, 4)
TRANSPORTS: tuple[WeightCarrier, ...] = ("shared_memory", "point_to_point", "http", "disk")
LIMITS = {"shared_memory": "memcpy", "point_to_point": "loopback", "http": "loopback", "disk": "memcpy"}
PEERS = ("save_load_tmpfs", "save_load_disk", "gloo_broadcast")
ELSEWHERE = {
    "awex": "0.9.0 installs, but its writer and reader import megatron and move bytes by NCCL, CUDA IPC or mooncake "
    "into SGLang or vLLM: none of these runs without a GPU",
    "checkpoint-engine": "0.4.2 installs, but its ParameterServer takes CUDA and NPUs alone: here it raises 'The "
    "current device type is not supported'",
}
HIDDEN, INNER, KEYS, VOCABULARY = 1024, 2816, 512, 32_000
DTYPE = torch.bfloat16
UNUSED: Any = None
TIMEOUT_S = 60.0
REST_S = 0.05

Box = tuple[tuple[int, ...], tuple[int, ...]]
Shapes = dict[str, tuple[tuple[int, ...], int | None]]
"""(shape, the dim that tp cuts) by name."""


def tensors(mib: int) -> Shapes:
    """A model of about so many MiB."""
    vocabulary = min(VOCABULARY, 125 * mib)
    layer: Shapes = {
        "q_proj": ((HIDDEN, HIDDEN), 0),
        "k_proj": ((KEYS, HIDDEN), 0),
        "v_proj": ((KEYS, HIDDEN), 0),
        "o_proj": ((HIDDEN, HIDDEN), 1),
        "gate_proj": ((INNER, HIDDEN), 0),
        "up_proj": ((INNER, HIDDEN), 0),
        "down_proj": ((HIDDEN, INNER), 1),
        "norm": ((HIDDEN,), None),
    }
    layer_bytes = 2 * sum(prod(shape) for shape, _ in layer.values())
    num_layers = max(1, round((mib * MIB - 4 * vocabulary * HIDDEN) / layer_bytes))
    table: Shapes = {"embed": ((vocabulary, HIDDEN), 0)}
    for index in range(num_layers):
        table |= {f"layers.{index}.{name}": entry for name, entry in layer.items()}
    return table | {"norm": ((HIDDEN,), None), "head": ((vocabulary, HIDDEN), 0)}


def num_bytes(shapes: Shapes) -> int:
    return 2 * sum(prod(shape) for shape, _ in shapes.values())


def box_of(layout: str, rank: int, index: int, count: int, shape: tuple[int, ...], dim: int | None) -> Box | None:
    """What a rank sends of the tensor that is the index-th of so many."""
    if layout == "dp4":
        part, parts, axis = rank, RANKS, 0
    else:
        tp, stage = rank % 2, rank // 2
        if index * 2 // count != stage or (dim is None and tp):
            return None
        part, parts, axis = (0, 1, 0) if dim is None else (tp, 2, dim)
    cut = [shape[axis] * each // parts for each in (part, part + 1)]
    start, stop = [0] * len(shape), list(shape)
    start[axis], stop[axis] = cut
    return tuple(start), tuple(stop)


def contents(number: int, shape: tuple[int, ...], box: Box, version: int) -> torch.Tensor:
    """Every element its own bits, and others in each version."""
    rows = torch.arange(box[0][0], box[1][0], dtype=torch.int32)
    values = rows if len(shape) == 1 else rows[:, None] * 31 + torch.arange(box[0][1], box[1][1], dtype=torch.int32)
    return ((values + 7919 * number + 97 * version) % 30_011).to(torch.int16).view(DTYPE)


class Parts(SlotParts):
    """A rank's one box of each tensor, in one piece."""

    def __init__(self, boxes: dict[str, Box]) -> None:
        self.boxes = boxes

    def place(self, name: str, box: Box) -> View:
        (origin, end), (start, stop) = self.boxes[name], box
        strides = row_major([b - a for a, b in zip(origin, end, strict=True)])
        offset = sum((a - o) * stride for a, o, stride in zip(start, origin, strides, strict=True))
        return View(0, offset, tuple(b - a for a, b in zip(start, stop, strict=True)), strides)


class Measured:
    """A process of the benchmark."""

    def cpu_s(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


class Rank(Measured):
    def __init__(self, rank: int, mib: int) -> None:
        self.rank, self.shapes = rank, tensors(mib)
        self.local: dict[str, tuple[Box, torch.Tensor]] = {}
        self.sender: WeightSender | None = None
        self.memory = RingMemory()
        self.offers: dict[int, Offer] = {}
        """By the bytes of a bucket, as long as the layout stays: a trainer makes them once, too."""
        self.report: SendReport | None = None
        self.through = threading.Event()

    def hold(self, layout: str, version: int) -> None:
        """Have the rank's part of a version."""
        for number, (name, (shape, dim)) in enumerate(self.shapes.items()):
            box = box_of(layout, self.rank, number, len(self.shapes), shape, dim)
            if box is None:
                self.local.pop(name, None)
                continue
            size = tuple(b - a for a, b in zip(*box, strict=True))
            if name not in self.local or self.local[name][0] != box:
                self.offers.clear()
                self.local[name] = box, pages.zeros(prod(size), DTYPE, "cpu").view(size)
            self.local[name][1].copy_(contents(number, shape, box, version))
        self.before = resident()

    def begin(self, update: WeightUpdate) -> Offer:
        reset_peak()
        offer = self._offer(update.bucket_bytes)
        local = {name: tensor.view(-1) for name, (_, tensor) in self.local.items()}
        weights = OwnWeights(UNUSED, Parts(self.boxes()), local, DTYPE)
        self.through.clear()

        def tell(report: SendReport) -> None:
            self.report = report
            self.through.set()

        def fill(bucket: Bucket, buffer: torch.Tensor) -> int:
            return sum(weights.copy_boxes(bucket.boxes, buffer))

        self.kept_bytes = self.memory.num_bytes
        self.sender = WeightSender(update, offer, fill, tell, self.memory)
        return self.sender.start()

    def _offer(self, bucket_bytes: int) -> Offer:
        if bucket_bytes not in self.offers:
            owned = [OwnedTensor(name, DTYPE, self.shapes[name][0], [box]) for name, (box, _) in self.local.items()]
            self.offers[bucket_bytes] = offer_of(f"rank-{self.rank}", owned, bucket_bytes)
        return self.offers[bucket_bytes]

    def end(self) -> dict[str, Any]:
        assert self.sender is not None
        assert self.through.wait(TIMEOUT_S)
        self.sender.finish(TIMEOUT_S)
        assert self.report is not None
        spans, trace = defaultdict[str, float](float), self.sender.trace
        for span in trace:
            spans[span.stage] += span.end - span.begin
        whole = max(span.end for span in trace) - min(span.begin for span in trace)
        return {
            "failed": self.report.failed,
            "digest": self.report.digest,
            "extra_bytes": max(0, peak() - self.before) + self.kept_bytes,
            "pipeline_ratio": whole / max(spans.values()),
            "stages": dict(spans),
        }

    def copy_part(self) -> float:
        """Memory's speed: the part into memory that is there. Returns when it was through."""
        if not hasattr(self, "copied") or self.copied.keys() != self.local.keys():
            self.copied = {name: torch.zeros_like(tensor) for name, (_, tensor) in self.local.items()}
        for name, (_, tensor) in self.local.items():
            self.copied[name].copy_(tensor)
        return time.monotonic()

    def send_plain(self, ports: Sequence[int]) -> None:
        """Loopback's speed: the part to each instance, from a thread each."""

        def send(port: int) -> None:
            with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connected:
                connected.sendall(bytes([self.rank]))
                for _, tensor in self.local.values():
                    connected.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

        together([lambda port=port: send(port) for port in ports])

    def save(self, folder: str) -> None:
        torch.save({name: tensor for name, (_, tensor) in self.local.items()}, f"{folder}/rank-{self.rank}.pt")

    def size(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.local.values())

    def boxes(self) -> dict[str, Box]:
        return {name: box for name, (box, _) in self.local.items()}

    def broadcast(self, address: str, num_instances: int) -> float:
        with World(address, self.rank, num_instances) as groups:
            begin = time.monotonic()
            for _, tensor in self.local.values():
                dist.broadcast(tensor.contiguous(), self.rank, groups[self.rank])
            dist.barrier()
            return time.monotonic() - begin


class Instance(Measured):
    def __init__(self, number: int, mib: int) -> None:
        self.number, self.shapes = number, tensors(mib)
        self.name = f"instance-{number}"
        self.engine = {
            name: pages.zeros(prod(shape), DTYPE, "cpu").view(shape) for name, (shape, _) in self.shapes.items()
        }
        self.live = LiveWeights(self.engine, 0)
        self.scratch: dict[str, torch.Tensor] = {}
        self.before = resident()
        self.update: PrepareUpdate | None = None
        self.error = ""
        self.http = serve(self)

    def prepare(self, message: PrepareUpdate) -> None:
        reset_peak()
        self.staged = StagedWeights(self.live, message.update.version)
        specs = {tensor.name: tensor for offer in message.offers for tensor in offer.tensors}
        boxes = [box for offer in message.offers for bucket in offer.buckets for box in bucket.boxes]
        self.staged.prepare(list(specs.values()), boxes)
        self.error = ""
        self.done = threading.Event()
        self.loading = threading.Lock()
        self.num_left = sum(len(offer.buckets) for offer in message.offers)
        self.update = message
        if message.carrier != "http":
            threading.Thread(target=self._receive, args=(message,)).start()

    def load(self, _offer: Offer, bucket: Bucket, buffer: torch.Tensor) -> None:
        self.staged.load(bucket, buffer)
        with self.loading:
            self.num_left -= 1
            if not self.num_left:
                self.done.set()

    def _receive(self, message: PrepareUpdate) -> None:
        try:
            receive(message, self.load, threading.Event())
        except Exception:
            self.error = traceback.format_exc()
            self.done.set()

    def verify(self) -> tuple[str, float]:
        """The digest of what is staged, and when it was known, on the clock that all processes share."""
        assert self.done.wait(TIMEOUT_S), f"{self.num_left} buckets are missing"
        if self.error:
            raise RuntimeError(self.error)
        return self.staged.digest(), time.monotonic()

    def commit(self) -> dict[str, Any]:
        def swap(new: Any, version: int) -> None:
            self.engine = dict(new)

        begin = time.monotonic()
        self.staged.commit(swap)
        return {
            "pause_s": time.monotonic() - begin,
            "extra_bytes": max(0, peak() - self.before),
        }

    def check(self, version: int) -> None:
        for number, (name, (shape, _)) in enumerate(self.shapes.items()):
            expected = contents(number, shape, ((0,) * len(shape), shape), version)
            if not torch.equal(self.engine[name].view(torch.int16), expected.view(torch.int16)):
                raise AssertionError(f"{name} is wrong in {self.name}")

    def room(self) -> dict[str, torch.Tensor]:
        """Memory of the model's size that is there already, beside what updates are staged in."""
        if not self.scratch:
            self.scratch = {name: torch.zeros_like(tensor) for name, tensor in self.engine.items()}
        return self.scratch

    def copy_all(self) -> float:
        into = self.room()
        for name, tensor in self.engine.items():
            into[name].copy_(tensor)
        return time.monotonic()

    def listen(self) -> int:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=RANKS)
        return self.listener.getsockname()[1]

    def take_plain(self, sizes: Sequence[int]) -> float:
        """When everything was there that ranks send by plain connections, a thread each: so many bytes from each, to
        memory of the model's size."""
        memory = [tensor.view(-1).view(torch.uint8).numpy().data for tensor in self.room().values()]
        shares: list[list[memoryview]] = []
        for size in sizes:
            shares.append([])
            while size:
                first, memory[:1] = memory[0][:size], [memory[0][size:]] if len(memory[0]) > size else []
                shares[-1].append(first)
                size -= len(first)

        def take() -> None:
            with self.listener.accept()[0] as connected:
                for view in shares[connected.recv(1)[0]]:
                    while view:
                        view = view[connected.recv_into(view) :]

        together([take] * len(sizes))
        self.listener.close()
        return time.monotonic()

    def saved(self, folder: str, boxes: Sequence[dict[str, Box]]) -> None:
        into = self.room()
        for rank, of_rank in enumerate(boxes):
            for name, tensor in torch.load(f"{folder}/rank-{rank}.pt").items():
                self._place(into, name, of_rank[name]).copy_(tensor)

    def broadcast(self, address: str, num_instances: int, boxes: Sequence[dict[str, Box]]) -> float:
        into = self.room()
        with World(address, RANKS + self.number, num_instances) as groups:
            begin = time.monotonic()
            for rank, of_rank in enumerate(boxes):
                for name, box in of_rank.items():
                    place = self._place(into, name, box)
                    part = place if place.is_contiguous() else torch.empty(place.shape, dtype=DTYPE)
                    dist.broadcast(part, rank, groups[rank])
                    if part is not place:
                        place.copy_(part)
            dist.barrier()
            return time.monotonic() - begin

    @staticmethod
    def _place(into: dict[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
        return into[name][tuple(slice(a, b) for a, b in zip(*box, strict=True))]


class World:
    """torch's default group of all ranks and so many instances, and one of each rank with the instances."""

    def __init__(self, address: str, rank: int, num_instances: int) -> None:
        self.address, self.rank, self.num_instances = address, rank, num_instances

    def __enter__(self) -> list[Any]:
        size = RANKS + self.num_instances
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = rendezvous.connect(self.address, TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)
        groups = [dist.new_group([rank, *range(RANKS, size)]) for rank in range(RANKS)]
        dist.barrier()
        return groups

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def together(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve(instance: Instance) -> str:
    """The two routes of a server that carrier "http" needs. Returns their root."""

    class Routes(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            prepared = instance.update and UpdateProgress(instance.update.update.update_id, "prepared")
            self._reply(msgspec.json.encode(ServerState("", "", 0, "", 0, update=prepared)))

        def do_POST(self) -> None:
            body = bytearray(int(self.headers["Content-Length"]))
            self.rfile.readinto(body)
            _, _, _, _, sender, index = self.path.split("/")
            assert instance.update is not None
            offer = next(offer for offer in instance.update.offers if offer.sender == sender)
            instance.load(offer, offer.buckets[int(index)], torch.frombuffer(body, dtype=torch.uint8))
            self._reply(b"{}")

        def _reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


# -- The orchestrator's side ----------------------------------------------------------------------------------------


def process_main(connection: Connection, kind: str, number: int, mib: int) -> None:
    torch.set_num_threads(1)
    obey(connection, Rank(number, mib) if kind == "rank" else Instance(number, mib))
    os._exit(0)


def obey(connection: Connection, made: Any) -> None:
    """Do what is told, one call after the other, until the pipe ends."""
    while True:
        try:
            name, values = connection.recv()
        except EOFError:
            return
        try:
            attribute = getattr(made, name)
            connection.send((True, attribute(*values) if callable(attribute) else attribute))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Processes:
    """Ranks and instances, told things together."""

    def __init__(self, mib: int) -> None:
        os.environ |= FREED_MEMORY_STAYS | {"THP_MEM_ALLOC_ENABLE": "1"}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "ductile.weights.sender", "ductile.weights.carriers"])
        self._started: list[Any] = []

        def start(kind: str, number: int) -> Connection:
            mine, theirs = context.Pipe()
            process = context.Process(target=process_main, args=(theirs, kind, number, mib), daemon=True)
            process.start()
            theirs.close()
            self._started.append(process)
            return mine

        self.ranks = [start("rank", number) for number in range(RANKS)]
        self.instances = [start("instance", number) for number in range(max(INSTANCES))]

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.join()


def tell(connection: Connection, name: str, *values: Any) -> None:
    connection.send((name, values))


def answer(connection: Connection) -> Any:
    if not connection.poll(2 * TIMEOUT_S):
        raise TimeoutError("a process does not answer")
    try:
        succeeded, value = connection.recv()
    except EOFError:
        raise CannotGoOn("a process has ended; what it printed is above") from None
    if not succeeded:
        print(value, flush=True)
        raise CannotGoOn(value.strip().splitlines()[-1])
    return value


def ask(connections: Sequence[Connection], name: str, *values: Any) -> list[Any]:
    for connection in connections:
        tell(connection, name, *values)
    return [answer(connection) for connection in connections]


class Publishing:
    """One layout, and so many of the instances."""

    versions = iter(range(1, 1 << 20))

    def __init__(self, processes: Processes, layout: str, num_instances: int, folders: dict[str, str]) -> None:
        self.layout, self.folders = layout, folders
        self.ranks, self.instances = processes.ranks, processes.instances[:num_instances]

    def cpu_s(self) -> float:
        """CPU time that all processes have used so far."""
        return sum(ask([*self.ranks, *self.instances], "cpu_s"))

    def update(self, carrier: WeightCarrier, options: argparse.Namespace) -> dict[str, Any]:
        version = next(self.versions)
        ask(self.ranks, "hold", self.layout, version)
        urls = ask(self.instances, "http")
        receivers = tuple(
            Receiver(f"instance-{number}", carrier, url if carrier == "http" else "") for number, url in enumerate(urls)
        )
        update = WeightUpdate(
            f"publish-{version}",
            1,
            version,
            receivers,
            bucket_bytes=int(options.bucket_mib * MIB),
            num_slots=options.slots,
            folder=self.folders["disk"],
        )
        time.sleep(REST_S)
        cpu_s, begin = self.cpu_s(), time.monotonic()
        offers = tuple(ask(self.ranks, "begin", update))
        for number, instance in enumerate(self.instances):
            tell(instance, "prepare", PrepareUpdate(update, carrier, offers, f"instance-{number}"))
        for instance in self.instances:
            answer(instance)
        verified = ask(self.instances, "verify")
        of_ranks = ask(self.ranks, "end")
        cpu_s = self.cpu_s() - cpu_s
        failed = {name: why for each in of_ranks for name, why in each["failed"].items()}
        if failed:
            raise CannotGoOn("; ".join(failed.values()))
        digest = total_of(each["digest"] for each in of_ranks)
        assert all(found == digest for found, _ in verified), "the digests differ"
        of_instances = ask(self.instances, "commit")
        return {
            "seconds": max(at for _, at in verified) - begin,
            "cpu_s": cpu_s,
            "pause_s": max(each["pause_s"] for each in of_instances),
            "trainer_extra_bytes": max(each["extra_bytes"] for each in of_ranks),
            "instance_extra_bytes": max(each["extra_bytes"] for each in of_instances),
            "pipeline_ratio": max(each["pipeline_ratio"] for each in of_ranks),
            "stages_s": of_ranks[0]["stages"],
            "version": version,
        }

    def limit(self, name: str) -> dict[str, float]:
        cpu_s = self.cpu_s()
        seconds = getattr(self, name)()
        return {"seconds": seconds, "cpu_s": self.cpu_s() - cpu_s}

    def memcpy(self) -> float:
        begin = time.monotonic()
        for rank in self.ranks:
            tell(rank, "copy_part")
        for instance in self.instances:
            tell(instance, "copy_all")
        return max(answer(each) for each in (*self.ranks, *self.instances)) - begin

    def loopback(self) -> float:
        ports, sizes = ask(self.instances, "listen"), ask(self.ranks, "size")
        for instance in self.instances:
            tell(instance, "take_plain", sizes)
        begin = time.monotonic()
        for rank in self.ranks:
            tell(rank, "send_plain", ports)
        for rank in self.ranks:
            answer(rank)
        return max(answer(instance) for instance in self.instances) - begin

    def save_load(self, folder: str) -> float:
        boxes = ask(self.ranks, "boxes")
        begin = time.monotonic()
        ask(self.ranks, "save", folder)
        ask(self.instances, "saved", folder, boxes)
        return time.monotonic() - begin

    def save_load_tmpfs(self) -> float:
        return self.save_load(self.folders["tmpfs"])

    def save_load_disk(self) -> float:
        return self.save_load(self.folders["disk"])

    def gloo_broadcast(self) -> float:
        boxes = ask(self.ranks, "boxes")
        store = rendezvous.host_store()
        address, count = f"127.0.0.1:{store.port}", len(self.instances)
        for rank in self.ranks:
            tell(rank, "broadcast", address, count)
        for instance in self.instances:
            tell(instance, "broadcast", address, count, boxes)
        return max(answer(each) for each in (*self.ranks, *self.instances))


def measured(publishing: Publishing, options: argparse.Namespace, budget: Budget) -> Iterator[dict[str, Any]]:
    """The rows of one layout and number of instances; all contenders take turns."""
    contenders: dict[str, Callable[[], Any]] = {
        **{f"{carrier}": lambda c=carrier: publishing.update(c, options) for carrier in options.transports},
        **{limit: lambda c=limit: publishing.limit(c) for limit in sorted({LIMITS[c] for c in options.transports})},
        **{peer: getattr(publishing, peer) for peer in options.peers},
    }
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    first = publishing.update("shared_memory", options)  # makes the memory in which later ones are staged
    for number in range(options.repeats):
        for name, run in contenders.items():
            if number and budget.left_s < options.reserve_s:
                break
            with budget.turn_of(name):
                found[name].append(run())
                if name in TRANSPORTS and not number:
                    ask(publishing.instances, "check", found[name][-1]["version"])
    for carrier in options.transports:
        if not found[carrier] or not found[LIMITS[carrier]]:
            continue
        runs, limits = found[carrier], found[LIMITS[carrier]]
        seconds = statistics.median(run["seconds"] for run in runs)
        limit_s = statistics.median(run["seconds"] for run in limits)
        yield {
            "transport": carrier,
            "layout": publishing.layout,
            "instances": len(publishing.instances),
            "seconds": seconds,
            "limit_s": limit_s,
            "fraction_of_limit": limit_s / seconds,
            "best_seconds": min(run["seconds"] for run in runs),
            "best_limit_s": min(run["seconds"] for run in limits),
            "cpu_s": statistics.median(run["cpu_s"] for run in runs),
            "limit_cpu_s": statistics.median(run["cpu_s"] for run in limits),
            "pause_s": max(run["pause_s"] for run in runs),
            "trainer_extra_bytes": max(run["trainer_extra_bytes"] for run in runs),
            "instance_extra_bytes": first["instance_extra_bytes"],
            "staged": True,
            "pipeline_ratio": min(run["pipeline_ratio"] for run in runs),
            "stages_s": runs[-1]["stages_s"],
            "peers_s": {peer: statistics.median(found[peer]) for peer in options.peers if found[peer]},
            "repeats": len(runs),
        }


def show(rows: Sequence[dict[str, Any]], mib: float) -> None:
    print(f"\nA version of {mib:.0f} MiB from {RANKS} ranks; seconds, the median of several.")
    heads = ("seconds", "limit", "of limit", "best", "CPU", "its limit", "pause", "rank +MiB", "pipeline")
    heads += ("tmpfs", "disk", "gloo")
    print(f"{'':36}" + "".join(f"{head:>10}" for head in heads))
    for row in rows:
        peers = [row["peers_s"].get(peer) for peer in PEERS]
        cells = [row["seconds"], row["limit_s"], row["fraction_of_limit"], row["best_seconds"]]
        cells += [row["cpu_s"], row["limit_cpu_s"], row["pause_s"]]
        cells += [row["trainer_extra_bytes"] / MIB, row["pipeline_ratio"], *peers]
        what = f"{row['layout']:8} {row['transport']:15} to {row['instances']}"
        print(f"{what:36}" + "".join(f"{'-':>10}" if cell is None else f"{cell:10.3f}" for cell in cells))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--bucket-mib", type=float, default=UpdateOptions().bucket_bytes / MIB, help="size of a bucket")
    parser.add_argument("--slots", type=int, default=UpdateOptions().num_slots, help="buckets under way")
    parser.add_argument("--repeats", type=int, default=7, help="at most")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--instances", nargs="+", type=int, choices=INSTANCES, default=list(INSTANCES))
    options = parser.parse_args()
    budget = Budget(options.budget)
    for peer, reason in ELSEWHERE.items():
        budget.leave_out(peer, reason)
    cases = [f"{layout} to {count}" for layout in options.layouts for count in options.instances]
    options.reserve_s = options.budget / (2 * len(cases))
    model_bytes = num_bytes(tensors(options.mib))
    rows: list[dict[str, Any]] = []
    folders = {
        "tmpfs": tempfile.mkdtemp(dir="/dev/shm", prefix="publish-"),
        "disk": tempfile.mkdtemp(prefix="publish-"),
    }
    processes = Processes(options.mib)
    try:
        for _, case in budget.turns(cases):
            layout, _, count = case.partition(" to ")
            with budget.turn_of(case):
                rows += measured(Publishing(processes, layout, int(count), folders), options, budget)
                print(f"{case} measured", flush=True)
            gc.collect()
    finally:
        processes.end()
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
    show(rows, model_bytes / MIB)
    about = {"model_bytes": model_bytes, "bucket_bytes": int(options.bucket_mib * MIB), "slots": options.slots}
    write(options.json, {**provenance("torch", "numpy"), **about, "rows": rows, **budget.told}, indent=1)


if __name__ == "__main__":
    main()
