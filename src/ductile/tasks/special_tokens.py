"""Special tokens as the files beside `tokenizer.json` say them, in the way that `transformers` reads these.

tokenizer_config.json      bos_token and its kin, extra_special_tokens, added_tokens_decoder
special_tokens_map.json    the same words, stronger, but only without an added_tokens_decoder
added_tokens.json          {"<tool>": 384}, likewise
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from ductile.user_files import NotText, read_text

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names that every tokenizer has. A file may have further ones that end with `_token`."""


class TokenizerError(Exception):
    """Tokenizer files that cannot be used, or a chat that they cannot express. The text says which file and why."""


class SpecialTokens:
    """`named`: tokens by their names, as chat templates see them."""

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerError."""
        self._folder, self.settings = folder, read_object(folder / CONFIG)
        decoder = self.settings.get("added_tokens_decoder")
        of_map = {} if decoder is not None else read_object(folder / MAP)
        names, extra = self._both(CONFIG, self.settings, "extra_special_tokens", "additional_special_tokens")
        names_of_map, extra_of_map = self._both(MAP, of_map, "extra_special_tokens")
        self._named = {**names_of_map, **names, **{name: names_of_map.get(name) for name in of_map if name in NAMED}}
        self._extra = [*extra, *extra_of_map]
        self._added = dict(self._of_decoder(decoder) if decoder is not None else self._of_file())
        if not self._extra:
            self._extra = self._both(MAP, of_map, "additional_special_tokens")[1]

    @property
    def named(self) -> dict[str, str]:
        return {name: token.content for name, token in self._named.items() if token is not None}

    def add_to(self, backend: Tokenizer) -> None:
        """Raises TokenizerError when a file gives a token another id than it gets."""
        backend.encode_special_tokens = self.settings.get("split_special_tokens") is True
        backend.add_tokens([self._added[token_id] for token_id in sorted(self._added)])
        known = backend.get_vocab(with_added_tokens=True)
        others = (*filter(None, self._named.values()), *self._extra)
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([token for token in others if token.content not in added])
        for token_id, token in self._added.items():
            if (found := known.get(token.content)) != token_id:
                file, key = (CONFIG, "added_tokens_decoder") if "added_tokens_decoder" in self.settings else (ADDED, "")
                raise TokenizerError(
                    f"{self._folder / file}{key and ': ' + key} gives {token.content!r} the id {token_id}, and behind "
                    f"the tokens of tokenizer.json it is {found}; save the tokenizer anew with save_pretrained"
                )

    def _of_decoder(self, decoder: Any) -> Iterator[tuple[int, AddedToken]]:
        if not isinstance(decoder, Mapping):
            raise self._wrong(CONFIG, "added_tokens_decoder", decoder)
        for token_id, token in cast(Mapping[str, Any], decoder).items():
            if not token_id.isdecimal() or not isinstance(token, Mapping):
                raise self._wrong(CONFIG, f"added_tokens_decoder.{token_id}", token)
            yield int(token_id), self._token(CONFIG, f"added_tokens_decoder.{token_id}", token, special=False)

    def _of_file(self) -> Iterator[tuple[int, AddedToken]]:
        special = {token.content for token in (*filter(None, self._named.values()), *self._extra)}
        for text, token_id in read_object(self._folder / ADDED).items():
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self._wrong(ADDED, text, token_id)
            yield token_id, AddedToken(text, special=text in special, normalized=text not in special)

    def _both(
        self, file: str, table: Mapping[str, Any], *lists: str
    ) -> tuple[dict[str, AddedToken | None], list[AddedToken]]:
        """The file's tokens with names, and those of the first of the `lists` that has any."""
        named = {name: token for name, token in table.items() if name in NAMED or _is_of_model(name, token)}
        key, extra = next(((name, table[name]) for name in lists if table.get(name)), ("", []))
        if isinstance(extra, Mapping):
            named |= cast(Mapping[str, Any], extra)
            extra = []
        if not isinstance(extra, list):
            raise self._wrong(file, key, extra)
        tokens = {
            name: None if token is None else self._token(file, name, token, special=True)
            for name, token in named.items()
        }
        return tokens, [
            self._token(file, f"{key}.{n}", each, special=None) for n, each in enumerate(cast(list[Any], extra))
        ]

    def _token(self, file: str, key: str, token: Any, special: bool | None) -> AddedToken:
        """The token, written as text or as a table with `content`. special: None takes the table's own word."""
        table: dict[str, Any] = (
            dict(cast(Mapping[str, Any], token)) if isinstance(token, Mapping) else {"content": token}
        )
        default = special if special is not None else table.pop("__type", None) is None
        fields = {name: table.get(name, False) for name in ("single_word", "lstrip", "rstrip")}
        is_special = True if special else bool(table.get("special", default))
        if not isinstance(table.get("content"), str) or not all(isinstance(each, bool) for each in fields.values()):
            raise self._wrong(file, key, token)
        normalized = bool(table.get("normalized", not is_special))
        return AddedToken(table["content"], normalized=normalized, special=is_special, **fields)

    def _wrong(self, file: str, key: str, value: object) -> TokenizerError:
        return TokenizerError(f"{self._folder / file}: {key} is {value!r:.80}, which is no token")


def _is_of_model(name: str, token: object) -> bool:
    """Return whether a key is a token under a name of the model's own: `image_token`."""
    return name.endswith("_token") and isinstance(token, str | Mapping)


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is no file. Raises TokenizerError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except NotText as error:
        raise TokenizerError(str(error)) from error
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return cast(dict[str, Any], value)
