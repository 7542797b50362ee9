"""Text to token ids and back, and chats to prompts, from the files of a Hugging Face folder.

`tokenizers` does the work; what `transformers` adds on top (special tokens, chat templates) is a page, so the control
plane does without it, and without torch.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from ductile.config.schema.model import ChatModelConfig
from ductile.records import ChatFormat
from ductile.surrogates import mended
from ductile.tasks.chat_template import ChatTemplate, ChatTemplateError, TextSpan
from ductile.tasks.conversation import after_completion
from ductile.tasks.messages import as_given_to_templates
from ductile.tasks.special_tokens import SpecialTokens, TokenizerError, read_object
from ductile.tasks.template_files import read_template, with_defaults
from ductile.tasks.token_bytes import TokenBytes
from ductile.user_files import NotText, read_text

ChatTurn = Mapping[str, Any]
T = TypeVar("T")


class ChatRefused(TokenizerError):
    """A conversation that cannot be rendered. `reason` says why to those who see a model and no folder."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


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
        replaces_template: bool = False,
    ) -> None:
        """replaces_template: `chat_template` is not the one that `source` has."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_template, self._replaces_template = chat_template, replaces_template
        self._source = source
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        ends = dict.fromkeys([*eos_token_ids, *self._end_of_turn()])
        # Some folders name ids that their vocabulary lacks: no text ends with these, so others come first.
        self.eos_token_ids = tuple(sorted(ends, key=lambda token: backend.id_to_token(token) is None))
        """Generation ends after any of these: those of generation_config.json, config.json and the tokenizer, and what
        the chat template ends an assistant's turn with (base models come with a template, and with the end of a text as
        their only eos)."""
        if chat_template is not None:
            chat_template.dates.clear()  # of the trial that tells the end of a turn

    @classmethod
    def of(cls, model: ChatModelConfig) -> "Tokenizer":
        """Make the tokenizer of a command's model: whoever needs one in a run makes it so, of the same keys."""
        return cls.from_folder(str(model.name), model.chat_template, model.chat_template_kwargs)

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
        special_tokens = SpecialTokens(folder)
        special_tokens.add_to(backend)
        _refuse_foreign(folder, backend)
        eos = _eos_token_ids(folder, backend, special_tokens.named.get("eos_token"))
        template = read_template(folder, special_tokens.settings, chat_template)
        replaces = chat_template is not None
        for name in chat_template_kwargs or {}:
            if template is None or name not in template.variables:
                which = (
                    f"{folder}, which has no chat template," if template is None else f"the chat template of {folder}"
                )
                raise TokenizerError(f"{which} does not read {name}; leave it out of chat_template_kwargs")
        return cls(backend, special_tokens.named, eos, template, str(folder), chat_template_kwargs, replaces)

    def fingerprints(self) -> dict[str, Any]:
        """Return what tells this tokenizer from others: its vocabulary and rules, however their file spells them; its
        chat templates, the dates that these have written, and the special tokens that they read by name; and the tokens
        that end a turn."""
        rules, template = self._backend.to_str(), self._chat_template
        if self._backend.encode_special_tokens:  # which `to_str` leaves out
            rules += " split_special_tokens"
        templates = "" if template is None else template.text
        if template and template.with_tools:
            templates += "\0" + template.with_tools.text
        texts = {"tokenizer": rules, "chat_template": templates}
        found = {name: blake2b(text.encode(), digest_size=8).hexdigest() for name, text in texts.items()}
        read = {name: token for name, token in sorted(self._special_tokens.items()) if self.reads(name)}
        dates = {"dates": self._dates} if self._dates else {}
        return {**found, **dates, "special_tokens": read, "eos_token_ids": list(self.eos_token_ids)}

    @property
    def dated(self) -> str:
        """Return a sentence where the chat template has written today's date, else ""."""
        written = ", ".join(map(repr, self._dates))
        return f"The chat template writes today's date ({written}): prompts of another day differ." if written else ""

    @property
    def _dates(self) -> list[str]:
        """Dates that the chat template has written, but for trials of it."""
        templates = (self._chat_template, self._chat_template and self._chat_template.with_tools)
        return sorted({date for template in templates if template for date in template.dates.values()})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(mended(text), add_special_tokens=add_special_tokens).ids

    def encode_spans(self, text: str, spans: Sequence[TextSpan]) -> tuple[list[int], list[bool], bool]:
        """Return the tokens of a rendered text; for each, whether any of its characters is in one of the spans, which
        are in order (the rule of transformers' assistant masks); and whether a span begins within a token."""
        encoded = self._backend.encode(text, add_special_tokens=False)
        inside, remaining, straddles = list[bool](), deque(spans), False
        for start, end in encoded.offsets:
            while remaining and start >= remaining[0][1]:
                remaining.popleft()
            inside.append(bool(remaining) and end > remaining[0][0])
            straddles |= bool(remaining) and start < remaining[0][0] < end
        return encoded.ids, inside, straddles

    @cached_property
    def control_tokens(self) -> re.Pattern[str] | None:
        """Special tokens that the chat template writes around a message, or that end generation."""
        if self._chat_template is None:
            return None
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        around = ""
        with suppress(TokenizerError):  # of a template that wants other messages
            around = self.render_chat([{"role": "user", "content": "0"}], False)
        found = {token for token in special if token in around} | (special & {*self.end_texts})
        return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else None

    def control_token_in(self, messages: Sequence[ChatTurn]) -> str | None:
        """Return the first control token that a message's words spell: in the middle of a text it begins or ends a
        turn. None where there is none."""
        if (tokens := self.control_tokens) is None:
            return None
        texts = (value for message in messages for value in message.values() if isinstance(value, str))
        return next((match[0] for match in map(tokens.search, texts) if match), None)

    def encode_beside(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode` for a long text in a thread: other threads run meanwhile, which `encode` does not allow."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids that the vocabulary does not have (a model may be padded beyond it) decode to nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[ChatTurn], add_generation_prompt: bool = True, /, **variables: Any) -> str:
        """The text of a conversation. `variables` are further template variables: `enable_thinking=False`."""
        if self._chat_template is None:
            raise ChatRefused(
                f"{self._source} has no chat template; add chat_template.jinja to it, or name a file with "
                "model.chat_template",
                "this model has no chat template, so it completes texts only",
            )
        return mended(self._with_template(self._chat_template.render, messages, add_generation_prompt, variables))

    def generations(self, messages: Sequence[ChatTurn], /, **variables: Any) -> tuple[str, list[TextSpan]] | None:
        """Return the text of a conversation with the parts that its chat template marks as the assistant's; None where
        it marks none."""
        if self._chat_template is None:
            return None
        return self._with_template(self._chat_template.generations, messages, False, variables)

    def _with_template(
        self,
        render: Callable[..., T],
        messages: Sequence[ChatTurn],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> T:
        """Return what `render` makes of the messages, with an empty content where there is none, or arguments of tool
        calls in JSON, for a template that counts on these. A developer is a system to a template that does not show
        developers."""
        given = [as_given_to_templates(message) for message in messages]
        if not self._knows_developers:
            given = [each | {"role": "system"} if each.get("role") == "developer" else each for each in given]
        everything = {
            **{"tools": None, "documents": None, **self._special_tokens, **self._chat_template_kwargs, **variables},
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(messages=given, **everything)
        except ChatTemplateError as error:
            for change in _WANTED:
                changed = [change(message) for message in given]
                if changed != given:
                    with suppress(ChatTemplateError):
                        return render(messages=changed, **everything)
            what = f"refuses the messages: {error}"
            raise ChatRefused(f"the chat template of {self._source} {what}", f"the chat template {what}") from error

    def apply_chat_template(
        self, messages: Sequence[ChatTurn], add_generation_prompt: bool = True, /, **variables: Any
    ) -> list[int]:
        """The tokens of a conversation. The template writes the special tokens, so none are added here."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    @property
    def chat_template(self) -> "Tokenizer | None":
        """The tokenizer itself, where the folder has a template."""
        return None if self._chat_template is None else self

    @cached_property
    def _knows_developers(self) -> bool:
        """Return whether the chat template renders a developer's message: some name the role only to say who it is."""
        messages = [{"role": "developer", "content": "trial"}, {"role": "user", "content": "0"}]
        variables = {"tools": None, "documents": None, **self._special_tokens, **self._chat_template_kwargs}
        if self._chat_template is None or "developer" not in self._chat_template.text:
            return False
        with suppress(ChatTemplateError):
            return "trial" in self._chat_template.render(messages=messages, add_generation_prompt=False, **variables)
        return False

    def reads(self, name: str) -> bool:
        """Return whether the chat template reads this variable."""
        return self._chat_template is not None and name in self._chat_template.variables

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self._backend)

    @property
    def chat_format(self) -> ChatFormat:
        """Return the chat format with which a model that was trained with this tokenizer is saved."""
        if self._chat_template is None or not (self._replaces_template or self._chat_template_kwargs):
            return ChatFormat(eos_token_ids=self.eos_token_ids)
        return ChatFormat(with_defaults(self._chat_template, self._chat_template_kwargs), self.eos_token_ids)

    @property
    def end_texts(self) -> list[str]:
        """Texts of the tokens that end generation. Some folders name ids that their vocabulary lacks."""
        return [text for token in self.eos_token_ids if (text := self.decode([token], skip_special_tokens=False))]

    def _end_of_turn(self) -> list[int]:
        """The special token that the chat template writes behind a completion, if there is one."""
        if self._chat_template is None:
            return []
        prompt = [{"role": "user", "content": "0"}]
        try:
            after = after_completion(self, prompt, [], False)
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


def _with_content(message: ChatTurn) -> ChatTurn:
    return {"content": "", **message}


def _with_json(message: ChatTurn) -> ChatTurn:
    """The message with the arguments of its tool calls in JSON."""
    if "tool_calls" not in message:
        return message
    calls: list[Any] = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        written = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
        calls.append({**call, "function": {**function, "arguments": written}} if "function" in call else call)
    return {**message, "tool_calls": calls}


_WANTED: tuple[Callable[[ChatTurn], ChatTurn], ...] = (
    _with_content,
    _with_json,
    lambda message: _with_content(_with_json(message)),
)
"""Changes to a message that some templates want, and fail without."""


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"{path.parent} has no {path.name}; ductile reads tokenizers in that format (save it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        return tokenizers.Tokenizer.from_str(read_text(path))
    except NotText as error:
        raise TokenizerError(str(error)) from error
    except Exception as error:  # the Rust side raises plain Exception
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _refuse_foreign(folder: Path, backend: tokenizers.Tokenizer) -> None:
    """A model may have more embeddings than the tokenizer has tokens (padding), never fewer."""
    text, highest = max(backend.get_vocab(with_added_tokens=True).items(), key=itemgetter(1), default=("", -1))
    model_size = read_object(folder / "config.json").get("vocab_size")
    if isinstance(model_size, int) and highest >= model_size:
        raise TokenizerError(
            f"{folder / 'tokenizer.json'}, with the special tokens of the files beside it, has token ids up to "
            f"{highest} ({text!r}), but vocab_size in config.json is {model_size}; take the tokenizer that belongs to "
            "this model"
        )


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """Chat models often name the end of a turn in one file and the end of a text in another; both end generation."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = read_object(folder / name).get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    found.append(backend.token_to_id(eos_token) if eos_token is not None else None)
    wrong = [value for value in found if value is not None and (isinstance(value, bool) or not isinstance(value, int))]
    if wrong:
        raise TokenizerError(f"{folder}: eos_token_id holds {wrong[0]!r}; it must be an integer or a list of integers")
    # -1 is none, in some configurations
    return list(dict.fromkeys(value for value in found if value is not None and value >= 0))
