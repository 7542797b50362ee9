"""Chat templates as model folders have them: Jinja, in a sandbox, with the few extras that their authors count on."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ductile.error_text import error_text


class ChatTemplateError(Exception):
    """A template that does not parse, or that refuses its messages (`raise_exception`)."""


OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Two of the characters that Unicode keeps for a program's own use: no text has them."""

TextSpan = tuple[int, int]
"""Characters of a text: the first, and the one behind the last."""


class GenerationTag(Extension):
    """The tag `{% generation %}` around an assistant's words, which leaves them as they are."""

    tags = {"generation"}  # noqa: RUF012 (how Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(self.around(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=line)

    def around(self, words: list[nodes.Node]) -> list[nodes.Node]:
        return words


class MarkingTag(GenerationTag):
    """The same tag, which writes OPEN and CLOSE around the words."""

    def around(self, words: list[nodes.Node]) -> list[nodes.Node]:
        return [nodes.Output([nodes.TemplateData(OPEN)]), *words, nodes.Output([nodes.TemplateData(CLOSE)])]


class ChatTemplate:
    def __init__(self, text: str, with_tools: "ChatTemplate | None" = None) -> None:
        """with_tools: template of conversations with tools, where that is another."""
        self.text, self.with_tools = text, with_tools
        self.dates: dict[str, str] = {}
        """Dates and times that it has written, as they were at first, by their formats."""
        self._template = self._parsed(GenerationTag)
        self._marking = self._parsed(MarkingTag) if _GENERATION.search(text) else None

    def render(self, /, **variables: Any) -> str:
        return _render(self._of(variables)._template, variables)

    @cached_property
    def variables(self) -> set[str]:
        """Names of the variables that the template reads."""
        found = meta.find_undeclared_variables(self._environment(GenerationTag).parse(self.text))
        return found | (self.with_tools.variables if self.with_tools else set())

    def generations(self, /, **variables: Any) -> tuple[str, list[TextSpan]] | None:
        """Return the text and those parts of it that the template says are generated; None where it never says so.

        The text is the rendered one, but where the template goes on to work with what the tag is around.
        """
        marking = self._of(variables)._marking
        if marking is None:
            return None
        text, spans, start = "", list[TextSpan](), 0
        for piece in re.split(f"([{OPEN}{CLOSE}])", _render(marking, variables)):
            if piece == OPEN:
                start = len(text)
            elif piece == CLOSE:
                spans.append((start, len(text)))
            else:
                text += piece
        return text, spans

    def _of(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        return self.with_tools if self.with_tools and variables.get("tools") is not None else self

    def _environment(self, tag: type[GenerationTag]) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[tag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._strftime_now
        return environment

    def _parsed(self, tag: type[GenerationTag]) -> Template:
        try:
            return self._environment(tag).from_string(self.text)
        except TemplateError as error:
            raise ChatTemplateError(str(error)) from error

    def _strftime_now(self, format: str) -> str:
        written = datetime.now().strftime(format)
        self.dates.setdefault(format, written)
        return written


_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


def _render(template: Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(**variables)
    except ChatTemplateError:
        raise
    except Exception as error:  # a template is a program: messages of the wrong shape make it fail in any way
        raise ChatTemplateError(error_text(error)) from error


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
