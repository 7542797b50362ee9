"""From a growing list of tokens to text that may be shown."""

from collections.abc import Callable, Collection

INCOMPLETE = "\ufffd"
"""What decoders write for bytes that are not (yet) a whole character."""

Decode = Callable[[list[int]], str]


class TextStream:
    """Feed it tokens as they come; it returns what can be shown for certain.

    A character whose last bytes are still to come, and an ending that may become a stop string, are held back. A stop
    string itself is never shown, nor is a token that ended the answer.
    """

    def __init__(self, decode: Decode, stop: Collection[str] = (), stop_ids: Collection[int] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._stop_ids = frozenset(stop_ids)
        self._tokens: list[int] = []
        self._context = 0
        """From here on tokens are decoded; the ones before `_shown` only so that what follows is spelled right."""
        self._shown = 0
        self._held = ""
        self._stopped = False

    def push(self, tokens: list[int], last: bool) -> str:
        """`last`: no more will come, so nothing is held back except what stopped the answer."""
        if last and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
        self._tokens += tokens
        if self._stopped:
            return ""
        self._held += self._new_text(last)
        cuts = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if cuts:
            self._stopped = True
            return self._held[: min(cuts)]
        keep = 0 if last else self._may_become_stop()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _new_text(self, last: bool) -> str:
        before = self._decode(self._tokens[self._context : self._shown])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(INCOMPLETE) and not last:
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]

    def _may_become_stop(self) -> int:
        """How many characters at the end are the beginning of a stop string."""
        for size in range(max((len(text) for text in self._stop), default=1) - 1, 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._stop if len(self._held) >= size):
                return size
        return 0
