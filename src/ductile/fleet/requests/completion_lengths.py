"""How long completions have been of late: what policies and routing reckon with."""

from collections import deque

from ductile.core.scheduling.facts.cluster_state import Lengths
from ductile.records import GenerateRequest, Generation

KEPT = 2048


class CompletionLengths:
    """Lengths of the latest completions. An aborted one is not counted: it says nothing about lengths."""

    def __init__(self) -> None:
        self.ended: deque[int] = deque(maxlen=KEPT)
        """Tokens of each completion that the model ended."""
        self.cut: deque[int] = deque(maxlen=KEPT)
        """Tokens of each completion that hit its limit."""
        self.num_seen = 0
        self._tokens = 0
        self._prompts: deque[int] = deque(maxlen=KEPT)

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
