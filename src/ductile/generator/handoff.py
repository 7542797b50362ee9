"""What the engine that a request leaves has computed of its context, on the way to the engine that goes on with it.

1. The source copies the keys and values out of its blocks (`Engine.hand_off`) and keeps them on a `Shelf`, in a sealed
   memory segment for each request; a `CacheNote` says where.
2. The receiver maps the segment and checks it (`fetch`). It holds on to the mapping until the request gets blocks, so
   that the source may forget it, or die, as soon as the receiver has taken the request.
3. What cannot be fetched is computed again. The note is an offer, never a need.

The content is by token, not by block, so that engines with other block sizes can read it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ductile.fabric.segment import Segment, SegmentUnavailable, map_segment
from ductile.records import CacheNote


class CacheUnavailable(Exception):
    """A note's cache cannot be used here. The text goes on after "the cache": "is gone: ..."."""


@dataclass(frozen=True, slots=True)
class HandedCache:
    """KV cache of the first tokens of one request, all computed under one weight version."""

    content: Tensor
    """Keys, then values: [2, layers, tokens, key/value heads, head size]. On the CPU."""
    version: int

    @property
    def num_tokens(self) -> int:
        return self.content.shape[2]


class Shelf:
    """Caches that others may still fetch, by request."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def put(self, id: str, cache: HandedCache) -> CacheNote:
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
        return CacheNote(segment.location, cache.num_tokens, segment.num_bytes, cache.version, segment.fingerprint)

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            if id in self._segments:
                self._segments.pop(id).close()

    def close(self) -> None:
        self.forget(list(self._segments))


def fetch(note: CacheNote, shape: Sequence[int], dtype: torch.dtype) -> HandedCache:
    """The cache that a note describes. `shape` and `dtype` are what the content of `note.num_tokens` tokens has here.
    Raises `CacheUnavailable`."""
    expected = torch.Size(shape).numel() * dtype.itemsize
    if note.num_bytes != expected:
        raise CacheUnavailable(
            f"has {note.num_bytes} bytes, and {note.num_tokens} tokens take {expected} here: it is another model's"
        )
    try:
        content = map_segment(note.location, note.num_bytes, note.fingerprint)
    except SegmentUnavailable as error:
        raise CacheUnavailable(str(error)) from error
    return HandedCache(content.view(dtype).view(*shape), note.version)
