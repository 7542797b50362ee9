"""Turns the words on a command line into one validated, immutable config.

    read (files < nested files < flags) -> rename -> share -> fit -> judge

Every stage collects problems instead of stopping at the first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from ductile.config.checks.preflight import warnings
from ductile.config.reading.derive import derive
from ductile.config.reading.errors import ConfigError, Problem, dotted, flag, show
from ductile.config.reading.fit import fit
from ductile.config.reading.flags import read
from ductile.config.reading.judge import judge
from ductile.config.reading.key_tree import find, value_at
from ductile.config.reading.provenance import DEFAULT
from ductile.config.reading.share import Sharing, share
from ductile.config.schema.section import Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[S]):
    config: S
    notices: tuple[str, ...]
    files: tuple[str, ...]
    derived: tuple[str, ...]
    """A sentence for each value that the user did not write and that is not a default."""


def parse(root: type[S], argv: Sequence[str], writes: bool = True, across: bool = True) -> Parsed[S]:
    """The config that `argv` (the words after the command) describes.

    Args:
        writes: the command writes into `output_dir`.
        across: what holds between sections is judged, and the files that they name; else each value by itself.

    Raises:
        ConfigError: with every problem that was found.
    """
    given = read(root, argv)
    sharing = share(root, given.draft)
    fitted = fit(root, sharing.draft)
    config, problems, followed = judge(root, fitted, sharing.draft, writes, across)
    problems = [*given.problems, *sharing.problems, *_at_their_source(problems, sharing)]
    if not given.all_read:
        problems = [problem for problem in problems if problem.value is not None or problem.origin != DEFAULT]
    if problems or config is None:
        raise ConfigError(problems)
    config, derived = derive(cast(S, config))
    notices = (*given.notices, *fitted.notices, *(warnings(config) if across else ()))
    followed = (*_shared(config, sharing), *followed, *derived)
    return Parsed(config, notices, tuple(given.files), followed)


def _at_their_source(problems: list[Problem], sharing: Sharing) -> list[Problem]:
    """A wrong shared value is wrong wherever it went: say it once, of the key that the user wrote."""
    known = {problem.key for problem in problems}
    moved = [(problem, _written(problem.key, sharing)) for problem in problems]
    return list(
        dict.fromkeys(replace(problem, key=key) for problem, key in moved if key == problem.key or key not in known)
    )


def _written(key: str, sharing: Sharing) -> str:
    """The key, or an item of it ("stop.1"), as the user wrote it."""
    for target, source in sharing.filled.items():
        if key == flag(target) or key.startswith(f"{flag(target)}."):
            return flag(source) + key.removeprefix(flag(target))
    return key


def _shared(config: Section, sharing: Sharing) -> Iterator[str]:
    """A sentence for each value that came from a shared key and is not the default anyhow, or replaced another."""
    for target, source in sharing.filled.items():
        value = value_at(config, target)
        old = sharing.replaced.get(target)
        if old is not None or all(value != key.default for key in find(type(config), target)):
            instead = f", instead of {show(old[0])} ({old[1]})" if old else ""
            yield f"{dotted(target)} = {show(value)}: from {dotted(source)} ({sharing.draft.origin(source)}){instead}"
    for target in sharing.replaced.keys() - sharing.filled.keys():
        value, origin = sharing.replaced[target]
        yield f"{dotted(target)} = {show(value)} ({origin}) is left out, as the shared key is set back"
