"""Chat templates as model folders have them: Jinja, in a sandbox, with the few extras that their authors count on."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ductile.error_text import error_text


class ChatTemplateError(Exception):
    """A template that does not parse, or that refuses its messages (`raise_exception`)."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for others; here it leaves them as they are."""

    tags = {"generation"}  # noqa: RUF012 (how Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    def __init__(self, text: str) -> None:
        self.text = text
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ChatTemplateError(str(error)) from error

    def render(self, **variables: Any) -> str:
        try:
            return self._template.render(**variables)
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
