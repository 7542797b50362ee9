"""Envelopes to bytes and back: msgpack, checked against the types of `ductile.wire.messages` on the way in."""

import msgspec

from ductile.wire.messages import Envelope

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""No message is larger. A token of a `ForwardBackward` takes about 40 bytes, so this is some six million of them."""


class BadFrame(Exception):
    """A message that cannot be sent or understood. The text is a sentence."""


def encode(envelope: Envelope) -> bytes:
    frame = _encoder.encode(envelope)
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(
            f"{type(envelope.body).__name__} has {len(frame)} bytes on the wire, more than the limit of "
            f"{MAX_FRAME_BYTES}"
        )
    return frame


def decode(frame: bytes | memoryview) -> Envelope:
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame has {len(frame)} bytes, more than the limit of {MAX_FRAME_BYTES}")
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise BadFrame(f"a frame of {len(frame)} bytes is not an Envelope: {error}") from error


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
