"""What the engine that a request leaves has computed of its context, on the way to the engine that goes on with it.

1. The source copies the keys and values out of its blocks (`Engine.migrate_out`) and keeps them in a
   `KVTransferBuffer`, a sealed memory segment for each request; a `KVHandle` says where.
2. The receiver maps the segment and checks it (`fetch`). It holds on to the mapping until the request gets blocks, so
   that the source may forget it, or die, as soon as the receiver has taken the request.
3. Where the receiver sees no memory of the source, it may be given the bytes themselves (`received`).
4. What cannot be fetched is computed again. The handle is an offer, never a need.

The content is by token, not by block, so that engines with other block sizes can read it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from ductile.fabric.segment import Segment, SegmentUnavailable, map_segment
from ductile.records import KVHandle


class KVUnavailable(Exception):
    """The KV cache of a handle cannot be used here. The text goes on after "the cache": "is gone: ..."."""


@dataclass(frozen=True, slots=True)
class RequestKV:
    """KV cache of the first tokens of one request, all computed under one weight version."""

    content: Tensor
    """Keys, then values: [2, layers, tokens, key/value heads, head size]. On the CPU."""
    version: int

    @property
    def num_tokens(self) -> int:
        return self.content.shape[2]


class KVTransferBuffer:
    """KV caches that other engines may still fetch, by request."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}

    def put(self, id: str, cache: RequestKV) -> KVHandle:
        """Keep a cache for others to fetch. What was kept under this id goes: the request has been elsewhere since, and
        came back.

        Raises `OSError` when there is no memory for it, or too many files are open."""
        self.forget([id])
        segment = Segment("ductile-cache")
        try:
            segment.append(cache.content)
            segment.seal()
        except BaseException:
            segment.close()
            raise
        self._segments[id] = segment
        return KVHandle(segment.location, cache.num_tokens, segment.num_bytes, cache.version, segment.fingerprint)

    def segment(self, id: str) -> Segment | None:
        return self._segments.get(id)

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id in self._segments:
                self._segments.pop(id).close()

    def close(self) -> None:
        self.forget(list(self._segments))


def fetch(handle: KVHandle, shape: Sequence[int], dtype: torch.dtype) -> RequestKV:
    """The KV cache that a handle describes. `shape` and `dtype` are what the content of `handle.num_tokens` tokens has
    here. Raises `KVUnavailable`."""
    _check_size(handle, shape, dtype)
    try:
        content = map_segment(handle.location, handle.num_bytes, handle.fingerprint)
    except SegmentUnavailable as error:
        raise KVUnavailable(str(error)) from error
    return RequestKV(content.view(dtype).view(*shape), handle.version)


def received(handle: KVHandle, content: bytes, shape: Sequence[int], dtype: torch.dtype) -> RequestKV:
    """The KV cache that a handle describes, of these bytes. Raises `KVUnavailable`."""
    _check_size(handle, shape, dtype)
    if len(content) != handle.num_bytes or xxhash.xxh3_64_intdigest(content) != handle.fingerprint:
        raise KVUnavailable(f"has come with {len(content)} bytes that are not those that were announced")
    return RequestKV(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(*shape), handle.version)


def _check_size(handle: KVHandle, shape: Sequence[int], dtype: torch.dtype) -> None:
    expected = torch.Size(shape).numel() * dtype.itemsize
    if handle.num_bytes != expected:
        raise KVUnavailable(
            f"has {handle.num_bytes} bytes, and {handle.num_tokens} tokens take {expected} here: it is another model's"
        )
