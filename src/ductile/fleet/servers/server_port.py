"""A server that the run did not start, as an instance: requests streamed with token ids, and the control routes.

What it has sampled is taken over as it comes, so a request that it cannot end goes on elsewhere with these tokens. They
are taken only from the process that was adopted (its incarnation) and from versions that it has committed for us: a
server that was restarted on its port, or that somebody else gives weights, is lost at once.

A server without control routes (vLLM, or any that understands `return_token_ids`) can generate, with the weights that
it has, and no more.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import httpx
import msgspec
from msgspec.structs import replace

from ductile.concurrency.background import start
from ductile.core.instances.instances import Instance, InstanceId
from ductile.fleet.requests.instance_port import InstanceEvent, Returned, check_has
from ductile.fleet.servers.completion_stream import (
    ROUTE,
    NoTokens,
    PartialCompletion,
    StreamedPiece,
    completion_body,
    read_piece,
)
from ductile.fleet.servers.server_http import Barred, ServerDeadlines, ServerHttp
from ductile.messages.updates import (
    Digest,
    EndUpdate,
    EndVersionLease,
    LeaseVersion,
    LiveDigest,
    PauseServer,
    PrepareUpdate,
    ResumeServer,
    ServerState,
    UpdateProgress,
    VersionLease,
)
from ductile.messages.workers import (
    Abort,
    Command,
    DigestWeights,
    Done,
    EngineStats,
    Finished,
    Forget,
    Generate,
    MigratedOut,
    MigrateOut,
    Reply,
    WeightDigests,
)
from ductile.records import FinishReason, GenerateRequest, Manifest
from ductile.roles import Failure, Interrupted, Late, NotTaken, Refused, SlotLost
from ductile.transport.mailbox import Died

M = TypeVar("M", bound=msgspec.Struct)

TELLS_S = 0.5
"""Seconds between two `EngineStats`, while requests make progress."""
LAST_WORDS_S = 1.0
"""Seconds for what a stream has to say after its last token."""
REMEMBERED = 16
"""Latest committed versions of which tokens are taken: what is under way may have been sampled a few versions ago."""


class ServerPort:
    """Follows `fleet.requests.instance_port.InstancePort`. `open` it before all else; `release` it in the end."""

    is_needed = False

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        control_token: str | None = None,
        deadlines: ServerDeadlines | None = None,
        max_num_seqs: int = 64,
        attempts: int = 1,
        transport: httpx.AsyncBaseTransport | None = None,
        id: InstanceId | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """url, api_key, control_token, attempts: as `ServerHttp` has them. max_num_seqs: of a server that does not say
        it. id: of the instance; None: its address. vocab_size: of the run's model, which bounds the tokens that are
        taken; None: it is not known."""
        self._http = ServerHttp(url, api_key, control_token, deadlines or ServerDeadlines(), attempts, transport)
        self.url = self._http.root
        self.instance = Instance(id or InstanceId(self.url), "generate", ())
        self.max_num_seqs, self._vocab_size = max_num_seqs, vocab_size
        self.why_lost = ""
        self.incarnation = ""
        """Incarnation of the process that was adopted; "" for a server that does not say it."""
        self.version: int | None = None
        """Version that is live; None for a server that keeps its own weights."""
        self._model = ""
        self.heard_at = float("-inf")
        """Time at which a token last came, by `time.monotonic`."""
        self._own_version = 0
        self._committed: dict[int, Digest] = {}
        self._committing: tuple[int, Digest] | None = None
        """Version and digest that the server was told to commit, and may have before its reply is here."""
        self._live: dict[str, tuple[PartialCompletion, asyncio.Task[None]]] = {}
        self._num_sampled = 0
        self._deliver: Callable[[InstanceEvent], None] = lambda event: None
        self._ticking: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[bool] | None = None

    async def open(self) -> ServerState | None:
        """Learn what the server is, and adopt its process. Returns its state; None where it has no control routes.

        Raises SlotLost or Late when no server responds, and Refused when it is no such server, or wants another key.
        """
        url = f"{self.url}/v1/models"
        content = await self._http.ask("GET", "/v1/models", deadline_s=self._http.deadlines.control_s)
        try:
            model: dict[str, Any] = self._http.json(content, url)["data"][0]
            self._model, self._own_version = str(model["id"]), int(model.get("weight_version") or 0)
        except (KeyError, IndexError, TypeError, ValueError):
            raise Refused(f"{url} does not list a model: is this an OpenAI-compatible server?") from None
        if "incarnation" not in model:
            return None
        state = await self._state()
        self.adopt(state)
        return state

    def adopt(self, state: ServerState) -> None:
        """Take tokens of this process from now on, of the version that it has."""
        self.incarnation, self.version, self.max_num_seqs = state.incarnation, state.version, state.max_num_seqs
        self._committed = {state.version: state.digest}

    @property
    def digest(self) -> Digest:
        """Digest of the live version; "" where it is not known."""
        return "" if self.version is None else self._committed.get(self.version, "")

    def describe(self) -> str:
        return self.instance.id

    def listen(self, deliver: Callable[[InstanceEvent], None]) -> None:
        self._deliver = deliver

    async def ask(self, command: Command) -> Reply:
        if self.why_lost:
            raise SlotLost(self.why_lost)
        match command:
            case Generate(requests):
                for request in requests:
                    self._begin(request)
                return Done()
            case Abort(ids):
                self._take_away(ids)
                return Done()
            case MigrateOut(ids):
                return MigratedOut(tuple(partial.so_far() for partial in self._take_away(ids)))
            case Forget():
                return Done()
            case DigestWeights():
                return await self._digest_weights()
            case _:
                raise Refused(f"{self.describe()} is a server, and does not understand {type(command).__name__}")

    async def receive(self, manifest: Manifest) -> None:
        check_has(self, manifest.version)

    async def release(self) -> None:
        self._take_away()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._http.close()

    def condemn(self, why: str) -> None:
        for partial in self._take_away():
            self._deliver(Returned(partial.so_far(), NotTaken(why)))

    async def state(self) -> ServerState:
        """Return the server's state, and take the tokens of a version that it says it has committed. Raises SlotLost,
        Late or Refused, as all of these do; SlotLost where another process has its place."""
        state = await self._state()
        self._check(state.incarnation)
        if self._committing is not None and _is_of(state.version, state.digest, *self._committing):
            self._note_commit(state.version, state.digest)
            self._committing = None
        return state

    async def prepare(self, message: PrepareUpdate, deadline_s: float | None = None) -> UpdateProgress:
        return await self._tell("/weights/prepare", message, UpdateProgress, deadline_s)

    async def verify(self, message: EndUpdate, deadline_s: float | None = None) -> UpdateProgress:
        limit_s = deadline_s or self._http.deadlines.verify_s
        return await self._tell("/weights/verify", message, UpdateProgress, limit_s)

    async def commit(self, message: EndUpdate, deadline_s: float | None = None) -> UpdateProgress:
        """Have the server make the version live. Its tokens are taken from now on. Where the reply is lost, `state`
        says what has become of it."""
        self._committing = message.version, message.digest
        progress = await self._tell("/weights/commit", message, UpdateProgress, deadline_s)
        if progress.phase == "committed":
            self._note_commit(message.version, progress.digest or message.digest)
        self._committing = None
        return progress

    async def abort(self, message: EndUpdate, deadline_s: float | None = None) -> UpdateProgress:
        self._committing = None  # whatever has become of the reply: tokens of this version are not taken any more
        return await self._tell("/weights/abort", message, UpdateProgress, deadline_s)

    async def pause(self, message: PauseServer) -> ServerState:
        """Pause the server. One that has not let everything end by `lease_s` keeps what still runs. Raises Interrupted
        where it is not paused."""
        limit_s = message.lease_s + self._http.deadlines.control_s  # it may reply no sooner than its lease is over
        state = await self._tell("/pause", message, ServerState, limit_s)
        if not state.paused and message.mode == "drain":
            state = await self._tell("/pause", replace(message, mode="keep"), ServerState)
        if not state.paused:
            raise Interrupted(f"{self.describe()} was told to pause, and says that it is not paused")
        return state

    async def resume(self, message: ResumeServer) -> ServerState:
        return await self._tell("/resume", message, ServerState)

    async def lease(self, message: LeaseVersion) -> VersionLease:
        """Have the server keep its live version, for one that joins."""
        return await self._tell("/weights/lease", message, VersionLease)

    async def end_lease(self, message: EndVersionLease) -> None:
        body = msgspec.json.encode(message)
        await self._http.ask("POST", "/weights/lease/end", body, self._http.deadlines.state_s, control=True)

    async def _state(self) -> ServerState:
        content = await self._http.ask("GET", "/fleet/state", deadline_s=self._http.deadlines.state_s)
        return self._decoded(content, "/fleet/state", ServerState)

    async def _digest_weights(self) -> WeightDigests:
        limit_s = self._http.deadlines.verify_s
        content = await self._http.ask("GET", "/weights/digest", deadline_s=limit_s, control=True)
        return WeightDigests(self._decoded(content, "/weights/digest", LiveDigest))

    async def _tell(self, route: str, message: msgspec.Struct, kind: type[M], deadline_s: float | None = None) -> M:
        content = await self._http.ask("POST", route, msgspec.json.encode(message), deadline_s, control=True)
        return self._decoded(content, route, kind)

    def _decoded(self, content: bytes, route: str, kind: type[M]) -> M:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise Refused(f"{self.url}{route} replied with no {kind.__name__}: {error}") from None

    def _begin(self, request: GenerateRequest) -> None:
        partial = PartialCompletion(request, goes_on=bool(self.incarnation))
        self._live[request.id] = partial, start(self._generate(partial))
        if self._ticking is None or self._ticking.done():
            self._ticking = start(self._tick())

    async def _generate(self, partial: PartialCompletion) -> None:
        """Deliver the request's one outcome, unless it was taken away before."""
        try:
            reason = partial.reason_to_end or await self._stream(partial)
        except Failure as failure:
            if self._live.pop(partial.request.id, None):
                self._deliver(Returned(partial.so_far(), failure))
        else:
            if self._live.pop(partial.request.id, None):
                self._deliver(Finished((partial.ended(reason),)))

    async def _stream(self, partial: PartialCompletion) -> FinishReason:
        try:
            return await self._take_pieces(partial)
        except (Barred, SlotLost, NoTokens) as error:
            self._lose(str(error))
            failure = SlotLost(self.why_lost)
        except Interrupted as error:
            if not self.why_lost and await self._is_gone():
                self._lose(str(error))
            failure = SlotLost(self.why_lost) if self.why_lost else error
        except Late as error:
            failure = Interrupted(str(error))
        if reason := partial.reason_to_end:
            return reason
        raise failure

    async def _take_pieces(self, partial: PartialCompletion) -> FinishReason:
        url = self.url + ROUTE
        body = completion_body(partial.request, self._model, partial.goes_on)
        async with aclosing(self._http.events(ROUTE, body)) as events:
            async for event in events:
                piece = read_piece(event, url)
                self._check(piece.incarnation)
                self._check_versions(piece)
                partial.add(piece, self._own_version, url, self._vocab_size)
                self._num_sampled += len(piece.token_ids)
                self.heard_at = time.monotonic()
                if piece.finish_reason is not None:
                    with suppress(Failure, TimeoutError):  # to its end, and the connection may be used again
                        async with asyncio.timeout(LAST_WORDS_S):
                            async for _ in events:
                                pass
                    if piece.finish_reason == "abort":
                        raise NotTaken(f"{self.url} has stopped what it was generating")
                    return piece.finish_reason
        raise Interrupted(f"{url} ended a response before its end")

    def _check(self, incarnation: str) -> None:
        """Lose the server, and raise SlotLost, when it is not the process that was adopted."""
        if self.incarnation and incarnation != self.incarnation:
            self._lose(f"{self.url} is another process now (incarnation {incarnation[:32]!r})")
            raise SlotLost(self.why_lost)

    def _check_versions(self, piece: StreamedPiece) -> None:
        """Lose the server, and raise SlotLost, for tokens that are not of versions which it has committed."""
        if not self.incarnation:
            return
        if piece.token_ids and not piece.spans:
            self._lose(f"{self.url} does not say which weights its tokens are from")
            raise SlotLost(self.why_lost)
        for span in piece.spans:
            if not self._is_trusted(span.version, span.digest):
                self._lose(
                    f"{self.url} has sampled from version {span.version} with digest {span.digest[:16]!r}, "
                    "which it has not committed for this run"
                )
                raise SlotLost(self.why_lost)

    def _is_trusted(self, version: int, digest: Digest) -> bool:
        known = [*self._committed.items(), *([self._committing] if self._committing else [])]
        return any(_is_of(version, digest, *each) for each in known)

    def _note_commit(self, version: int, digest: Digest) -> None:
        self.version = version
        self._committed[version] = digest
        while len(self._committed) > REMEMBERED:
            del self._committed[min(self._committed)]

    async def _is_gone(self) -> bool:
        """Return whether there is hard evidence of the server's end: nobody listens any more, or another process does.
        All requests that lose their connection at the same time share one look."""
        if self._looking is None or self._looking.done():
            self._looking = start(self._look())
        return await asyncio.shield(self._looking)

    async def _look(self) -> bool:
        try:
            if self.incarnation:
                return (await self._state()).incarnation != self.incarnation
            await self._http.ask("GET", "/v1/models", deadline_s=self._http.deadlines.state_s)
        except SlotLost:
            return True
        except Failure:
            pass
        return False

    def _lose(self, why: str) -> None:
        """Give up a server that is gone, or is none of this run's any more."""
        if self.why_lost:
            return
        self.why_lost = why
        for partial in self._take_away():
            self._deliver(Returned(partial.so_far(), SlotLost(why)))
        self._deliver(Died(why))
        start(self._http.close())

    def _take_away(self, ids: Collection[str] | None = None) -> list[PartialCompletion]:
        """End requests, without an outcome. Returns those that were there. ids: None means all."""
        taken: list[PartialCompletion] = []
        for id in list(self._live) if ids is None else ids:
            if found := self._live.pop(id, None):
                partial, task = found
                taken.append(partial)
                if task is not asyncio.current_task():
                    task.cancel()
        return taken

    async def _tick(self) -> None:
        """Tell of progress as an engine does, as long as there are requests."""
        reported = -1
        while self._live:
            await asyncio.sleep(TELLS_S)
            if self._num_sampled != reported:
                reported = self._num_sampled
                generated = {id: len(partial) for id, (partial, _) in self._live.items()}
                version = self._own_version if self.version is None else self.version
                self._deliver(EngineStats(len(generated), 0, reported, 0, 0.0, version, generated))


def _is_of(version: int, digest: Digest, wanted_version: int, wanted_digest: Digest) -> bool:
    return version == wanted_version and wanted_digest in ("", digest)
