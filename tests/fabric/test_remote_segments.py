"""Segments of another node: fetched over an encrypted socket, by who has the key alone."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import zmq

from ductile.fabric import remote_segments, segment
from ductile.fabric.node_copies import NodeCopies
from ductile.fabric.process import NODE_VARIABLE
from ductile.fabric.remote_segments import PIECE_BYTES, SegmentServer, fetch
from ductile.fabric.segment import Segment, SegmentUnavailable, map_segment, mapped_for_writing
from ductile.transport.curve import RunKey

NUM_BYTES = 2 * PIECE_BYTES + 12345
KEY = RunKey.new()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch):
    """A sealed segment of node 1, which is here, and its content. Locations say where other nodes get segments."""
    monkeypatch.setenv(NODE_VARIABLE, "1")
    monkeypatch.setattr(segment, "_url", "")
    monkeypatch.setattr(segment, "_fetch", None)
    server = SegmentServer("127.0.0.1", KEY)
    segment.set_url(server.address, lambda url, num_bytes: fetch(url, num_bytes, KEY))
    content = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8)
    served = Segment("ductile-test")
    served.append(content)
    served.seal()
    yield served, content
    served.close()


def test_another_node_fetches_it_and_this_one_maps_it(served, monkeypatch: pytest.MonkeyPatch):
    owned, content = served
    location = owned.location
    assert map_segment(location, NUM_BYTES, owned.fingerprint).equal(content)
    monkeypatch.setenv(NODE_VARIABLE, "2")
    assert map_segment(location, NUM_BYTES, owned.fingerprint).equal(content)
    with pytest.raises(SegmentUnavailable, match="it is on another host"), mapped_for_writing(location, "x", NUM_BYTES):
        pass
    with pytest.raises(SegmentUnavailable, match="is damaged"):
        map_segment(location, NUM_BYTES, owned.fingerprint + 1)
    owned.close()
    with pytest.raises(SegmentUnavailable, match="has no such memory any more"):
        map_segment(location, NUM_BYTES, owned.fingerprint)


def test_several_fetch_at_once(served, monkeypatch: pytest.MonkeyPatch):
    owned, content = served
    monkeypatch.setenv(NODE_VARIABLE, "2")
    found: list[bool] = []
    location = owned.location

    def work() -> None:
        found.append(map_segment(location, NUM_BYTES, owned.fingerprint).equal(content))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 3


def test_a_node_fetches_a_large_segment_once(served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    owned, content = served
    monkeypatch.setattr(remote_segments, "LEAST_BYTES", 1)
    num_fetched = []
    fetch_into = remote_segments._fetch_into
    monkeypatch.setattr(remote_segments, "_fetch_into", lambda *given: num_fetched.append(fetch_into(*given)))
    url = owned.location.split("|")[2]
    found: list[bool] = []

    def work() -> None:
        found.append(fetch(url, NUM_BYTES, KEY, NodeCopies(tmp_path / "copies")).equal(content))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (found, len(num_fetched)) == ([True] * 3, 1)
    [file] = (tmp_path / "copies").iterdir()
    file.write_text("/proc/1/fd/9999")  # whoever had the copy is gone
    assert fetch(url, NUM_BYTES, KEY, NodeCopies(tmp_path / "copies")).equal(content)
    assert len(num_fetched) == 2


def test_a_fetch_that_fails_leaves_no_copy(served, tmp_path: Path):
    copies = NodeCopies(tmp_path / "copies")

    def fails(content: torch.Tensor) -> None:
        raise SegmentUnavailable("is gone")

    with pytest.raises(SegmentUnavailable, match="is gone"):
        copies.get("a", 100, fails)
    assert copies.get("a", 100, lambda content: content.fill_(7)).equal(torch.full((100,), 7, dtype=torch.uint8))


def test_copies_are_not_made_where_others_can_see_them(tmp_path: Path):
    (tmp_path / "copies").mkdir(mode=0o755)
    with pytest.raises(OSError, match="is not this user's alone"):
        NodeCopies(tmp_path / "copies")


def test_a_stranger_gets_nothing_and_stops_nobody(served, monkeypatch: pytest.MonkeyPatch):
    owned, content = served
    monkeypatch.setattr(remote_segments, "SILENT_S", 0.3)
    url = owned.location.split("|")[2]
    address, _, id = url.rpartition("/")
    with pytest.raises(SegmentUnavailable, match=r"has been silent for 0\.3 s"):
        fetch(url, NUM_BYTES, RunKey.new())
    context = zmq.Context()
    for mechanism in ("none", "public key alone"):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.RCVTIMEO, 300)
        if mechanism != "none":
            public, secret = zmq.curve_keypair()
            stranger.setsockopt(zmq.CURVE_SERVERKEY, KEY.public.encode())
            stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
            stranger.setsockopt(zmq.CURVE_SECRETKEY, secret)
        stranger.connect(address)
        stranger.send_multipart([id.encode(), b"0", b"100"])
        with pytest.raises(zmq.Again):
            stranger.recv_multipart()
    context.destroy(linger=0)
    monkeypatch.setattr(remote_segments, "SILENT_S", 30.0)
    assert fetch(url, NUM_BYTES, KEY).equal(content)


def test_an_owner_that_is_gone_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote_segments, "SILENT_S", 0.3)
    with pytest.raises(SegmentUnavailable, match="cannot be fetched"):
        fetch("tcp://127.0.0.1:9/0123", 10, KEY)


def test_a_slot_says_where_its_segments_are_only_where_there_are_other_nodes():
    code = (
        "from ductile.fabric.segment import Segment\n"
        "from ductile.fabric.remote_segments import serve_segments\n"
        "from ductile.transport.curve import RunKey\n"
        "print(Segment('a').location)\n"
        "serve_segments('127.0.0.1', RunKey.new())\n"
        "print(Segment('a').location)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    before, after = done.stdout.splitlines()
    assert before.startswith("/proc/")
    assert "|" not in before
    assert "|tcp://127.0.0.1:" in after
