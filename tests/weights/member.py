"""`python -m tests.weights.member FILE`: a process that takes part in a weight update, as the JSON file says, and says
on its standard output what it does, a word and a number a line.

A receiver: "bucket N" when it gets its N-th, of all senders; "staged" and the fingerprint of all that it got; or
"failed" and why. A sender: its location, "bucket N" before it fills that one, and its report.

It stands still at a bucket when the file says so, until it is killed.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from ductile.messages.updates import Bucket, Offer, PrepareUpdate, SendReport, ServerState, UpdateProgress, WeightUpdate
from ductile.weights.carriers import UpdateFailed, receive
from ductile.weights.carriers.carrier import checksum_of
from ductile.weights.carriers.shared_memory import RingMemory
from ductile.weights.sender import WeightSender

TOKEN = "a-token-that-is-shown-nowhere"


class Task(msgspec.Struct):
    hold_at: int = -1
    """Bucket at which it stands still."""
    fail_at: int = -1
    """Bucket at which the sink raises (http: replies 500)."""
    crowded: int = 0
    """Buckets in a row that it has no room for (http: replies 503)."""
    load_s: float = 0.0
    """Time that it takes to load a bucket."""
    prepare: PrepareUpdate | None = None
    send: WeightUpdate | None = None
    sizes: tuple[int, ...] = ()


def content(sender: str, index: int, num_bytes: int) -> torch.Tensor:
    """The bytes of a bucket: random, and others in each."""
    generator = torch.Generator().manual_seed(hash((len(sender), *sender.encode(), index)) % (1 << 63))
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def fingerprint(buckets: dict[tuple[str, int], torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for key in sorted(buckets):
        digest.update(repr(key).encode())
        digest.update(buckets[key].numpy().data)
    return digest.hexdigest()


def offer_of(sender: str, sizes: tuple[int, ...]) -> Offer:
    return Offer(sender, (), tuple(Bucket(index, size, ()) for index, size in enumerate(sizes)))


def say(*words: object) -> None:
    print(*words, flush=True)


def fill(bucket: Bucket, buffer: torch.Tensor, sender: str) -> int:
    buffer.copy_(content(sender, bucket.index, bucket.num_bytes))
    return bucket.index + 1


class Staging:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.buckets: dict[tuple[str, int], torch.Tensor] = {}

    def load(self, offer: Offer, bucket: Bucket, buffer: torch.Tensor) -> None:
        number = len(self.buckets)
        say("bucket", number)
        if number == self.task.hold_at:
            time.sleep(600)
        if number == self.task.fail_at:
            raise ValueError("no room")
        time.sleep(self.task.load_s)
        assert (offer.sender, bucket.index) not in self.buckets, "a bucket came twice"
        self.buckets[offer.sender, bucket.index] = buffer.clone()


def serve(task: Task) -> None:
    """The routes of a server that a sender by HTTP needs."""
    staging, lock = Staging(task), threading.Lock()
    progress: list[UpdateProgress | None] = [None]

    class Routes(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self._has_key():  # a server with an API key asks for it here, too
                self._reply(200, msgspec.json.encode(ServerState("i", "m", 0, "", 0, update=progress[0])))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not self._has_key():
                return
            if self.path == "/weights/prepare":
                task.prepare = msgspec.json.decode(body, type=PrepareUpdate)
                progress[0] = UpdateProgress(task.prepare.update.update_id, "prepared")
                self._reply(200, b"")
            elif task.crowded:
                task.crowded -= 1
                self._reply(503, b"there are too many buckets at once")
            else:
                self._load(body)

        def _has_key(self) -> bool:
            if self.headers["Authorization"] == f"Bearer {TOKEN}":
                return True
            self._reply(401, f"the token is not {self.headers['Authorization']}".encode())
            return False

        def _load(self, body: bytes) -> None:
            _, _, _, update_id, sender, index = self.path.split("/")
            assert task.prepare
            assert update_id == task.prepare.update.update_id
            offer = next(offer for offer in task.prepare.offers if offer.sender == sender)
            buffer = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            if task.prepare.update.verify == "crc":
                assert self.headers["X-Ductile-Checksum"] == checksum_of(buffer)
            try:
                with lock:
                    staging.load(offer, offer.buckets[int(index)], buffer)
            except ValueError as error:
                say("failed", error)
                return self._reply(500, str(error).encode())
            if len(staging.buckets) == sum(len(offer.buckets) for offer in task.prepare.offers):
                say("staged", fingerprint(staging.buckets))
            return self._reply(200, b"{}")

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    say("url", f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


def main(file: str) -> None:
    task = msgspec.json.decode(Path(file).read_bytes(), type=Task)
    if task.send:
        said = threading.Event()

        def hold_and_fill(bucket: Bucket, buffer: torch.Tensor) -> int:
            said.wait()
            say("bucket", bucket.index)
            if bucket.index == task.hold_at:
                time.sleep(600)
            return fill(bucket, buffer, "rank-0")

        def tell(report: SendReport) -> None:
            say("report", json.dumps(msgspec.to_builtins(report)))

        sender = WeightSender(task.send, offer_of("rank-0", task.sizes), hold_and_fill, tell, RingMemory())
        say("location", sender.start().location)
        said.set()
        sender.finish(600)
    elif task.prepare is None:
        serve(task)
    else:
        staging = Staging(task)
        try:
            receive(task.prepare, staging.load, threading.Event())
        except UpdateFailed as error:
            say("failed", error)
        else:
            say("staged", fingerprint(staging.buckets))


if __name__ == "__main__":
    main(sys.argv[1])
