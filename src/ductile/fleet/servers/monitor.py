"""Probes of all servers, side by side: each has its own rhythm, so one that is slow delays no other.

A probe asks for `/fleet/state` and has one deadline for all of it: a stopped process still takes connections. What
comes of it is one of six outcomes, since only some of them speak against the server. One that has not answered by the
deadline is told of as silent, and is listened to for a while longer: an answer that comes late is told, too.
"""

import asyncio
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import msgspec

from ductile.concurrency.change_signal import ChangeSignal
from ductile.concurrency.deadline import said
from ductile.config.schema.fleet import HealthCheckConfig
from ductile.core.instances.health import ProbeReply
from ductile.error_text import error_text
from ductile.messages.updates import ServerState
from ductile.transport.http_client import HttpClient, HttpReply, NoReply, bearer

MOST_PROBES = 64
"""Probes under way at a time."""
MOST_BYTES = 1 << 20
"""Largest state that is read."""
JITTER = 0.1
"""Largest share of an interval by which a probe is early. It is never late, so the bound on detection holds."""


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """Outcome of one probe. answered: the state is there. closed: nobody listens at the address. silent: no reply in
    time. odd: a reply that is no state. denied: the server wants another key. unasked: the fault is on our side."""

    kind: Literal["answered", "closed", "silent", "odd", "denied", "unasked"]
    reason: str = ""
    """A sentence about what is wrong; "" where nothing is."""
    state: ServerState | None = None
    asked_at: float = 0.0
    """Time at which the probe was sent, by the monitor's clock."""


class Probe(Protocol):
    async def __call__(self, address: str) -> ProbeOutcome: ...


class HttpProbe:
    """A GET of a server's state. One for an event loop; `close` it there."""

    def __init__(self, timeout_s: float, key_of: Callable[[str], str | None] = lambda address: None) -> None:
        """timeout_s: longest that an answer is listened for. key_of: the server's API key, by address."""
        self._timeout_s, self._key_of = timeout_s, key_of
        self._client = HttpClient()

    async def __call__(self, address: str) -> ProbeOutcome:
        url = f"{address}/fleet/state"
        try:
            reply = await self._client.ask("GET", url, self._timeout_s, bearer(self._key_of(address)), None, MOST_BYTES)
        except NoReply as error:
            if error.kind == "closed":
                return ProbeOutcome("closed", f"nobody listens at {address}")
            # A connection that is lost is no proof: a server that has too many of them resets some.
            return ProbeOutcome("silent" if error.kind == "lost" else error.kind, str(error))
        return _outcome(url, reply, bool(self._key_of(address)))

    async def close(self) -> None:
        await self._client.close()


class Monitor:
    """Probes what is watched, and tells of each outcome. Nothing runs before `start` or after `stop`."""

    def __init__(
        self,
        probe: Probe,
        watched: Callable[[], Collection[str]],
        tell: Callable[[str, ProbeOutcome], None],
        config: HealthCheckConfig,
        on_error: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """watched: the addresses, asked for anew all the time. on_error: hears of what `probe` or `tell` raised; the
        monitor goes on."""
        self._probe, self._watched, self._tell, self._on_error = probe, watched, tell, on_error
        self._clock = clock
        self._interval_s, self._timeout_s = config.health_check_interval_seconds, config.probe_timeout_seconds
        self._room = asyncio.Semaphore(MOST_PROBES)
        self._rhythms: dict[str, asyncio.Task[None]] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._late: set[asyncio.Task[ProbeOutcome]] = set()
        """Probes that have not been answered in time, and still may be."""
        self._hurried: dict[str, asyncio.Event] = {}
        self._changed = ChangeSignal()
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to probe. Nothing happens when it has started."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Returns when nothing runs any more."""
        tasks: list[asyncio.Task[Any]] = [*self._rhythms.values(), *self._under_way.values(), *self._late]
        tasks += [self._keeper] if self._keeper else []
        self._keeper = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._rhythms.clear()
        self._under_way.clear()
        self._hurried.clear()

    def look(self) -> None:
        """Notice that others are watched."""
        self._changed.notify_all()

    def hurry(self, address: str) -> None:
        """Probe the address at once: a request has lost its connection. Also where nothing runs."""
        if event := self._hurried.get(address):
            event.set()
        else:
            self._begin(address)

    async def sweep(self, without: Collection[str] = ()) -> None:
        """Probe everything that is watched once. Returns when all outcomes have been told."""
        await asyncio.gather(*(self._once(address) for address in self._watched() if address not in without))

    async def _keep(self) -> None:
        """Give each address that is watched a rhythm, and take it from the others."""
        while True:
            try:
                watched = {*self._watched()}
            except Exception as error:
                self._on_error(f"the monitor could not learn what to probe: {error_text(error)}")
                watched = {*self._rhythms}
            for address in self._rhythms.keys() - watched:
                self._rhythms.pop(address).cancel()
                self._hurried.pop(address, None)
            for address in watched - self._rhythms.keys():
                self._hurried[address] = asyncio.Event()
                self._rhythms[address] = asyncio.create_task(self._beat(address, self._hurried[address]))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()

    async def _beat(self, address: str, hurried: asyncio.Event) -> None:
        while True:
            next_at = time.monotonic() + self._interval_s * (1 - JITTER * random.random())
            await self._once(address)
            with suppress(TimeoutError):
                async with asyncio.timeout(next_at - time.monotonic()):
                    await hurried.wait()
            hurried.clear()

    async def _once(self, address: str) -> None:
        await asyncio.wait([self._begin(address)])

    def _begin(self, address: str) -> "asyncio.Task[None]":
        """Return the probe of a server; of one that is being probed it is that one."""
        if (task := self._under_way.get(address)) is None:
            task = self._under_way[address] = asyncio.create_task(self._asked(address))
            task.add_done_callback(lambda _: self._under_way.pop(address, None))
        return task

    async def _asked(self, address: str) -> None:
        try:
            async with self._room:
                asked_at = self._clock()
                probing = asyncio.create_task(self._outcome(address))
                self._late.add(probing)
                probing.add_done_callback(self._late.discard)
                await asyncio.wait([probing], timeout=self._timeout_s)
            if probing.done():
                self._tell(address, replace(probing.result(), asked_at=asked_at))
                return
            probing.add_done_callback(lambda task: self._tell_late(address, task, asked_at))
            why = f"{address} did not answer within {said(self._timeout_s)}"
            self._tell(address, ProbeOutcome("silent", why, asked_at=asked_at))
        except Exception as error:
            self._on_error(f"the probe of {address} failed: {error_text(error)}")

    async def _outcome(self, address: str) -> ProbeOutcome:
        return await self._probe(address)

    def _tell_late(self, address: str, probing: "asyncio.Task[ProbeOutcome]", asked_at: float) -> None:
        if not probing.cancelled() and not probing.exception() and probing.result().kind == "answered":
            self._tell(address, replace(probing.result(), asked_at=asked_at))


def _outcome(url: str, reply: HttpReply, has_key: bool) -> ProbeOutcome:
    if reply.status in (401, 403):
        key = "another API key than this run gives" if has_key else "an API key, and this run gives none"
        variable = "orchestrator.client.api_key_var names the environment variable that has it"
        return ProbeOutcome("denied", f"{url} wants {key} ({reply.status}); {variable}")
    if reply.status == 404:
        return ProbeOutcome("odd", f"{url} responded with 404: is this a server of `ductile inference`?")
    if reply.status != 200:
        return ProbeOutcome("odd", f"{url} responded with {reply.status}")
    try:
        return ProbeOutcome("answered", state=msgspec.json.decode(reply.content, type=ServerState))
    except (msgspec.DecodeError, ValueError) as error:
        return ProbeOutcome("odd", f"{url} sent no state of a server: {error}")


def reply_of(state: ServerState, asked_at: float) -> ProbeReply:
    """Return what a state says of the server's health."""
    update = state.update
    is_receiving = update is not None and update.phase in ("prepared", "receiving")
    return ProbeReply(
        incarnation=state.incarnation,
        version=state.version,
        asked_at=asked_at,
        digest=state.digest,
        epoch=state.epoch,
        num_requests=state.num_running + state.num_waiting,
        is_paused=state.paused or not state.serving,
        num_sampled=state.num_sampled,
        update_id=update.update_id if update is not None and is_receiving else "",
        num_buckets=update.num_buckets if update is not None else 0,
    )
