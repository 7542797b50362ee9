"""Messages to bytes and back: msgpack, checked against the types of `ductile.messages` on the way in."""

from typing import Any

import msgspec

from ductile.columns import Column
from ductile.messages.message import Message
from ductile.messages.workers import Envelope

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""No message is larger. A token of a `ForwardBackward` takes 7 or 8 bytes, and as many more with a scorer's log-probs,
so this is some 16 million of them."""
ENVELOPE_BYTES = 64
"""No envelope adds more to its body."""
LONG_TOKENS = 1 << 18
"""Tokens in a message whose encoding takes some milliseconds."""
LONG_FRAME_BYTES = 1 << 21
"""Bytes of a frame whose decoding takes some milliseconds."""


class BadFrame(Exception):
    """A message that cannot be sent or understood. The text is a sentence."""


def encode(envelope: Envelope) -> bytes:
    return enclose(envelope.epoch, envelope.seq, encode_body(envelope.body))


def encode_body(body: Message) -> msgspec.Raw:
    """The body of an envelope, for `enclose`. Raises BadFrame for one that is too large."""
    encoded = _encoder.encode(body)
    if len(encoded) > MAX_FRAME_BYTES - ENVELOPE_BYTES:
        raise BadFrame(
            f"{type(body).__name__} has {len(encoded)} bytes on the wire, more than the limit of {MAX_FRAME_BYTES}"
        )
    return msgspec.Raw(encoded)


def enclose(epoch: int, seq: int, body: msgspec.Raw) -> bytes:
    """The frame of an envelope whose body is encoded already."""
    return _encoder.encode(_Enclosed(epoch, seq, body))


def encode_message(message: msgspec.Struct) -> bytes:
    """A message that is no `Envelope`."""
    return _encoder.encode(message)


def decode_as(kind: Any, frame: bytes) -> Any:
    """The message, which is of this kind. Raises BadFrame."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise BadFrame(f"a frame of {len(frame)} bytes is not what was expected: {error}") from error


def is_long(message: Message) -> bool:
    """Return whether encoding the message would hold an event loop up."""
    return message.count_tokens() > LONG_TOKENS


def decode(frame: bytes | memoryview) -> Envelope:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame has {len(frame)} bytes, more than the limit of {MAX_FRAME_BYTES}")
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise BadFrame(f"a frame of {len(frame)} bytes is not an Envelope: {error}") from error


class _Enclosed(msgspec.Struct):
    """An `Envelope` as it is written."""

    epoch: int
    seq: int
    body: msgspec.Raw


def _to_bytes(value: object) -> bytes:
    if isinstance(value, Column):
        return value.to_bytes()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _from_bytes(kind: type[Any], data: object) -> Any:
    return kind.from_bytes(data)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_decoder = msgspec.msgpack.Decoder(Envelope, dec_hook=_from_bytes)
