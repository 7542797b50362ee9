"""Bytes that one token adds to a text: half a character has no text of its own.

A decoder turns tokens into text. Alone it turns a token that is a part of a character into U+FFFD, so what it says is
taken only where it is whole characters. Otherwise the token's name spells its bytes: in the alphabet of byte-level
vocabularies, where each byte has a visible character, or as `<0xE2>` where bytes are the last resort.
"""

import tokenizers

INCOMPLETE = "\ufffd"
"""Character that decoders write for bytes that are not a whole character."""

ANCHOR = "a"
"""A token before the one that is looked at: decoders treat a text's first one otherwise."""


def _byte_level() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are their own characters, the others those from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}


BYTE_OF = _byte_level()


class TokenBytes:
    """Bytes of the tokens of one vocabulary. Those of a text's tokens, one after the other, are the text in UTF-8, but
    where the text itself has U+FFFD: there they are what the model said."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._decoder = backend.decoder
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, named in added.items() if named.special)
        """Tokens that a text does not show unless it is asked to."""
        self._found: dict[tuple[int, bool], bytes] = {}

    def of(self, token_id: int, first: bool = False) -> bytes:
        """Return what the token adds to a text; `first`: at its beginning, where some decoders drop a space. An id that
        the vocabulary does not have adds nothing."""
        known = (token_id, first)
        if known not in self._found:
            self._found[known] = self._look_up(token_id, first)
        return self._found[known]

    def _look_up(self, token_id: int, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        text = self._text([token]) if first else self._text([ANCHOR, token])[len(self._text([ANCHOR])) :]
        return text.encode() if INCOMPLETE not in text else _spelled(token)

    def _text(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)


def _spelled(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    if all(character in BYTE_OF for character in token):
        return bytes(BYTE_OF[character] for character in token)
    return token.encode()


def token_text(spelled: bytes) -> str:
    r"""Return a token as a text that no other token has: as OpenAI spells it, `bytes:\xe2\x96` where it is none."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
