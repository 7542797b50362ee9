"""Turns a growing list of tokens into text that may be shown.

The engine and the server both follow a completion with a `TextStream`, so that generation ends where the text is cut.
"""

from collections.abc import Callable, Sequence

from ductile.records import Sampling
from ductile.tasks.token_bytes import INCOMPLETE

MOST_INCOMPLETE = 3
"""Most `INCOMPLETE`s at the end of a text that may still become a character; those before them never will."""

NUM_CONTEXT = 8
"""Tokens that are decoded again, only so that what follows them is spelled right."""

MAX_WINDOW = 12
"""Tokens that are decoded together, before all but `NUM_CONTEXT` are forgotten."""

Decode = Callable[[list[int], bool], str]
"""Function from tokens, and whether to leave out special ones, to their text."""


class TextStream:
    """Feed it tokens as they come; it returns what can be shown for certain.

    A character whose last bytes are still to come, and an ending that may become a stop string, are held back. A stop
    string itself is never shown. A token that ended the completion is not to be fed.
    """

    def __init__(self, decode: Decode, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        """prompt: tokens that the completion goes on from. Many decoders drop the space that a text begins with, and a
        completion begins no text."""
        self._decode = decode
        self._skip_special_tokens = sampling.skip_special_tokens
        self._stop = sampling.stop
        self._longest_stop = max(map(len, sampling.stop), default=0)
        self._window: list[int] = []
        """The context, then tokens that are not all taken."""
        self._taken = ""
        """Beginning of the window's text that `push` has taken already."""
        self._num_open_tokens = 0
        """Tokens at the window's end that came since all of its text was taken."""
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that has come."""
        self._before = list(prompt[-NUM_CONTEXT:])

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has come."""
        return self.stopped_by is not None

    def follow(self, tokens: list[int]) -> str:
        """Take tokens before the completion, in which no stop string is looked for, and return their text. A character
        that they only begin comes with the completion."""
        return self._new_text(tokens, last=False)

    def push(self, tokens: list[int], last: bool) -> str:
        """Take tokens and return the text that is certain now. `last`: no more will come, so nothing is held back
        except what stopped the completion."""
        if self.stopped:
            return ""
        if self._before:
            self.follow(self._before)
            self._before = []
        self._held += self._new_text(tokens, last)
        cuts = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if cuts:
            cut, self.stopped_by = min(cuts)
            return self._held[:cut]
        keep = 0 if last else self._may_become_stop()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _new_text(self, tokens: list[int], last: bool) -> str:
        self._window += tokens
        self._num_open_tokens += len(tokens)
        text, num_taken = self._decode(self._window, self._skip_special_tokens), len(self._taken)
        num_broken = len(text) - len(text.rstrip(INCOMPLETE))
        spoiled = num_broken > 0 and not text.startswith(self._taken)
        if not last and spoiled and self._num_open_tokens <= MOST_INCOMPLETE:
            return ""  # decoders with byte fallback spell whole characters as broken, too, when they precede a half one
        num_open = 0 if last else max(0, min(num_broken, MOST_INCOMPLETE, len(text) - num_taken))
        num_certain = len(text) - num_open
        self._taken = text[:num_certain]
        if not num_open:
            self._num_open_tokens = 0
        # One or two may have begun before the context does, with tokens between that are not shown.
        if len(self._window) > MAX_WINDOW and num_open in (0, MOST_INCOMPLETE):
            self._forget(text)
        return text[num_taken:num_certain]

    def _forget(self, text: str) -> None:
        """Drop all of the window but the context, which is a little longer where a character would be cut."""
        pending = text[len(self._taken) :]
        for size in range(NUM_CONTEXT, MAX_WINDOW):
            window = self._window[-size:]
            kept = self._decode(window, self._skip_special_tokens)
            if kept.endswith(pending) and (text.endswith(kept) or size == MAX_WINDOW - 1):
                self._window, self._taken = window, kept[: len(kept) - len(pending)]
                return

    def _may_become_stop(self) -> int:
        """How many characters at the end are the beginning of a stop string."""
        for size in range(min(self._longest_stop - 1, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._stop):
                return size
        return 0
