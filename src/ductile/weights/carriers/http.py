"""Buckets as bodies of POST requests to the servers: the slow way that always works. The response is the
acknowledgement.

    POST /weights/buckets/{update_id}/{sender}/{index}      X-Ductile-Epoch, X-Ductile-Checksum; the bucket's bytes

A sender is told by nobody when a server has been prepared, so it asks for the server's state first.

A server that joins has nobody who posts to it: it asks for the buckets of another server's lease.

    GET <location of the offer>/{index}
"""

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from socket import SHUT_RDWR
from threading import Event
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
from torch import Tensor

from ductile.error_text import error_text
from ductile.messages.updates import Bucket, Offer, Receiver, ServerState, WeightUpdate
from ductile.transport.http_client import trusted
from ductile.weights.carriers.carrier import UpdateFailed, bytes_of
from ductile.weights.carriers.control import TICK_S

ASK_AGAIN_S, MOST_PAUSE_S = 0.02, 1.0
CONNECT_S = 0.25
"""Seconds that a server has to take a connection the first time; each time after that twice as long."""
CROWDED = 503
"""Status of a server that has no room for a bucket, and soon has."""
SHOWN_BYTES, PIECE_BYTES = 300, 1 << 20
_LOST = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, http.client.CannotSendRequest)


def is_lease(offer: Offer) -> bool:
    """Return whether the sender is a server that is asked for its buckets; a rank posts them."""
    return "://" in offer.location


def receive(update: WeightUpdate, offer: Offer, load: Callable[[Bucket, Tensor, str], None], stopped: Event) -> None:
    """Ask for the buckets of a lease, one after the other. Raises `UpdateFailed`."""
    root = urlsplit(offer.location)
    connection = _connection(root, update.bucket_timeout_s)
    try:
        for bucket in offer.buckets:
            if stopped.is_set():
                raise UpdateFailed("the update was stopped")
            connection.request("GET", f"{root.path}/{bucket.index}")
            with connection.getresponse() as response:
                if response.status != 200:
                    text = response.read(SHOWN_BYTES).decode("utf-8", "replace").strip()
                    raise UpdateFailed(f"{offer.sender} gave no bucket {bucket.index}: HTTP {response.status}: {text}")
                content = _read(response, bucket, stopped)
                load(bucket, bytes_of(content), response.headers.get("X-Ductile-Checksum", ""))
    except (OSError, http.client.HTTPException) as error:
        raise UpdateFailed(f"{offer.sender} cannot be reached: {error_text(error)}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, bucket: Bucket, stopped: Event) -> bytearray:
    """Return the bucket's bytes, and read no more than it has, whatever the sender says. Raises `UpdateFailed`."""
    content = bytearray()
    while piece := response.read(min(PIECE_BYTES, bucket.num_bytes + 1 - len(content))):
        if stopped.is_set():
            raise UpdateFailed("the update was stopped")
        content += piece
        if len(content) > bucket.num_bytes:
            raise UpdateFailed(f"bucket {bucket.index} has {bucket.num_bytes} bytes, and more of them came")
    return content


class HttpSender:
    """One thread and one connection a receiver."""

    def __init__(self, update: WeightUpdate, sender: str, receivers: Sequence[Receiver]) -> None:
        self._posts = {receiver.instance: _Poster(update, sender, receiver) for receiver in receivers}
        self._failed: dict[str, str] = {}

    @property
    def live(self) -> bool:
        return bool(self._posts.keys() - self._failed.keys())

    def send(self, bucket: Bucket, slot: int, content: Tensor, checksum: str) -> None:
        for instance, poster in self._posts.items():
            if instance not in self._failed:
                poster.begin(bucket, content, checksum)

    def wait(self, bucket: Bucket) -> None:
        for instance, poster in self._posts.items():
            if instance not in self._failed and (reason := poster.wait(bucket.index)):
                self._failed[instance] = reason

    def leave_out(self, instance: str) -> None:
        if poster := self._posts.get(instance):
            poster.end()

    def close(self, reason: str = "") -> dict[str, str]:
        if reason:
            for instance in self._posts.keys() - self._failed.keys():
                self._failed[instance] = f"{instance} has not got everything: {reason}"
        for poster in self._posts.values():
            poster.close()
        return self._failed


class _Poster:
    """One receiver's requests, in order, in a thread of their own."""

    def __init__(self, update: WeightUpdate, sender: str, receiver: Receiver) -> None:
        self._instance, self._timeout_s = receiver.instance, update.bucket_timeout_s
        self._update_id = update.update_id
        self._token = receiver.token
        self._access = {"Authorization": f"Bearer {receiver.token}"} if receiver.token else {}
        """Header that every route of a server with an API key asks for, also that of its state."""
        self._headers = {"Content-Type": "application/octet-stream", "X-Ductile-Epoch": str(update.epoch)}
        self._headers |= self._access
        root = self._root = urlsplit(receiver.url)
        self._connection = _connection(root, update.bucket_timeout_s)
        self._state_path = f"{root.path.rstrip('/')}/fleet/state"
        self._path = f"{root.path.rstrip('/')}/weights/buckets/{quote(update.update_id, '')}/{quote(sender, '')}"
        self._ended = Event()
        self._thread = ThreadPoolExecutor(1, f"weights to {receiver.instance}")
        self._requests: dict[int, Future[None]] = {}
        self._progress_at = time.monotonic()
        self._prepared = False

    def begin(self, bucket: Bucket, content: Tensor, checksum: str) -> None:
        if not self._requests:
            self._progress_at = time.monotonic()
        try:
            request = self._thread.submit(self._post, bucket, content, checksum)
        except RuntimeError:  # it was ended meanwhile
            (request := Future[None]()).cancel()
        self._requests[bucket.index] = request

    def wait(self, index: int) -> str:
        """Return why the receiver did not take the bucket; "" if it did."""
        request = self._requests[index]
        while not request.done() and time.monotonic() - self._progress_at <= self._timeout_s:
            wait_for([request], TICK_S)
        self._progress_at = time.monotonic()
        if request.cancelled():
            error = UpdateFailed("was left out")
        else:
            error = request.exception() if request.done() else TimeoutError()
        if error is None:
            del self._requests[index]
            return ""
        self.end()
        if isinstance(error, TimeoutError):
            what = f"did not acknowledge bucket {index} within {self._timeout_s:g} s"
        else:
            what = str(error) if isinstance(error, UpdateFailed) else f"cannot be reached: {error_text(error)}"
        return f"{self._instance} {what}"

    def end(self) -> None:
        """Let the thread come to its end, whatever it waits for. From any thread."""
        self._ended.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if connected := self._connection.sock:
            with suppress(OSError):  # it has ended already
                connected.shutdown(SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._thread.shutdown()
        self._connection.close()
        self._requests.clear()  # what failed keeps the memory that it was sent from

    def _post(self, bucket: Bucket, content: Tensor, checksum: str) -> None:
        self._wait_until_prepared()
        headers = {**self._headers, "Content-Length": str(bucket.num_bytes)}
        if checksum:
            headers["X-Ductile-Checksum"] = checksum
        pause_s, until = ASK_AGAIN_S, time.monotonic() + self._timeout_s
        while True:
            status, reply = self._ask("POST", f"{self._path}/{bucket.index}", content.numpy().data, headers)
            if status == 200:
                return
            if status != CROWDED or time.monotonic() + pause_s > until or self._ended.wait(pause_s):
                raise UpdateFailed(f"refused bucket {bucket.index}: HTTP {status}: {self._shown(reply)}")
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _wait_until_prepared(self) -> None:
        while not self._prepared:
            status, reply = self._ask("GET", self._state_path, None, self._access)
            if status != 200:
                raise UpdateFailed(f"does not say its state: HTTP {status}: {self._shown(reply)}")
            try:
                progress = msgspec.json.decode(reply, type=ServerState).update
            except msgspec.MsgspecError as error:
                raise UpdateFailed(f"says a state that is none: {error}") from error
            if progress is None or progress.update_id != self._update_id:
                if self._ended.wait(ASK_AGAIN_S):
                    raise UpdateFailed("was left out")
            elif progress.phase in ("prepared", "receiving"):
                self._prepared = True
            else:
                raise UpdateFailed(f"is not receiving the update but {progress.phase}: {progress.reason}")

    def _ask(self, method: str, path: str, body: memoryview | None, headers: dict[str, str]) -> tuple[int, bytes]:
        """Return status and body of the reply. A connection that the server has closed meanwhile is made anew once."""
        kept = self._connection.sock is not None
        while not self._ended.is_set():
            try:
                if self._connection.sock is None:
                    self._connect()
                self._connection.request(method, path, body, headers)
                response = self._connection.getresponse()
                return response.status, response.read()
            except _LOST:
                self._connection.close()
                if not kept:
                    raise
                kept = False
        raise UpdateFailed("was left out")

    def _connect(self) -> None:
        """Connect, in several tries: `end` wakes no thread that waits for a host which is gone, and answers nothing."""
        left_s, try_s = self._timeout_s, CONNECT_S
        while self._connection.sock is None and not self._ended.is_set():
            self._connection = _connection(self._root, min(try_s, left_s))
            try:
                self._connection.connect()
            except TimeoutError:
                self._connection.close()
                if left_s <= try_s:
                    raise
                left_s, try_s = left_s - try_s, 2 * try_s
        connected = self._connection.sock
        if connected is None or self._ended.is_set():
            raise UpdateFailed("was left out")
        connected.settimeout(self._timeout_s)

    def _shown(self, reply: bytes) -> str:
        text = reply[:SHOWN_BYTES].decode("utf-8", "replace").strip()
        return text.replace(self._token, "***") if self._token else text


def _connection(root: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    if root.scheme == "https":
        return http.client.HTTPSConnection(root.netloc, timeout=timeout_s, context=trusted())
    return http.client.HTTPConnection(root.netloc, timeout=timeout_s)
