"""Registries: where the servers of a fleet announce themselves, and the fleet finds them.

A registry only says where a server may be; whether it lives, the server is asked. So an entry that is gone takes no
server out, an empty or unreachable registry takes out none, and the clocks of the machines need not agree: a lease
counts as long as its `beat` goes on, by the reader's clock.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast

import msgspec

from ductile.concurrency.deadline import said
from ductile.concurrency.structured import OneThread
from ductile.config.reading.imports import import_object
from ductile.config.schema.fleet import FileRegistry, HttpRegistry, RegistryConfig, StaticRegistry
from ductile.config.schema.secrets import secret_of
from ductile.messages.server_lease import MOST_BYTES, LeaseError, ServerLease, lease_from
from ductile.transport.http_client import HttpClient, NoReply
from ductile.user_files import NotOwn, read_own

ASK_S = 5.0
"""Longest time that a registry may take to list its servers."""
MOST_SERVERS = 10_000

Leases = Mapping[str, ServerLease]
"""Leases by the servers' addresses."""


class RegistryDown(Exception):
    """The registry cannot be asked. The text is a sentence."""


class Registry(Protocol):
    async def servers(self) -> Leases:
        """Return the servers that have a lease now. Raises RegistryDown; what was known before then holds."""
        ...

    async def close(self) -> None: ...


class StaticServers:
    """Servers that the config names, for good."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._leases = {url.rstrip("/"): ServerLease(url.rstrip("/"), "") for url in urls}

    async def servers(self) -> Leases:
        return self._leases

    async def close(self) -> None:
        pass


class LeaseFolder:
    """A folder with a file for each server, of the user who runs this, and that nobody else may write to: what it lists
    is sent prompts and keys. Files of other users, other content and half-written ones are skipped, and told once."""

    def __init__(
        self,
        folder: Path,
        ttl_s: float,
        tell: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._ttl_s, self._tell, self._clock, self._unix_time = folder, ttl_s, tell, clock, unix_time
        self._thread = OneThread()
        self._reported: set[str] = set()
        self._beats: dict[str, tuple[str, int, float]] = {}
        """Incarnation and beat of each server, and when the beat was seen first; minus infinity for a lease that was
        old when it was first seen."""

    async def servers(self) -> Leases:
        try:
            return await self._thread.call(self._read, ASK_S)
        except TimeoutError:
            raise RegistryDown(f"{self._folder} could not be read within {said(ASK_S)}") from None

    async def close(self) -> None:
        pass

    def _read(self) -> Leases:
        leases: dict[str, ServerLease] = {}
        try:
            status = self._folder.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise RegistryDown(
                    f"the registry {self._folder} must belong to the user who runs this, and nobody else may write to "
                    f"it: what it lists is sent prompts and keys. Write chmod 700 {self._folder}"
                )
            with os.scandir(self._folder) as entries:
                names = sorted(entry.name for entry in entries if entry.name.endswith(".json"))[:MOST_SERVERS]
        except OSError as error:
            raise RegistryDown(f"the registry {self._folder} cannot be read: {error.strerror}") from None
        for name in names:
            if name.startswith((".", "authority-")):
                continue
            with suppress(FileNotFoundError):  # it left a moment ago
                try:
                    lease = lease_from(read_own(self._folder / name, MOST_BYTES))
                    if self._is_renewed(lease):
                        leases[lease.url] = lease
                except (LeaseError, NotOwn, OSError) as error:
                    if isinstance(error, FileNotFoundError):
                        raise
                    self._tell_once(f"{self._folder / name} is skipped: it {_reason(error)}")
        return leases

    def _is_renewed(self, lease: ServerLease) -> bool:
        now = self._clock()
        incarnation, beat, seen_at = self._beats.get(lease.url, ("", -1, 0.0))
        if (incarnation, beat) != (lease.incarnation, lease.beat):
            # One that is old when we see it first may be of a server that is long gone, or of a clock that is wrong:
            # its next beat tells.
            is_old = not incarnation and abs(self._unix_time() - lease.renewed_at) > self._ttl_s
            seen_at = float("-inf") if is_old else now
            self._beats[lease.url] = (lease.incarnation, lease.beat, seen_at)
        return now - seen_at <= self._ttl_s

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._reported:
            self._reported.add(sentence)
            self._tell(sentence)


class RegistryClient:
    """A registry over HTTP (`registry_server`), which drops the leases that are not renewed itself."""

    def __init__(
        self, url: str, token: str | None, ttl_s: float, tell: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self._url, self._tell, self._client = url.rstrip("/"), tell, HttpClient(token)
        self._deadline_s = min(ASK_S, ttl_s)

    async def servers(self) -> Leases:
        try:
            reply = await self._client.ask("GET", f"{self._url}/servers", self._deadline_s)
            if reply.status != 200:
                raise RegistryDown(f"the registry {self._url} responded with {reply.status}")
            rows = msgspec.json.decode(reply.content, type=list[msgspec.Raw])[:MOST_SERVERS]
        except (NoReply, msgspec.DecodeError) as error:
            raise RegistryDown(f"the registry cannot be asked: {error}") from None
        leases: dict[str, ServerLease] = {}
        for row in rows:
            try:
                lease = lease_from(bytes(row))
                leases[lease.url] = lease
            except LeaseError as error:
                self._tell(f"an entry of {self._url} is skipped: it {error}")
        return leases

    async def close(self) -> None:
        await self._client.close()


def registry_of(config: RegistryConfig | None, tell: Callable[[str], None] = lambda sentence: None) -> Registry:
    """Return the registry that the config says; without one, one that finds nobody. Raises ImportPathError for a custom
    one that cannot be imported, and what its function raises."""
    if isinstance(config, StaticRegistry):
        return StaticServers(config.urls)
    if isinstance(config, FileRegistry):
        return LeaseFolder(Path(config.folder).expanduser(), config.ttl_seconds, tell)
    if isinstance(config, HttpRegistry):
        return RegistryClient(config.url, secret_of(None, config.token_var), config.ttl_seconds, tell)
    if config is None:
        return StaticServers(())
    return cast(Registry, import_object(config.import_path)(**config.kwargs))


def _reason(error: ValueError | OSError) -> str:
    return str(error) if isinstance(error, ValueError) else f"cannot be read: {error.strerror}"
