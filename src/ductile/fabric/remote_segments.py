"""Segments from node to node: each process serves its own (`ductile.fabric.segment`) over one encrypted socket.

    serve_segments(host, key)                          once, in a process that other nodes may fetch from
    content = fetch(url, num_bytes)                    in one of another node

    receiver   DEALER     [ id of the segment | offset | number of bytes ]     a few pieces are asked for ahead
    owner      ROUTER     [ offset | piece ]      or [ offset ] when there is no such segment any more

A receiver fetches when it wants to, and the owner needs not to do anything for it: it is as with memory of the same
host. Weight versions and KV caches go this way; of a large segment a node has one copy (`ductile.fabric.node_copies`).
gloo or NCCL would make a group for each receiver that comes and goes, and say nothing of one that dies; their bytes
would be plain.
"""

import sys
import threading
from contextlib import suppress
from typing import Any

import torch
import zmq
from torch import Tensor

from ductile.error_text import error_text
from ductile.fabric.node_copies import LEAST_BYTES, NodeCopies
from ductile.fabric.segment import OPEN, SegmentUnavailable, set_url
from ductile.transport.curve import DOOR, Doorkeeper, RunKey

PIECE_BYTES = 4 << 20
AHEAD = 6
"""Pieces that a receiver has asked for and not got yet: enough to keep a fast network busy."""
SILENT_S = 30.0
"""A receiver waits so long for the next piece."""
REQUEST_BYTES = 1 << 10
_serving: "SegmentServer | None" = None


class SegmentServer:
    """Serves the open segments of this process to the other processes of the run, in a thread of its own."""

    def __init__(self, host: str, key: RunKey) -> None:
        """host: address of this machine that the others reach. Raises `zmq.ZMQError` where it cannot be bound."""
        self._context = zmq.Context()
        self._door, self._doorkeeper = self._context.socket(zmq.REP), Doorkeeper(key)
        self._door.bind(DOOR)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
        key.guard(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.key = key
        threading.Thread(target=self._run, name="segments for other nodes", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._door, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while True:  # without a deadline: the process ends it
            ready = dict(poller.poll())
            if self._door in ready:
                self._door.send_multipart(self._doorkeeper.reply(self._door.recv_multipart()))
            if self._socket in ready:
                self._reply(self._socket.recv_multipart())

    def _reply(self, frames: list[bytes]) -> None:
        connection, *request = frames
        if len(request) != 3:
            return
        id, offset, size = request
        segment = OPEN.get(id.decode(errors="replace"))
        content = b"" if segment is None else segment.read(_number(offset), min(_number(size), PIECE_BYTES))
        with suppress(zmq.ZMQError):  # the receiver is gone
            self._socket.send_multipart([connection, offset, *([content] if content else [])], copy=False)


def serve_segments(host: str, key: RunKey) -> None:
    """Have other nodes reach this process's segments, from now on. It says where in each segment's location."""
    global _serving
    if _serving is None:
        _serving = SegmentServer(host, key)
        copies = NodeCopies()
        set_url(_serving.address, lambda url, num_bytes: fetch(url, num_bytes, key, copies))


def fetch(url: str, num_bytes: int, key: RunKey, copies: NodeCopies | None = None) -> Tensor:
    """Return all bytes of a segment of another node. url: tcp://host:port/id. copies: those of this node, which has a
    large segment once then. Raises `SegmentUnavailable`."""
    address, _, id = url.rpartition("/")
    if copies is not None and num_bytes >= LEAST_BYTES:
        try:
            return copies.get(id, num_bytes, lambda content: _fetch_into(content, address, id, key))
        except OSError as error:
            print(f"{error_text(error)}: this process fetches for itself", file=sys.stderr)
    content = torch.empty(num_bytes, dtype=torch.uint8)
    _fetch_into(content, address, id, key)
    return content


def _fetch_into(content: Tensor, address: str, id: str, key: RunKey) -> None:
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + REQUEST_BYTES)  # encryption adds some bytes
        socket.setsockopt(zmq.RCVTIMEO, int(SILENT_S * 1000))
        key.enter(socket)
        socket.connect(address)
        _fill(content, socket, id.encode(), address)
    except zmq.ZMQError as error:
        raise SegmentUnavailable(f"cannot be fetched from {address}: {error}") from error
    finally:
        context.destroy(linger=0)


def _fill(content: Tensor, socket: "zmq.Socket[Any]", id: bytes, address: str) -> None:
    num_bytes, asked, num_got = content.numel(), 0, 0
    whole = content.numpy().data
    missing = dict[int, int]()
    while num_got < num_bytes:
        while asked < num_bytes and len(missing) < AHEAD:
            size = missing[asked] = min(PIECE_BYTES, num_bytes - asked)
            socket.send_multipart([id, str(asked).encode(), str(size).encode()])
            asked += size
        try:
            frames = socket.recv_multipart(copy=False)
        except zmq.Again:
            raise SegmentUnavailable(f"cannot be fetched: {address} has been silent for {SILENT_S:g} s") from None
        offset = _number(frames[0].bytes)
        size = missing.pop(offset, -1)
        if len(frames) != 2 or len(frames[1]) != size:
            raise SegmentUnavailable(f"is gone: {address} has no such memory any more; its owner ended or withdrew it")
        whole[offset : offset + size] = frames[1].buffer
        num_got += size


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < 19 else 0
