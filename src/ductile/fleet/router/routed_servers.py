"""The servers behind a router: which of them are well, and how much each has to do.

Health is judged as a run judges its servers (`ductile.core.instances.health`), by probes side by side and by requests.
What there is not: weights. Any version is good enough for a router; whoever gives servers new ones speaks to each of
them, past it.

A server whose port is closed gets nothing any more, and what it has is left to its connections. One that is lost in
silence has its requests cut off, and they are asked of others.

The work ahead of a server is counted in predicted tokens, weighed by how long a token of its latest completions took,
waiting included: servers need not be equally fast.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from ductile.concurrency.change_signal import ChangeSignal
from ductile.config.schema.cluster import RouterPolicy
from ductile.config.schema.fleet import HealthCheckConfig
from ductile.core.instances.health import HealthRules, ServerHealth
from ductile.core.instances.instances import InstanceId
from ductile.core.instances.routing import GeneratorLoad, Suspicion, predicted_tokens, route
from ductile.core.instances.sessions import RecentSessions, home_of
from ductile.core.instances.topology import blame
from ductile.fleet.router.routed_request import RoutedRequest
from ductile.fleet.servers.monitor import HttpProbe, Monitor, ProbeOutcome, reply_of
from ductile.messages.updates import ServerState

MOST_SESSIONS = 65536
"""Sessions whose latest server is known."""
BLOCK_TOKENS = 16
"""Tokens of a prompt from which on it may be worth while to send it where its beginning is cached."""
SMOOTHING = 0.05
"""Share that the latest completion has in the mean length of completions."""


SPEED_DECAY = 0.9
"""Share of its weight that what is known of a server's speed keeps with each completion."""
SPEED_HOLDS_S = 30.0
"""Seconds for which a speed is known after the latest completion; a server of unknown speed is taken for a fast one."""
MOST_SLOWNESS = 16.0


class CutOff(Exception):
    """A request's server is lost, so nothing is to come of it there. The text is a sentence."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one server, from when it is sent until its response has ended or failed."""

    url: str
    num_sequences: int
    remaining_tokens: float
    """Predicted tokens that are to be sampled for it."""
    began_at: float
    why_cut: str = ""
    """Reason for which the server is lost, a sentence; "" while it is not."""
    _limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Wait for the server, and no longer than it is there. Raises CutOff."""
        if self.why_cut:
            raise CutOff(self.why_cut)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit = limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise CutOff(self.why_cut) from None
        finally:
            self._limit = None

    def cut(self, why: str) -> None:
        self.why_cut = why
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True)
class RoutedServer:
    """A server's address, and what is known of who is there."""

    url: str
    health: ServerHealth | None = None
    """None until it has answered for the first time."""
    state: ServerState | None = None
    """Its latest answer."""
    why_absent: str = "it has not answered yet"
    attempts: set[Attempt] = field(default_factory=set[Attempt])
    heard_at: float = float("-inf")
    """Time at which a part of a response last came from it."""
    key: str | None = None
    """Bearer token for what it is asked."""
    seconds: float = 0.0
    tokens: float = 0.0
    """Times of its latest completions, and their tokens; both decay."""
    completed_at: float = float("-inf")
    """Time of its latest completion."""

    def seconds_per_token(self, now: float) -> float | None:
        """Return the seconds that a completion takes there for each token; None where that is not known."""
        is_known = self.tokens > 0 and now - self.completed_at <= SPEED_HOLDS_S
        return self.seconds / self.tokens if is_known else None

    @property
    def is_serving(self) -> bool:
        return self.health is not None and self.health.is_serving

    @property
    def status(self) -> str:
        return self.health.status if self.health is not None else "absent"

    @property
    def reason(self) -> str:
        return self.health.reason if self.health is not None else self.why_absent

    @property
    def remaining_tokens(self) -> float:
        return sum(attempt.remaining_tokens for attempt in self.attempts)

    @property
    def num_sequences(self) -> int:
        return sum(attempt.num_sequences for attempt in self.attempts)

    def load(self, session: str, is_recent: bool, slowness: float, more_tokens: float) -> GeneratorLoad:
        """Return what the server would have to do with a request of so many tokens more, in tokens of the fastest
        one. slowness: times that a token takes as long there."""
        health, suspicion = self.health, None
        if health is not None and health.status == "suspect":
            suspicion = Suspicion(health.reason, health.on_trial)
        groups = frozenset({session}) if is_recent else frozenset[str]()
        return GeneratorLoad(
            InstanceId(self.url),
            slowness * (self.remaining_tokens + more_tokens),
            groups,
            self.num_sequences,
            suspicion,
        )


class RoutedServers:
    """Made in the loop that routes; `start` before the first request, `stop` after the last."""

    def __init__(
        self,
        config: HealthCheckConfig,
        policy: RouterPolicy,
        key_of: Callable[[str], str | None],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """key_of: bearer token for the server at an address. tell: hears sentences about servers that come and go."""
        self.all: dict[str, RoutedServer] = {}
        self.max_model_len = 0
        """Tokens of the longest sequence that every server takes; 0 until one has said it."""
        self._policy: RouterPolicy = policy
        self._key_of, self._tell, self._clock = key_of, tell, clock
        self._rules = HealthRules(
            failure_threshold=config.health_check_failure_threshold,
            progress_timeout_s=config.progress_timeout_seconds,
        )
        self._probe = HttpProbe(config.detection_bound_s, lambda url: self.all[url].key if url in self.all else None)
        self._monitor = Monitor(self._probe, lambda: [*self.all], self.probed, config, tell, clock)
        self._changed = ChangeSignal()
        self._recent = RecentSessions(MOST_SESSIONS)
        self._mean_length: float | None = None
        self._turn = 0

    def start(self) -> None:
        self._monitor.start()

    async def stop(self) -> None:
        await self._monitor.stop()
        await self._probe.close()

    def add(self, url: str) -> None:
        """Look for a server at this address."""
        self.all[url] = RoutedServer(url, key=self._key_of(url))
        self._monitor.look()

    def remove(self, url: str, why: str) -> None:
        """Look for none at this address any more, as its process has ended."""
        if (server := self.all.pop(url, None)) is not None:
            for attempt in [*server.attempts]:
                attempt.cut(why)
            self._tell(why)
            self._changed.notify_all()

    @property
    def serving(self) -> list[RoutedServer]:
        return [server for server in self.all.values() if server.is_serving]

    async def wait_for_any(self, timeout_s: float) -> None:
        """Return when a server serves. Raises TimeoutError."""
        await self._changed.wait_for(lambda: bool(self.serving), timeout_s)

    async def wait_for_all(self, timeout_s: float) -> None:
        """Return when all servers serve. Raises TimeoutError."""
        await self._changed.wait_for(lambda: len(self.serving) == len(self.all), timeout_s)

    # -- Where a request goes ---------------------------------------------------------------------------------------

    def choose(self, request: RoutedRequest, without: Collection[str] = ()) -> RoutedServer | None:
        """Return the server for a request; None where there is none beside those that have had it."""
        session = request.session
        recent = self._recent.of(session) if session else None
        now, more, able = self._clock(), self._predicted(request), self.serving
        speeds = {each.url: seconds_per_token for each in able if (seconds_per_token := each.seconds_per_token(now))}
        fastest = min(speeds.values(), default=1.0)
        loads = [
            each.load(session, recent == each.url, min(speeds.get(each.url, fastest) / fastest, MOST_SLOWNESS), more)
            for each in able
            if each.url not in without
        ]
        if not loads:
            return None
        chosen = self._chosen(request, loads)
        self._recent.note(session, chosen)
        return self.all[chosen]

    def _chosen(self, request: RoutedRequest, loads: list[GeneratorLoad]) -> InstanceId:
        well = [load for load in loads if load.suspicion is None]
        tried = [load for load in loads if load.suspicion is not None and load.suspicion.on_trial]
        is_trial = any(not load.num_sequences for load in tried)  # `route` has one prove itself by this request
        able = [load.instance for load in well or tried or loads]
        if not is_trial and self._policy == "round_robin":
            self._turn += 1
            return able[self._turn % len(able)]
        if not is_trial and self._policy == "consistent_hash" and request.session:
            return home_of(request.session, able)
        return route(request.session, loads, request.num_prompt_tokens, BLOCK_TOKENS).instance

    @contextmanager
    def attempt(self, server: RoutedServer, request: RoutedRequest) -> Generator[Attempt]:
        """Count a request as the server's, as long as the block lasts."""
        attempt = Attempt(server.url, request.num_sequences, self._predicted(request), self._clock())
        server.attempts.add(attempt)
        try:
            yield attempt
        finally:
            server.attempts.discard(attempt)

    def _predicted(self, request: RoutedRequest, generated: int = 0) -> float:
        most = request.max_tokens or self.max_model_len - request.num_prompt_tokens
        return request.num_sequences * predicted_tokens(max(1, most), generated, self._mean_length)

    # -- What requests tell of a server -----------------------------------------------------------------------------

    def heard(self, attempt: Attempt, request: RoutedRequest, generated: int) -> None:
        """Note that a part of a response has come, with so many tokens of the one sequence until now."""
        attempt.remaining_tokens = self._predicted(request, generated)
        if server := self.all.get(attempt.url):
            server.heard_at = self._clock()

    def ended(self, attempt: Attempt, num_tokens: int | None = None) -> None:
        """Note that a server has done a request, with so many tokens, where that is known."""
        if num_tokens is not None:
            each = num_tokens / max(1, attempt.num_sequences)
            mean = self._mean_length
            self._mean_length = each if mean is None else mean + SMOOTHING * (each - mean)
        if server := self._of(attempt):
            server.heard_at = server.completed_at = self._clock()
            server.seconds *= SPEED_DECAY
            server.tokens *= SPEED_DECAY
            if num_tokens:
                server.seconds += self._clock() - attempt.began_at
                server.tokens += num_tokens / max(1, attempt.num_sequences)
            self._put(server, server.health and server.health.generated(self._clock(), self._rules))

    def failed(self, attempt: Attempt, why: str, is_closed: bool) -> None:
        """Note that a server has failed at a request. is_closed: nobody listens at its address."""
        if (server := self._of(attempt)) is None or server.health is None or not server.health.is_living:
            return
        now = self._clock()
        if is_closed:
            self._put(server, server.health.moved("die", why, now), cuts=False)
            return
        self._put(server, server.health.request_failed(why, now, self._rules, attempt.began_at))
        self._monitor.hurry(server.url)

    def _of(self, attempt: Attempt) -> RoutedServer | None:
        return None if attempt.why_cut else self.all.get(attempt.url)

    # -- What probes tell of a server -------------------------------------------------------------------------------

    def probed(self, url: str, outcome: ProbeOutcome) -> None:
        """Note what a probe of the address has found."""
        if (server := self.all.get(url)) is None:
            return
        now, health = self._clock(), server.health
        is_living = health is not None and health.is_living
        if outcome.kind == "answered" and outcome.state is not None:
            self._answered(server, outcome.state, outcome.asked_at, now)
        elif not is_living:
            if outcome.reason and server.why_absent != outcome.reason:
                server.why_absent = outcome.reason
        elif outcome.kind in ("closed", "denied"):
            assert health is not None
            self._put(server, health.moved("die", outcome.reason, now), cuts=False)
        elif outcome.kind in ("silent", "odd"):
            assert health is not None
            others = [each for each in self.all.values() if each is not server and each.is_serving]
            others_at = max((max(_heard_at(each), each.heard_at) for each in others), default=float("-inf"))
            replied = outcome.kind == "odd"
            after = health.unanswered(
                outcome.reason, now, outcome.asked_at, others_at, replied, token_at=server.heard_at
            )
            self._put(server, after)
            self._condemn(now)

    def _answered(self, server: RoutedServer, state: ServerState, asked_at: float, now: float) -> None:
        health = server.health
        if health is not None and health.is_living and health.incarnation != state.incarnation:
            if asked_at < health.asked_at:
                return  # said late, by the process before
            self._put(server, health.moved("die", "its process has ended, and another one has its address", now))
        server.state, health = state, server.health
        self.max_model_len = min(each.state.max_model_len for each in self.all.values() if each.state is not None)
        if state.leaving:
            if health is not None and health.is_living and health.status != "draining":
                self._put(server, health.moved("drain", "it says that it is leaving", now))
        elif health is None or not health.is_living or health.incarnation != state.incarnation:
            self._join(server, state, asked_at, now)
        else:
            self._put(server, health.answered(reply_of(state, asked_at), now, self._rules, server.heard_at))

    def _join(self, server: RoutedServer, state: ServerState, asked_at: float, now: float) -> None:
        """Take a process in. One that was here before, and was lost, is tried with one request at a time first."""
        before = server.health
        server.key = self._key_of(server.url)
        health = ServerHealth(
            InstanceId(server.url),
            server.url,
            state.incarnation,
            since=now,
            status="ready",
            asked_at=min(asked_at, now),
            told_at=now,
            heard_at=now,
            num_sampled=state.num_sampled,
            progressed_at=now,
        )
        if before is not None and before.incarnation == state.incarnation:
            health = replace(health, request_failures=1, failed_at=now).moved("doubt", before.reason, now)
            health = replace(health, on_trial=True)
        self._put(server, health)
        self._tell(f"{server.url} serves {state.model_name or 'its model'}")

    def _condemn(self, now: float) -> None:
        living = [each.health for each in self.all.values() if each.health is not None and each.health.is_living]
        verdict = blame(living, self._rules)
        for instance in verdict.instances if verdict.verdict == "servers" else ():
            if health := self.all[instance].health:
                self._put(self.all[instance], health.moved("die", verdict.reason, now))

    def _put(self, server: RoutedServer, health: ServerHealth | None, cuts: bool = True) -> None:
        """cuts: a server that is lost by this has its requests cut off; else their connections say what becomes of
        them."""
        before, server.health = server.health, health
        if health is None or before is None or health.status == before.status:
            self._changed.notify_all()
            return
        if health.status == "dead":
            self._tell(f"{server.url} is lost: {health.reason}")
            for attempt in [*server.attempts] if cuts else ():
                attempt.cut(f"{server.url} is lost: {health.reason}")
        elif health.status != "ready" or before.status != "suspect":
            self._tell(f"{server.url} is {health.status}: {health.reason}")
        self._changed.notify_all()


def _heard_at(server: RoutedServer) -> float:
    return server.health.heard_at if server.health is not None else float("-inf")
