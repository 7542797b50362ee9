"""Keys and values of prompts that go from the server that computed them to the one that goes on with them.

The first keeps them in a memory segment under an unguessable name, for a while and within bounds: what comes when there
is no room takes the place of the oldest. The other maps the segment where both are on one host, else it fetches the
bytes over HTTP. They are checked (size, fingerprint, weights, tokens). What cannot be had in time is computed again.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence

from ductile.fabric.process import host
from ductile.fabric.segment import READ_BYTES, Segment, SegmentUnavailable
from ductile.generator.engine.engine import Engine
from ductile.generator.engine.kv_transfer import KVTransferBuffer, KVUnavailable, RequestKV
from ductile.generator.server.kv_params import RemoteKV, digest_of
from ductile.messages.updates import Digest
from ductile.records import GenerateRequest
from ductile.transport.http_client import HttpClient, NoReply
from ductile.transport.http_server.middleware import KV

LOG = logging.getLogger(__name__)

LEASE_S = 120.0
"""Longest time that keys and values are kept for another server."""
FETCH_S = 30.0
"""Longest time that fetching them may take; after it they are computed again."""


class KVLeases:
    """Keys and values that others may fetch. Made in the loop that serves."""

    def __init__(self, most_bytes: int, lease_s: float = LEASE_S) -> None:
        """most_bytes: of all that is kept."""
        self._most_bytes, self._lease_s = most_bytes, lease_s
        self._buffer = KVTransferBuffer()
        self._leases: OrderedDict[str, tuple[int, asyncio.TimerHandle]] = OrderedDict()
        """Bytes of each lease, and when it ends; the oldest first."""

    async def keep(self, cache: RequestKV, tokens: Sequence[int], digest: Digest, base_url: str) -> RemoteKV | None:
        """Keep a prompt's keys and values. base_url: root of the server's routes. None where they are too many, or
        there is no memory for them."""
        num_bytes = cache.content.nbytes
        if num_bytes > self._most_bytes:
            return None
        while self._leases and self.num_bytes + num_bytes > self._most_bytes:
            self.forget(next(iter(self._leases)))
        lease = secrets.token_urlsafe(24)
        timer = asyncio.get_running_loop().call_later(self._lease_s, self.forget, lease)
        self._leases[lease] = (num_bytes, timer)
        try:
            handle = await asyncio.to_thread(self._buffer.put, lease, cache)
        except OSError as why:
            LOG.warning("keys and values of a prompt are not kept: %s", why)
            self.forget(lease)
            return None
        if lease not in self._leases:  # others took its place meanwhile
            self._buffer.forget([lease])
            return None
        return RemoteKV(
            url=f"{base_url}{KV}{lease}",
            host=host(),
            location=handle.location,
            num_tokens=handle.num_tokens,
            num_bytes=handle.num_bytes,
            version=handle.version,
            digest=digest,
            fingerprint=handle.fingerprint,
            tokens=digest_of(tokens[: handle.num_tokens]),
        )

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self._leases.values())

    def find(self, lease: str) -> Segment | None:
        return self._buffer.segment(lease)

    def forget(self, lease: str) -> None:
        if lease in self._leases:
            self._leases.pop(lease)[1].cancel()
            self._buffer.forget([lease])

    def close(self) -> None:
        for lease in list(self._leases):
            self.forget(lease)
        self._buffer.close()


async def pieces_of(segment: Segment) -> AsyncGenerator[bytes]:
    """Yield a segment's bytes. It ends early where the segment is gone: the receiver counts them."""
    start = 0
    while start < segment.num_bytes:
        try:
            piece = segment.read(start, READ_BYTES)
        except SegmentUnavailable:
            return
        if not piece:
            return
        yield piece
        start += len(piece)


class KVFetcher:
    """Takes over what other servers keep. Made in the loop that serves; `close` it there."""

    def __init__(self, engine: Engine, fetch_s: float = FETCH_S) -> None:
        self._engine, self._fetch_s = engine, fetch_s
        self._client = HttpClient()

    async def fetch(self, remote: RemoteKV, request: GenerateRequest, digest: Digest) -> RequestKV:
        """Return a prompt's keys and values. digest: of the live weights. Raises KVUnavailable."""
        known = [*request.prompt, *request.generated]
        if remote.digest != digest:
            raise KVUnavailable("was computed by other weights")
        if remote.num_tokens > len(known) or remote.tokens != digest_of(known[: remote.num_tokens]):
            raise KVUnavailable("is of other tokens")
        if remote.host == host():
            try:
                return await asyncio.to_thread(self._engine.fetch, remote.handle, request)
            except KVUnavailable:  # the same machine is not always the same view of it
                pass
        if remote.num_bytes > self._engine.cache_bytes:
            raise KVUnavailable(f"has {remote.num_bytes} bytes, more than all blocks here")
        try:
            reply = await self._client.ask("GET", remote.url, self._fetch_s, most_bytes=remote.num_bytes)
        except NoReply as error:
            raise KVUnavailable(f"could not be fetched: {error}") from None
        if reply.status != 200:
            raise KVUnavailable(f"could not be fetched: {remote.url} responded with {reply.status}")
        return await asyncio.to_thread(self._engine.fetch, remote.handle, request, reply.content)

    async def close(self) -> None:
        await self._client.close()
