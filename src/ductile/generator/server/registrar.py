"""A server's lease in its registry, kept from when it listens until it has ended."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

import msgspec

from ductile.config.schema.fleet import FileRegistry, HttpRegistry, RegistryConfig
from ductile.config.schema.secrets import secret_of
from ductile.disk import write_whole
from ductile.error_text import error_text
from ductile.messages.server_lease import ServerLease, lease_file
from ductile.transport.http_client import HttpClient

BEATS = 3
"""Renewals in the lifetime of a lease."""
ASK_S = 5.0
"""Longest time that a registry may take to reply."""


class LeaseRefused(Exception):
    """A registry refuses to put or to remove a lease. The text is a sentence."""


class _Place(Protocol):
    """Place of leases. Both methods raise OSError, NoReply or LeaseRefused."""

    def put(self, lease: ServerLease) -> None: ...

    def remove(self, lease: ServerLease) -> None: ...


class _Folder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, lease: ServerLease) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._folder / lease_file(lease.url), msgspec.json.encode(lease).decode(), mode=0o600)

    def remove(self, lease: ServerLease) -> None:
        file = self._folder / lease_file(lease.url)
        if msgspec.json.decode(file.read_bytes(), type=ServerLease).incarnation == lease.incarnation:
            file.unlink()  # else a later server at the same port has written its own


class _Registry:
    """A registry over HTTP. Each request has a client, and a loop, of its own: renewals come from two threads."""

    def __init__(self, url: str, token: str | None, deadline_s: float) -> None:
        self._url, self._token, self._deadline_s = f"{url.rstrip('/')}/servers", token, deadline_s

    def put(self, lease: ServerLease) -> None:
        asyncio.run(self._ask("PUT", self._url, msgspec.json.encode(lease)))

    def remove(self, lease: ServerLease) -> None:
        query = urlencode({"url": lease.url, "incarnation": lease.incarnation})
        asyncio.run(self._ask("DELETE", f"{self._url}?{query}"))

    async def _ask(self, method: str, url: str, body: bytes | None = None) -> None:
        client = HttpClient(self._token)
        try:
            reply = await client.ask(method, url, self._deadline_s, body=body)
        finally:
            await client.close()
        if not 200 <= reply.status < 300:
            raise LeaseRefused(f"{self._url} responded with {reply.status}")


class Registrar:
    """`with Registrar(config.registry, lease_of, say):`. A registry that cannot be reached ends no server: it is tried
    again at the next beat, and said once."""

    def __init__(
        self,
        config: RegistryConfig | None,
        lease_of: Callable[[], ServerLease],
        say: Callable[[str], None],
    ) -> None:
        """lease_of: the server's lease as it is now, asked from a thread of the registrar's; `beat` and `renewed_at`
        are filled in. A config without a place where one can announce oneself makes a registrar that does nothing."""
        self._place: _Place | None = None
        self._interval_s = 1.0
        match config:
            case FileRegistry():
                self._place = _Folder(Path(config.folder).expanduser())
                self._interval_s = config.ttl_seconds / BEATS
            case HttpRegistry():
                deadline_s = min(ASK_S, config.ttl_seconds / BEATS)
                self._place = _Registry(config.url, secret_of(None, config.token_var), deadline_s)
                self._interval_s = config.ttl_seconds / BEATS
            case _:
                pass
        self._lease_of, self._say = lease_of, say
        self._beat = 0
        self._written: ServerLease | None = None
        self._is_leaving = False
        self._is_failing = False
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="ductile registrar", daemon=True)

    def __enter__(self) -> "Registrar":
        if self._place is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._place is not None:
            self._thread.join(2 * ASK_S)

    def leave(self) -> None:
        """Say that the server takes nothing new from now on. Returns after one renewal, made or failed."""
        self._is_leaving = True
        if self._place is not None:
            self._renew(self._place)

    def _keep(self) -> None:
        assert self._place is not None
        self._renew(self._place)
        while not self._ended.wait(self._interval_s):
            self._renew(self._place)
        try:
            if self._written is not None:  # the server has ended: it says nothing new of itself
                self._place.remove(self._written)
        except Exception as error:
            self._say(f"the server's lease could not be removed: {error_text(error)}")

    def _renew(self, place: _Place) -> None:
        with self._turn:
            self._beat += 1
            try:
                lease = self._lease_of()
                fields = {"beat": self._beat, "renewed_at": time.time(), "is_leaving": self._is_leaving}
                place.put(msgspec.structs.replace(lease, **fields))
                self._written = lease
            except Exception as error:
                if not self._is_failing:
                    self._say(f"the server's lease could not be renewed, and will be tried again: {error_text(error)}")
                self._is_failing = True
            else:
                self._is_failing = False
