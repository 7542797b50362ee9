"""Text to token ids and back, and chats to prompts, from the files of a Hugging Face folder.

`tokenizers` does the work; what `transformers` adds on top (special tokens, chat templates) is a page, so the control
plane does without it, and without torch.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tokenizers

from ductile.surrogates import mended
from ductile.tasks.chat_template import ChatTemplate, ChatTemplateError
from ductile.tasks.conversation import ApplyTemplate, after_completion

ChatTurn = Mapping[str, Any]


class TokenizerError(Exception):
    """Tokenizer files that cannot be used, or a chat that they cannot express. The text says which file and why."""


class Tokenizer:
    """Read with `from_folder`. Encoding follows the folder: its own rules say whether a bos token is added."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        chat_template: ChatTemplate | None,
        source: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        self._source = source
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *self._end_of_turn()]))
        """Generation ends after any of these: those of generation_config.json, config.json and the tokenizer, and what
        the chat template ends an assistant's turn with (base models come with a template, and with the end of a text as
        their only eos)."""

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> "Tokenizer":
        """`chat_template` is a Jinja file to use instead of the folder's own, `chat_template_kwargs` are variables for
        every conversation."""
        folder = Path(folder)
        backend = _read_backend(folder / "tokenizer.json")
        settings = _read_optional(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_optional(folder / "special_tokens_map.json") | settings)
        _refuse_foreign(folder, backend)
        eos = _eos_token_ids(folder, backend, special_tokens.get("eos_token"))
        template = _read_template(folder, settings, chat_template)
        return cls(backend, special_tokens, eos, template, str(folder), chat_template_kwargs)

    def fingerprints(self) -> dict[str, Any]:
        """Return what tells this tokenizer from others: its vocabulary and rules, however their file spells them; its
        chat template; and the tokens that end a turn."""
        template = "" if self._chat_template is None else self._chat_template.text
        texts = {"tokenizer": self._backend.to_str(), "chat_template": template}
        found = {name: blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}
        return {**found, "eos_token_ids": list(self.eos_token_ids)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(mended(text), add_special_tokens=add_special_tokens).ids

    def encode_beside(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode` for a long text in a thread: other threads run meanwhile, which `encode` does not allow."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids that the vocabulary does not have (a model may be padded beyond it) decode to nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[ChatTurn], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation. `variables` are further template variables: `enable_thinking=False`."""
        if self._chat_template is None:
            raise TokenizerError(
                f"{self._source} has no chat template; add chat_template.jinja to it, or name a file with "
                "--inference.model.chat-template"
            )
        try:
            return self._chat_template.render(
                **{"tools": None, "documents": None, **self._special_tokens, **self._chat_template_kwargs, **variables},
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
            )
        except ChatTemplateError as error:
            raise TokenizerError(f"the chat template of {self._source} refuses the messages: {error}") from error

    def apply_chat_template(
        self, messages: Sequence[ChatTurn], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The tokens of a conversation. The template writes the special tokens, so none are added here."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    @property
    def chat_template(self) -> ApplyTemplate | None:
        """`apply_chat_template`, where the folder has a template."""
        return None if self._chat_template is None else self.apply_chat_template

    def _end_of_turn(self) -> list[int]:
        """The special token that the chat template writes behind a completion, if there is one."""
        if self._chat_template is None:
            return []
        prompt = [{"role": "user", "content": "0"}]
        try:
            after = after_completion(self.apply_chat_template, prompt, [], add_generation_prompt=False)
        except TokenizerError:  # a template that wants other messages
            return []
        added = self._backend.get_added_tokens_decoder()
        return [token for token in after if token in added and added[token].special][:1]

    @property
    def vocab_size(self) -> int:
        """Ids are below this, added tokens included. A model's own `vocab_size` may be larger."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def longest_token(self) -> int:
        """Most characters of a text that become one token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"{path.parent} has no {path.name}; ductile reads tokenizers in that format (save it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _refuse_foreign(folder: Path, backend: tokenizers.Tokenizer) -> None:
    """A model may have more embeddings than the tokenizer has tokens (padding), never fewer."""
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    model_size = _read_optional(folder / "config.json").get("vocab_size")
    if isinstance(model_size, int) and highest >= model_size:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} has token ids up to {highest}, but vocab_size in config.json is "
            f"{model_size}; take the tokenizer that belongs to this model"
        )


def _read_optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kin, as templates see them. A token is written as text or as a table with `content`."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """Chat models often name the end of a turn in one file and the end of a text in another; both end generation."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_optional(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    found.append(backend.token_to_id(eos_token) if eos_token is not None else None)
    wrong = [value for value in found if value is not None and (isinstance(value, bool) or not isinstance(value, int))]
    if wrong:
        raise TokenizerError(f"{folder}: eos_token_id holds {wrong[0]!r}; it must be an integer or a list of integers")
    return list(dict.fromkeys(value for value in found if value is not None))


def _read_template(folder: Path, settings: Mapping[str, Any], path: str | Path | None) -> ChatTemplate | None:
    """Newer folders have chat_template.jinja; older ones tokenizer_config.json, with one template or a named list."""
    if path is None and (folder / "chat_template.jinja").is_file():
        path = folder / "chat_template.jinja"
    if path is not None:
        source = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"chat template {path} cannot be read: {error}") from error
    else:
        source = f"chat_template in {folder / 'tokenizer_config.json'}"
        text = settings.get("chat_template")
        if isinstance(text, list):
            text = {entry.get("name"): entry.get("template") for entry in text}.get("default")
        if not isinstance(text, str):
            return None
    try:
        return ChatTemplate(text)
    except ChatTemplateError as error:
        raise TokenizerError(f"{source} is not a template: {error}") from error
