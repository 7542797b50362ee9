import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.core.layout.parallel_layout import ParallelLayout
from ductile.records import Generation, MicroBatch, Sample
from ductile.wire import codec
from ductile.wire.codec import BadFrame, decode, encode
from ductile.wire.messages import AssignRole, Done, Envelope, Finished, ForwardBackward, Ping

SAMPLE = Sample((5, 6, 7), (False, True, True), rollout_logprobs=(0.0, -0.7, float("-inf")), advantages=(0.0, 0.5, 0.5))
MESSAGES = [
    Ping(),
    AssignRole("train", {"model": {"name": "m", "tp": 1}, "x": None}, ParallelLayout.of((0, 2)), "127.0.0.1:1"),
    ForwardBackward((MicroBatch((SAMPLE,)), MicroBatch(()))),
    Finished((Generation("a", (1, 2), (-0.5, -0.25), (0, 1), "stop"),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    envelope = Envelope(3, 17, message)
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"epoch": 0, "seq": 1, "body": {"type": "Nonsense"}}),
        msgspec.msgpack.encode({"epoch": "x", "seq": 1, "body": {"type": "Done"}}),
        msgspec.msgpack.encode({"epoch": 0, "seq": 1, "body": {"type": "OptimStep"}}),
        encode(Envelope(0, 1, Done()))[:-1],
        # A record that contradicts itself is refused by its own check.
        msgspec.msgpack.encode(
            {
                "epoch": 0,
                "seq": 1,
                "body": {"type": "Score", "model": "policy", "samples": [{"token_ids": [1], "loss_mask": []}]},
            }
        ),
        b"\x91" * 100_000,
    ],
)
def test_a_bad_frame_is_a_sentence(frame: bytes):
    with pytest.raises(BadFrame, match="is not an Envelope"):
        decode(frame)


@given(st.binary(max_size=300))
def test_noise_never_raises_anything_else(frame: bytes):
    with contextlib.suppress(BadFrame):
        assert isinstance(decode(frame), Envelope)


def test_too_large_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch):
    frame = encode(Envelope(0, 1, MESSAGES[1]))
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 20)
    with pytest.raises(BadFrame, match=r"AssignRole has .* more than the limit of 20"):
        encode(Envelope(0, 1, MESSAGES[1]))
    with pytest.raises(BadFrame, match="more than the limit of 20"):
        decode(frame)
