"""What is wrong with a config, in words: everything at once, each with its key, its value and where it came from."""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ductile.config.reading.provenance import COMMAND_LINE, DEFAULT, NOWHERE, Origin, Path
from ductile.config.schema.secrets import SECRETS, without_userinfo
from ductile.config.schema.section import Section


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to put right."""

    what: str
    """What is wrong and what to write instead. The sentence goes on after its subject, the key."""
    key: str = ""
    """Key in its flag spelling; empty for a problem with a file or with the command line itself."""
    value: str | None = None
    origin: Origin = NOWHERE
    is_unknown_key: bool = False
    """Whether the command has no such key; several such problems may mean that the config is another command's."""

    @property
    def head(self) -> str:
        """The key, its value and where it stands."""
        value = "" if self.value is None else f" = {self.value}"
        place = "" if self.origin in (NOWHERE, DEFAULT) and self.value is None else f" ({self.origin})"
        return self.key + value + place

    def __str__(self) -> str:
        return f"{self.head}\n    {self.what}"


class ConfigError(Exception):
    """A config that cannot be run. `str()` is the whole message, ready to print: file by file, line by line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_reading_order))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        groups = groupby(self.problems, key=lambda problem: problem.head)
        texts = ["\n    ".join([head, *(problem.what for problem in group)]) for head, group in groups]
        super().__init__(f"{count} with the configuration\n\n" + "\n".join(texts))


def _reading_order(problem: Problem) -> tuple[bool, int, int]:
    """Sort key: problems of files in the order in which they were given, then of flags, last of values by default."""
    return problem.origin.layer < 0, problem.origin.layer, problem.origin.line or 0


def flag(path: Path) -> str:
    """`("trainer", "max_steps")` as the user types it: `--trainer.max-steps`."""
    return "--" + ".".join(str(part).replace("_", "-") for part in path)


def dotted(path: Path) -> str:
    """`trainer.max_steps`, as it is written in a file."""
    return ".".join(str(part) for part in path)


def show(value: object, path: Path = ()) -> str:
    """A value as a TOML file would have it, at most 80 characters of it."""
    if path and path[-1] in SECRETS:
        return "***"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    text = without_userinfo("None" if value is None else json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 80 else text[:77] + "..."


def about(path: Path, value: object, origin: Origin, what: str) -> Problem:
    """A problem with the value at `path`."""
    if isinstance(value, str) and origin == COMMAND_LINE and path[-1] not in SECRETS:
        return Problem(what, flag(path), without_userinfo(value) or '""', origin)
    return Problem(what, flag(path), show(value, path), origin)


def did_you_mean(word: str, known: Iterable[str], ask: str = " Did you mean {}?") -> str:
    """A suggestion that names the most similar of `known`, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return ask.format(close[0]) if close else ""


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
