"""`--help`: every key of a command, from the field docstrings."""

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ductile.config.reading.errors import did_you_mean, flag, show
from ductile.config.reading.foreign import ours
from ductile.config.reading.key_tree import REQUIRED, Key, keys
from ductile.config.reading.provenance import Path
from ductile.config.schema.section import Section

HOW = """\
Files are TOML, YAML or JSON; they merge from left to right, and flags come last. `--trainer.model @ model.toml`
merges a file below a key. Tables marked "off" are turned on by their bare name and off by --no-name. docs/config.md
says more."""


@dataclass(frozen=True, slots=True)
class KeyHelp:
    """What help and documentation say of one key."""

    path: Path
    wants: str
    default: str
    help: str
    variant: str = ""
    """The `type` that the key belongs to, where its table is a union: "sgd"."""
    not_built: str = ""
    """A sentence on what is not built yet of the key; empty where all of it is built."""
    built: bool = True
    """Whether any value besides the default is accepted."""


def lines(
    section: type[Section], path: Path = (), variant: str = "", not_built: str = "", table: object = None
) -> Iterator[KeyHelp]:
    """One line for each key: first the values of a table, then the tables in it.

    table: the default of the whole table; its values count, where it is of this section, not the section's own.
    """
    for name, key in sorted(keys(section).items(), key=lambda item: bool(item[1].variants)):
        here = (*path, name)
        missing = key.not_built.sentence() if key.not_built else not_built
        if key.not_built and key.not_built.only:
            missing = f"{', '.join(map(str, key.not_built.only))}: {missing[0].lower()}{missing[1:]}"
        built = not not_built and (key.not_built is None or bool(key.not_built.only))
        if not key.variants:
            default: object = getattr(table, name) if isinstance(table, section) else key.default
            yield KeyHelp(here, key.wants, _shown(default), key.help, variant, missing, built)
            continue
        if key.optional:
            default = "off" if key.default is None else "on"
            yield KeyHelp(here, key.wants, default, key.help, variant, missing, built)
        if key.is_union:
            yield from _union(key, here, missing)
        else:
            yield from lines(key.variants[0], here, variant, missing, key.default)


def _union(key: Key, path: Path, not_built: str) -> Iterator[KeyHelp]:
    """First the `type`, then the keys of each variant; a key that is the same in several comes once."""
    about = [
        (tag, " ".join((section.__doc__ or "").split())) for tag, section in zip(key.tags, key.variants, strict=True)
    ]
    marks = [keys(section)["type"].not_built for section in key.variants]
    unbuilt = " ".join(f"{tag}: not built yet." for tag, mark in zip(key.tags, marks, strict=True) if mark)
    wants = "one of " + ", ".join(f'"{tag}"' for tag in key.tags)
    text = " ".join(f"{tag}: {doc}" for tag, doc in about if doc)
    default = f'"{key.default_tag}"' if key.default_tag else "required"
    yield KeyHelp((*path, "type"), wants, default, text, "", not_built or unbuilt, not not_built)
    merged: dict[KeyHelp, list[str]] = {}
    for tag, section, mark in zip(key.tags, key.variants, marks, strict=True):
        for line in lines(section, path, "", mark.sentence() if mark else not_built, key.default):
            if line.path != (*path, "type"):
                merged.setdefault(line, []).append(tag)
    for line, tags in merged.items():
        yield replace(line, variant="" if len(tags) == len(key.variants) else ", ".join(tags))


def _shown(default: object) -> str:
    return "required" if default is REQUIRED else show(default)


def _wrap(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """Lines of at most `width` columns, but for words that are longer: a flag stays in one piece."""
    wrapper = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=later)
    wrapper.break_on_hyphens = wrapper.break_long_words = False
    return wrapper.wrap(text)


def help_text(command: str, summary: str, root: type[Section], only: str = "", *, unbuilt: bool = False) -> str:
    """The keys of a command, or those with `only` in their name or their variant's. Fits the terminal.

    Keys whose feature is not built are there when `unbuilt` asks for them, or when `only` names nothing else.
    """
    width = min(120, shutil.get_terminal_size((100, 24)).columns)
    word = only.lstrip("-").replace("-", "_").lower()
    everything = list(lines(root))
    chosen = [line for line in everything if word in ".".join(map(str, line.path)) or (word and word in line.variant)]
    if not chosen and (key := ours(root, (word,))):
        return help_text(command, summary, root, ".".join(map(str, key)))
    if not chosen:
        near = did_you_mean(word, [".".join(map(str, line.path)) for line in everything])
        return f"ductile {command} has no key with {only} in its name.{near}"
    out = [f"ductile {command}: {summary}", "", f"  ductile {command} [@ file ...] [--key value ...]", ""]
    if not only:
        out += [*_wrap(HOW, width), ""]
    num_left_out = 0
    if not unbuilt and any(line.built for line in chosen):
        num_left_out = sum(not line.built for line in chosen)
        chosen = [line for line in chosen if line.built]
    group: Path | None = None
    for line in chosen:
        if line.path[:-1] != group:
            group = line.path[:-1]
            title = ".".join(map(str, group))
            out += ["", f"[{title}]"] if title else []
        out += _entry(line, width)
    if num_left_out:
        keys_left = "1 key whose feature is" if num_left_out == 1 else f"{num_left_out} keys whose features are"
        left_out = f"{keys_left} not built yet {'is' if num_left_out == 1 else 'are'} left out."
        shown_by = f"ductile {command} --help-all {only}".rstrip()
        out += ["", *_wrap(f"{left_out} {shown_by} shows them.", width)]
    return "\n".join(out)


def _entry(line: KeyHelp, width: int) -> list[str]:
    variant = f"  ({line.variant})" if line.variant else ""
    head = f"  {flag(line.path)}  {line.wants}; {_said(line.default)}{variant}"
    body = " ".join(part for part in (line.help, line.not_built) if part)
    return [
        *_wrap(head, width, later=" " * 6),
        *_wrap(body, width, first=" " * 6, later=" " * 6),
    ]


def _said(default: str) -> str:
    return default if default in ("required", "on", "off") else f"default {default}"
