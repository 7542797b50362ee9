"""Prompts from text to tokens, within bounds.

A text that is far too long costs about as much as one that just fits: its beginning is looked at first. Large texts
take turns, as each may take a core for a second and a hundred times its length in memory; small ones do not wait for
them.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ductile.generator.engine.limits import Overloaded, RequestRefused, SequenceLimits
from ductile.tasks.tokenizer import Tokenizer

LARGE_CHARS = 2**16
"""Characters beyond which the texts of a request take turns with those of other requests."""

CHARS_A_TOKEN = 4
"""Characters a token that few texts exceed: the beginning of a prompt that fits is nearly always all of it."""

SURELY = 2
"""Times the tokens that fit: a text whose beginning has more has too many as a whole, however its rest changes the
beginning's last tokens."""


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer, limits: SequenceLimits, max_waiting_chars: int) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._longest_token = tokenizer.longest_token
        self._large_prompts = ThreadPoolExecutor(1, "large-prompts")
        self._max_waiting_chars, self._waiting_chars = max_waiting_chars, 0

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Turn texts into token ids, in a thread. Cancelled before its turn, it costs nothing. Raises `RequestRefused`,
        `Overloaded`."""
        longest, most = max(map(len, texts), default=0), self._limits.max_model_len * self._longest_token
        if longest > most:
            raise RequestRefused(
                "",
                f"the prompt has {longest} characters; model.max_model_len {self._limits.max_model_len} leaves room "
                f"for {most} at most, as a token of this model has up to {self._longest_token}",
            )
        num_chars = sum(map(len, texts))
        if num_chars <= LARGE_CHARS:
            return await asyncio.to_thread(self._encode, texts, add_special_tokens)
        if self._waiting_chars and self._waiting_chars + num_chars > self._max_waiting_chars:
            raise Overloaded("there are too many large prompts at once; try again later")
        self._waiting_chars += num_chars
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._large_prompts, self._encode, texts, add_special_tokens)
        finally:
            self._waiting_chars -= num_chars

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Encode the texts; the first that is too long ends it with `RequestRefused`."""
        return [self._encode_one(text, add_special_tokens) for text in texts]

    def _encode_one(self, text: str, add_special_tokens: bool) -> list[int]:
        num_chars, max_tokens = CHARS_A_TOKEN * self._limits.max_model_len, self._limits.max_model_len
        while num_chars < len(text):
            if len(self._tokenizer.encode_beside(text[:num_chars], add_special_tokens)) > SURELY * max_tokens:
                raise RequestRefused("", self._limits.too_long(f"more than {max_tokens}"))
            num_chars *= 2
        ids = self._tokenizer.encode_beside(text, add_special_tokens)
        if len(ids) >= max_tokens:
            raise RequestRefused("", self._limits.too_long(f"{len(ids)}"))
        return ids
