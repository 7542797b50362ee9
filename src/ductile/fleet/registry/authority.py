"""Rule over a registry's fleet: one controller at a time has it, with a token that goes up with every new ruler.

Membership epochs begin at `first_epoch(token)`, so the epochs of an old ruler are lower than all of a new one's, and
servers refuse what it still says (409): it need not even know that its rule is over.
"""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from ductile.concurrency.deadline import said
from ductile.concurrency.structured import OneThread
from ductile.disk import write_whole
from ductile.error_text import error_text
from ductile.fleet.registry.registries import ASK_S, RegistryDown
from ductile.transport.http_client import HttpClient, HttpReply, NoReply

EPOCHS_OF_A_RULE = 1 << 20
_FILE = re.compile(r"authority-(\d{20})\.json")


def first_epoch(token: int) -> int:
    return token * EPOCHS_OF_A_RULE


class Authority(Protocol):
    async def claim(self) -> int | None:
        """Return the token of our rule, which is renewed by it; None while another rules. Raises RegistryDown: who
        ruled before then rules on, since nobody else can claim it."""
        ...

    async def close(self) -> None: ...


class _Rule(msgspec.Struct):
    owner: str
    beat: int


class FolderAuthority:
    """Rule over a folder of leases. Each rule is a file with its token in the name; a name can be taken only once, so
    of two who claim the next token one gets it. A ruler whose file does not change for `ttl_s`, by the clock of the one
    who looks, rules no more."""

    def __init__(self, folder: Path, owner: str, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """owner: unique to this process."""
        self._folder, self._owner, self._ttl_s, self._clock = folder, owner, ttl_s, clock
        self._thread = OneThread()
        self._seen: tuple[int, int] = (0, -1)
        self._seen_at = clock()
        self._beat = 0

    async def claim(self) -> int | None:
        try:
            return await self._thread.call(self._claim, ASK_S)
        except TimeoutError:
            raise RegistryDown(f"{self._folder} could not be read within {said(ASK_S)}") from None
        except OSError as error:
            raise RegistryDown(f"nobody can rule {self._folder}: {error_text(error)}") from None

    async def close(self) -> None:
        """Let another one rule at once."""
        with suppress(OSError, TimeoutError):
            await self._thread.call(self._end_rule, ASK_S)

    def _end_rule(self) -> None:
        token, rule = self._newest()
        if rule is not None and rule.owner == self._owner:
            write_whole(self._file(token), _text(_Rule("", rule.beat)))

    def _claim(self) -> int | None:
        token, rule = self._newest()
        if rule is not None and rule.owner == self._owner:
            self._beat += 1
            write_whole(self._file(token), _text(_Rule(self._owner, self._beat)))
            return token
        if rule is not None and rule.owner:
            if self._seen != (token, rule.beat):
                self._seen, self._seen_at = (token, rule.beat), self._clock()
            if self._clock() - self._seen_at <= self._ttl_s:
                return None
        draft = self._folder / f".{self._owner}.authority"
        write_whole(draft, _text(_Rule(self._owner, self._beat)))
        try:
            os.link(draft, self._file(token + 1))
        except FileExistsError:
            return None
        finally:
            draft.unlink(missing_ok=True)
        if self._newest()[0] > token + 1:  # others have ruled since we looked
            self._file(token + 1).unlink(missing_ok=True)
            return None
        for file in self._folder.iterdir():
            if (found := _FILE.fullmatch(file.name)) and int(found[1]) <= token:
                file.unlink(missing_ok=True)
        return token + 1

    def _newest(self) -> tuple[int, _Rule | None]:
        tokens = [int(found[1]) for file in self._folder.iterdir() if (found := _FILE.fullmatch(file.name))]
        token = max(tokens, default=0)
        if not token:
            return int(time.time()), None  # above what ruled here before, if all of it has been deleted
        try:
            return token, msgspec.json.decode(self._file(token).read_bytes(), type=_Rule)
        except msgspec.DecodeError:
            return token, None

    def _file(self, token: int) -> Path:
        return self._folder / f"authority-{token:020}.json"


class HttpAuthority:
    """Rule over an HTTP registry, which decides who has it."""

    def __init__(self, url: str, token: str | None, owner: str, ttl_s: float) -> None:
        self._url, self._owner, self._ttl_s = f"{url.rstrip('/')}/authority", owner, ttl_s
        self._client = HttpClient(token)

    async def claim(self) -> int | None:
        try:
            reply = await self._put(self._ttl_s)
        except NoReply as error:
            raise RegistryDown(f"the registry cannot be asked who rules: {error}") from None
        if reply.status == 409:
            return None
        if reply.status != 200:
            raise RegistryDown(f"{self._url} responded with {reply.status}")
        return int(msgspec.json.decode(reply.content)["token"])

    async def close(self) -> None:
        """Let another one rule at once."""
        with suppress(NoReply):
            await self._put(0.0)
        await self._client.close()

    async def _put(self, ttl_s: float) -> HttpReply:
        body = msgspec.json.encode({"owner": self._owner, "ttl_s": ttl_s})
        headers, deadline_s = {"Content-Type": "application/json"}, min(ASK_S, self._ttl_s)
        return await self._client.ask("PUT", self._url, deadline_s, headers, body)


def _text(rule: _Rule) -> str:
    return msgspec.json.encode(rule).decode()
