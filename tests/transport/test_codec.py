import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.columns import Floats, Mask, TokenIds, Versions
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.agents import FromAgent, NodeReady, Renew, SignalSlot, SlotEnded, StartSlot, ToAgent
from ductile.messages.workers import AssignRole, Done, Envelope, Finished, ForwardBackward, Generate, Ping, Score
from ductile.records import GenerateRequest, Generation, MicroBatch, Sample, Sampling
from ductile.transport import codec
from ductile.transport.codec import BadFrame, decode, decode_as, encode, encode_message, is_long

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
        # No slot says of itself that it is lost: that is the mailbox's to say.
        msgspec.msgpack.encode({"epoch": 0, "seq": 0, "body": {"type": "Died", "reason": "gone"}}),
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


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            {"token_ids": [1, 2, 3]},
            r"TokenIds must be the bytes of a column.* - at `\$.body.generations\[0\].token_ids`",
        ),
        ({"token_ids": TokenIds((1, -2, 3)).to_bytes()}, "TokenIds has the value -2"),
        ({"token_ids": TokenIds((1, 2)).to_bytes()}, "completion a: 2 tokens, 3 log-probs and 3 versions"),
        ({"logprobs": Floats((0.5,) * (1 << 20)).to_bytes()}, "3 tokens, 1048576 log-probs"),
        ({"logprobs": b"\x80\x04N."}, "Floats cannot be written in form 46"),
        ({"versions": Versions((-5,) * 3).to_bytes()}, "Versions has the value -5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_column_is_a_bad_frame(wrong: dict[str, object], sentence: str):
    columns = {"token_ids": TokenIds((1, 2, 3)), "logprobs": Floats((0.5,) * 3), "versions": Versions((1,) * 3)}
    fields = {"id": "a", "finish_reason": "stop"} | {name: each.to_bytes() for name, each in columns.items()}

    def frame(**changed: object) -> bytes:
        body = {"type": "Finished", "generations": [fields | changed]}
        return msgspec.msgpack.encode({"epoch": 0, "seq": 0, "body": body})

    assert decode(frame()).body == Finished((Generation("a", **columns, finish_reason="stop"),))
    with pytest.raises(BadFrame, match=sentence):
        decode(frame(**wrong))


def test_a_token_takes_seven_bytes_on_either_way():
    """Of a vocabulary of 150,000: three for its id, four for its log-prob."""
    length = 1000
    token_ids, logprobs = TokenIds(range(150_000 - length, 150_000)), Floats(-np.arange(length) / 7)
    generation = Generation("a", token_ids, logprobs, Versions.full(length, 3), "stop")
    sample = Sample(token_ids, Mask.full(length, True), logprobs, Floats.full(length, 0.25))
    for message in (Finished((generation,)), ForwardBackward((MicroBatch((sample,)),))):
        assert 7 * length < len(encode(Envelope(0, 0, message))) < 7 * length + 250


def test_long_messages_are_those_of_many_tokens():
    prompt = TokenIds.full(codec.LONG_TOKENS // 2 + 1, 1)
    sample, request = Sample(prompt, Mask.full(len(prompt), True)), GenerateRequest("a", prompt, Sampling())
    for one, two in (
        (ForwardBackward((MicroBatch((sample,)),)), ForwardBackward((MicroBatch((sample,)), MicroBatch((sample,))))),
        (Score((sample,), "policy"), Score((sample, sample), "policy")),
        (Generate((request,)), Generate((request, request))),
    ):
        assert not is_long(one)
        assert is_long(two)
    assert not is_long(Ping())


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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ToAgent, StartSlot(3, 1)),
        (ToAgent, SignalSlot(3, 99, 9)),
        (ToAgent, Renew()),
        (FromAgent, Renew()),
        (FromAgent, NodeReady(None)),
        (FromAgent, SlotEnded(3, 99, -9, "")),
    ],
)
def test_a_message_of_an_agent_or_to_it_is_read_only_where_it_belongs(kind, message):
    assert decode_as(kind, encode_message(message)) == message
    other = FromAgent if kind is ToAgent else ToAgent
    if not isinstance(message, Renew):
        with pytest.raises(BadFrame, match="is not what was expected"):
            decode_as(other, encode_message(message))
    with pytest.raises(BadFrame, match="is not what was expected"):
        decode_as(kind, b"garbage")
