"""Keys that do not exist: which one was meant?"""

from difflib import get_close_matches

from ductile.config.reading.errors import Problem, dotted, flag
from ductile.config.reading.foreign import ours
from ductile.config.reading.key_tree import find, keys, walk
from ductile.config.reading.provenance import COMMAND_LINE, Origin, Path
from ductile.config.schema.section import Section


def unknown_key(root: type[Section], path: Path, origin: Origin, typed: str, value: str | None = None) -> Problem:
    """There is no key `path`; say what there is."""
    for length in range(1, len(path)):
        above = find(root, path[:length])
        if above and not any(key.variants for key in above):
            return Problem(f"does not exist: {flag(path[:length])} is a value, not a table", typed, value, origin, True)
    foreign = None if _beside(root, path) else ours(root, path)
    near = foreign or _nearest(root, path)
    hint = f" Did you mean {(flag if origin == COMMAND_LINE else dotted)(near)}?" if near else ""
    if near and (not_built := find(root, near)[0].not_built) and (foreign or not not_built.only):
        hint += f" {not_built.sentence()}"
    return Problem("does not exist." + hint, typed, value, origin, is_unknown_key=True)


def _beside(root: type[Section], path: Path) -> bool:
    """Return whether the table that was named has a key of almost the same name: a slip, no word of another system."""
    beside = [name for key in find(root, path[:-1]) for variant in key.variants for name in keys(variant)]
    return bool(get_close_matches(str(path[-1]), beside, n=1, cutoff=0.75))


def _nearest(root: type[Section], path: Path) -> Path | None:
    """The key that was probably meant: each word put right where it stands, else one of the same last word."""
    table, *rest = path
    if table not in keys(root) and rest and find(root, tuple(rest)):  # a table of another command is around it
        return tuple(rest)
    right: list[str] = []
    for word in path:
        sections = [variant for key in find(root, tuple(right)) for variant in key.variants] if right else [root]
        names = list(dict.fromkeys(name for section in sections for name in keys(section)))
        close = [str(word)] if word in names else get_close_matches(str(word), names, n=1)
        if not close:
            break
        right.append(close[0])
    if len(right) == len(path):
        return tuple(right)
    everywhere = sorted({known for known, _ in walk(root)}, key=len)
    return next((known for known in everywhere if known[-1] == path[-1]), None)
