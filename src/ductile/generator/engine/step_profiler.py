"""How long the engine's steps take, by what they computed: measured where they run, told with the statistics."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean

from ductile.generator.engine.scheduler import Chunk

MOST_POINTS = 8


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step computed."""

    num_sequences: int
    num_tokens: int
    context_tokens: int
    """Tokens in the contexts of all the step's sequences together, the new tokens included."""
    num_kv_imports: int
    """Handed-over caches that were copied into the KV cache before the step."""
    num_decoding: int = 0
    """Sequences that the step gave one token; of the others it computed prompts, or contexts that came by migration."""
    is_recorded: bool = False
    """Whether the step was the first of its shape, and captured as a CUDA graph, which takes as long as many steps."""

    @classmethod
    def of(cls, chunks: Sequence[Chunk], num_kv_imports: int) -> "StepLoad":
        num_tokens, context = sum(chunk.count for chunk in chunks), sum(chunk.end for chunk in chunks)
        return cls(len(chunks), num_tokens, context, num_kv_imports, sum(chunk.count == 1 for chunk in chunks))


_Step = tuple[float, float, float]
"""A step that only decoded: sequences, tokens in their contexts, seconds."""


class StepProfiler:
    """Collects steps until they are drained. Steps that copied a migrated cache, or captured a graph, are not typical,
    and left out."""

    def __init__(self) -> None:
        self._decodes: dict[int, list[_Step]] = {}
        """Steps that only decoded, by number of sequences."""
        self._prefilled = (0, 0.0)
        self._latest: tuple[int, float] | None = None
        """Sequences and seconds of the latest step that only decoded."""

    def record(self, load: StepLoad, seconds: float) -> None:
        if load.num_kv_imports or load.is_recorded:
            return
        if load.num_tokens > load.num_sequences:
            tokens, total_s = self._prefilled
            self._prefilled = tokens + load.num_tokens - load.num_decoding, total_s + self._prefill_s(load, seconds)
            return
        self._latest = load.num_sequences, seconds
        step = load.num_sequences, load.context_tokens, seconds
        self._decodes.setdefault(load.num_sequences, []).append(step)

    def drain(self) -> tuple[tuple[_Step, ...], tuple[int, float]]:
        """(decoded, prefilled) as `EngineStats` has them, since the last time."""
        decoded = _points([self._decodes[size] for size in sorted(self._decodes)])
        tokens, seconds = self._prefilled
        self._decodes, self._prefilled = {}, (0, 0.0)
        return decoded, (tokens, max(0.0, seconds))

    def _prefill_s(self, load: StepLoad, seconds: float) -> float:
        """What the step took longer than if it had only decoded: a prompt that comes in while 60 sequences decode costs
        little of its step."""
        if self._latest is None:
            return seconds * (load.num_tokens - load.num_decoding) / load.num_tokens
        num_sequences, decode_s = self._latest
        return seconds - decode_s * min(1.0, load.num_decoding / num_sequences)


def _points(sizes: Sequence[Sequence[_Step]]) -> tuple[_Step, ...]:
    """One point for each size of batch, or for some neighbouring ones together when there are too many: the mean of its
    steps."""
    num = min(len(sizes), MOST_POINTS)
    cuts = [len(sizes) * point // num for point in range(num + 1)] if num else []
    return tuple(_mean(chain.from_iterable(sizes[start:end])) for start, end in pairwise(cuts))


def _mean(steps: Iterable[_Step]) -> _Step:
    sequences, context_tokens, seconds = zip(*steps, strict=True)
    return fmean(sequences), fmean(context_tokens), fmean(seconds)
