"""Scripts for sbatch, rendered by Jinja2: the templates that come with ductile, or one of the user's own."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined, TemplateError, TemplateSyntaxError

from ductile.config.checks.deployment import SBATCH_S_OWN, fits_directive
from ductile.user_files import NotText, read_text

TEMPLATES = Path(__file__).with_name("templates")
MARK = "# Rendered by ductile from "
"""How the second line of every script begins: one without it is not ours to replace."""
SUFFIX = ".sbatch.j2"


class BadTemplate(Exception):
    """A template cannot be rendered. The text says which, why and where."""


def render(template: Path, values: Mapping[str, object]) -> str:
    """Return the script. A template may include the fragments of ours (`_directives.j2`), and files beside it.

    Raises BadTemplate.
    """
    environment = Environment(
        loader=FunctionLoader(lambda name: _text_of(name, (template.parent, TEMPLATES))),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the result is a shell script: values go through `quote`
    )
    environment.filters |= {"quote": lambda value: shlex.quote(str(value)), "directive": directive}
    try:
        text = environment.get_template(template.name).render(values)
    except TemplateSyntaxError as error:
        raise BadTemplate(f"{error.name or template}, line {error.lineno}: {error.message}") from error
    except TemplateError as error:
        raise BadTemplate(f"{template}: {error.message}") from error
    except NotText as error:
        raise BadTemplate(str(error)) from error
    first, _, rest = text.partition("\n")
    if not first.startswith("#!"):
        raise BadTemplate(f"{template}: the first line of a script must be #!/bin/bash, and is {first!r}")
    return f"{first}\n{MARK}{template.name}, and written anew by each launch.\n{rest}"


def _text_of(name: str, folders: Sequence[Path]) -> str | None:
    return next((read_text(folder / name) for folder in folders if (folder / name).is_file()), None)


def directive(value: object) -> str:
    """Return a value as sbatch reads it in an `#SBATCH` line.

    Raises BadTemplate for one that would end the line or its own quotes.
    """
    text = str(value)
    if not fits_directive(text):
        raise BadTemplate(f"{text!r} cannot stand in a line that sbatch reads: write it without {SBATCH_S_OWN}")
    return text if set(text).isdisjoint(" \t#") else f'"{text}"'
