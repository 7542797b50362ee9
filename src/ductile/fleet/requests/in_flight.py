"""Books of all requests in flight: where each is, how far it is, and how much work every generator still has."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ductile.concurrency.change_signal import ChangeSignal
from ductile.core.instances.instances import Instance, InstanceId
from ductile.core.instances.routing import GeneratorLoad, Suspicion, predicted_tokens
from ductile.core.scheduling.facts.cluster_state import Lengths, Unfinished
from ductile.messages.workers import EngineStats
from ductile.records import GenerateRequest, Generation

KEPT_LENGTHS = 2048
"""Completions whose lengths are kept."""


@dataclass(slots=True, eq=False)
class InFlight:
    """One request in flight."""

    name: str
    """Id of the request on the wire: its own, with a number after it once that id was aborted."""
    request: GenerateRequest
    """The request, with the tokens that it had when it last left a generator."""
    completion: "asyncio.Future[Generation]"
    instance: Instance | None = None
    """Generator that has the request; None while it waits for one, or is between two."""
    since_s: float = 0.0
    """Time on the clock of `RequestsInFlight` at which the request came to `instance`, in seconds."""
    generated: int = 0
    """Tokens of the completion, as its generator said last."""
    predicted_tokens: float = 0.0
    """Tokens that are still to come, as predicted."""
    num_lost: int = 0
    """Generators in a row that were lost while they had the request, or failed at it, and brought it no further."""
    not_taken_since_s: float | None = None
    """Time at which a generator did not take the request, and none has since; None when one has, or none was asked."""
    is_canary: bool = False
    """The request is there to check its generator: it says nothing about lengths, and stays where it is."""
    migrating: bool = False
    """The request migrates to `instance`, and the reply is waited for. Should that one be lost, the migration goes
    on."""

    @property
    def where(self) -> InstanceId | None:
        """Id of the generator that has the request; None when none has."""
        return self.instance.id if self.instance else None

    def take(self, request: GenerateRequest) -> None:
        """Take over what a generator gave away: the same request, with the tokens that it has so far."""
        if len(request.generated) > len(self.request.generated):
            self.num_lost = 0
        self.request = replace(request, id=self.request.id)
        self.generated = len(request.generated)

    def fail(self, error: Exception) -> None:
        if not self.completion.done():
            self.completion.set_exception(error)

    @property
    def on_wire(self) -> GenerateRequest:
        return replace(self.request, id=self.name)


class CompletionLengths:
    """Lengths of the latest completions. An aborted one is not counted: it says nothing about lengths."""

    def __init__(self) -> None:
        self.ended: deque[int] = deque(maxlen=KEPT_LENGTHS)
        """Tokens of each completion that the model ended."""
        self.cut: deque[int] = deque(maxlen=KEPT_LENGTHS)
        """Tokens of each completion that hit its limit."""
        self.num_seen = 0
        self._tokens = 0
        self._prompts: deque[int] = deque(maxlen=KEPT_LENGTHS)

    def note(self, request: GenerateRequest, generation: Generation) -> None:
        if generation.finish_reason == "abort":
            return
        num_tokens = len(generation.token_ids)
        (self.cut if generation.finish_reason == "length" else self.ended).append(num_tokens)
        self._prompts.append(len(request.prompt))
        self.num_seen += 1
        self._tokens += num_tokens

    @property
    def mean(self) -> float | None:
        """Mean tokens of a completion over the whole run; None before the first completion."""
        return self._tokens / self.num_seen if self.num_seen else None

    def lengths(self) -> Lengths:
        prompt_mean = sum(self._prompts) / len(self._prompts) if self._prompts else 0.0
        return Lengths(tuple(self.ended), tuple(self.cut), prompt_mean)


class RequestsInFlight:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.completion_lengths = CompletionLengths()
        self.suspects: dict[InstanceId, Suspicion] = {}
        """Generators that may be about to fail."""
        self._clock = clock
        self._by_name: dict[str, InFlight] = {}
        self._num_aborted: Counter[str] = Counter()
        """Number of aborts, by request id."""
        self._num_tokens: dict[InstanceId, int] = {}
        """Tokens that each generator has sampled, as it said last."""
        self._progress_at_s: dict[InstanceId, float] = {}
        self._changed = ChangeSignal()

    def open(self, request: GenerateRequest, is_canary: bool = False) -> InFlight:
        # A first attempt keeps its name: a generator's random stream may follow from it. A second one after an abort
        # has another, so that the first one's late completion is never taken for its.
        aborted = self._num_aborted[request.id]
        name = f"{request.id}~{aborted}" if aborted else request.id
        entry = InFlight(name, request, asyncio.get_running_loop().create_future(), generated=len(request.generated))
        entry.is_canary = is_canary
        self._by_name[name] = entry
        return entry

    def reopen(self, entry: InFlight, *, failed: bool) -> None:
        """Make the request ready to begin again. failed: its generator was lost, or failed at it; else it has not taken
        it."""
        entry.num_lost += failed
        if failed:
            entry.not_taken_since_s = None
        elif entry.not_taken_since_s is None:
            entry.not_taken_since_s = self._clock()
        entry.generated = len(entry.request.generated)
        if entry.completion.done() and not entry.completion.cancelled():
            entry.completion.exception()  # it has been seen, though perhaps by another way
        entry.completion = asyncio.get_running_loop().create_future()
        self.note_instance(entry, None)

    def not_taken_for_s(self, entry: InFlight) -> float:
        """Return the seconds for which no generator has taken the request."""
        return 0.0 if entry.not_taken_since_s is None else self._clock() - entry.not_taken_since_s

    def close(self, entry: InFlight, aborted: bool) -> None:
        del self._by_name[entry.name]
        entry.completion.cancel()  # its caller does not wait for it any more
        if aborted:  # an entry for each request that was ever made would only grow
            self._num_aborted[entry.request.id] += 1
        self._changed.notify_all()

    def note_migrating(self, entries: Iterable[InFlight], *, migrating: bool) -> None:
        for entry in entries:
            entry.migrating = migrating

    def note_instance(self, entry: InFlight, instance: Instance | None) -> None:
        """Note that the request is at this generator from now on; None: at none."""
        entry.instance, entry.since_s = instance, self._clock()
        self._predict(entry)
        self._changed.notify_all()

    def get(self, name: str) -> InFlight | None:
        return self._by_name.get(name)

    def is_under_way(self, entry: InFlight) -> bool:
        return self._by_name.get(entry.name) is entry and not entry.completion.done()

    def at(self, instance: Instance) -> list[InFlight]:
        return [entry for entry in self._by_name.values() if entry.instance == instance]

    async def gone_from(self, instance: Instance, timeout_s: float) -> None:
        """Returns when no request is at this generator. Raises TimeoutError."""
        await self._changed.wait_for(lambda: not self.at(instance), timeout_s)

    def progress_at_s(self, entry: InFlight) -> float | None:
        """Return the time at which the request's generator last made progress, or got the request. None between two
        generators: none is to blame, and the migration has deadlines of its own."""
        if entry.instance is None or entry.migrating:
            return None
        return max(entry.since_s, self._progress_at_s.get(entry.instance.id, entry.since_s))

    def note_other_work(self, instance: Instance) -> None:
        """Note that the generator's slot is at a command of another role: meanwhile the generator cannot make
        progress."""
        self._progress_at_s[instance.id] = self._clock()

    def note_completions(self, instance: Instance, generations: Iterable[Generation]) -> list[Generation]:
        """Returns the completions that were waited for, without canaries, under the ids of their requests."""
        self._progress_at_s[instance.id] = self._clock()
        completed: list[Generation] = []
        for generation in generations:
            entry = self._by_name.get(generation.id)
            if entry and entry.instance == instance and not entry.completion.done():
                generation = replace(generation, id=entry.request.id)
                entry.completion.set_result(generation)
                if not entry.is_canary:
                    self.completion_lengths.note(entry.request, generation)
                    completed.append(generation)
        return completed

    def note_stats(self, instance: Instance, stats: EngineStats) -> None:
        if stats.num_tokens != self._num_tokens.get(instance.id, 0):
            self._progress_at_s[instance.id] = self._clock()
            self._num_tokens[instance.id] = stats.num_tokens
        for name, generated in stats.generated.items():
            entry = self._by_name.get(name)
            if entry and entry.instance == instance:
                entry.generated, entry.not_taken_since_s = max(entry.generated, generated), None
                self._predict(entry)

    def suspect(self, id: InstanceId, suspicion: Suspicion | None) -> None:
        """Note that the generator is suspect; None: that it is not."""
        if suspicion is None:
            self.suspects.pop(id, None)
        else:
            self.suspects[id] = suspicion

    def loads(self, instances: Sequence[Instance]) -> list[GeneratorLoad]:
        """Predicted work that each generator still has."""
        remaining, num_sequences = {each.id: 0.0 for each in instances}, Counter[InstanceId]()
        groups: dict[InstanceId, set[str]] = {name: set() for name in remaining}
        for entry in self._by_name.values():
            if (name := entry.where) is not None and name in remaining:
                remaining[name] += entry.predicted_tokens
                num_sequences[name] += 1
                if entry.request.group:
                    groups[name].add(entry.request.group)
        return [
            GeneratorLoad(name, tokens, frozenset(groups[name]), num_sequences[name], self.suspects.get(name))
            for name, tokens in remaining.items()
        ]

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Return all requests that are at a generator, as policies see them; their ids are those on the wire."""
        return tuple(
            Unfinished(
                id=entry.name,
                instance=where,
                prompt_tokens=len(entry.request.prompt),
                generated=entry.generated,
                limit=entry.request.sampling.max_tokens,
                group=entry.request.group,
                num_turns=entry.request.num_turns,
            )
            for entry in self._by_name.values()
            if (where := entry.where) is not None and not entry.completion.done() and not entry.is_canary
        )

    def forget(self, instance: Instance) -> None:
        """Forget a generator that is none any more; no other one will have its id."""
        self.suspects.pop(instance.id, None)
        self._num_tokens.pop(instance.id, None)
        self._progress_at_s.pop(instance.id, None)

    def _predict(self, entry: InFlight) -> None:
        limit = entry.request.sampling.max_tokens
        entry.predicted_tokens = predicted_tokens(limit, entry.generated, self.completion_lengths.mean)
