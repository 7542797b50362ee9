"""The tree of keys, read off the section classes: what help, flags, checks and documentation all walk over."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ductile.config.reading.provenance import Path
from ductile.config.schema.section import NotBuilt, OnDisk, Section

FieldKind = Literal["table", "dict", "list", "bool", "value"]
REQUIRED: Any = object()
"""Stands for the default of a key that has none."""


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a section."""

    name: str
    shape: FieldKind
    wants: str
    """What may be written, in words: "a whole number of at least 1"."""
    default: Any
    help: str
    optional: bool
    """Whether "None" is a value of the key."""
    variants: tuple[type[Section], ...] = ()
    """The section that a table holds, or those that its `type` chooses from; empty for a key that is no table."""
    choices: tuple[object, ...] = ()
    """Values that the key's `Literal` type, or that of a list's items, lists; empty where it has none."""
    has_bool: bool = False
    is_text: bool = False
    on_disk: bool = False
    """True where the text, or each text of a list, names something on disk."""
    not_built: NotBuilt | None = None

    @property
    def is_union(self) -> bool:
        return len(self.variants) > 1

    def variant(self, tag: object) -> type[Section] | None:
        """The section that `type = tag` means."""
        for section in self.variants:
            if tag in keys(section)["type"].choices:
                return section
        return None

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(str(keys(section)["type"].choices[0]) for section in self.variants)

    @property
    def default_tag(self) -> str | None:
        """The `type` of the default, which a table without a `type` of its own takes."""
        return next(
            (tag for tag in self.tags if self.is_union and isinstance(self.default, self.variant(tag) or ())), None
        )


@cache
def keys(section: type[Section]) -> dict[str, Key]:
    """The keys of a section, in the order in which they are written down."""
    return {name: _key(name, info) for name, info in section.model_fields.items()}


def find(root: type[Section], path: Path) -> list[Key]:
    """The keys that `path` may mean: one for each variant of a union that has it. Empty: there is none."""
    sections: Sequence[type[Section]] = (root,)
    found: list[Key] = []
    for part in path:
        found = [keys(section)[str(part)] for section in sections if str(part) in keys(section)]
        sections = [variant for key in found for variant in key.variants]
    return found


def value_at(section: Section, path: Path) -> object:
    """The value of a config at `path`; None where a table on the way is turned off, or is another variant."""
    value: object = section
    for part in path:
        known = isinstance(value, Section) and str(part) in type(value).model_fields
        value = getattr(value, str(part)) if known else None
    return value


def walk(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Key]]:
    """Every key below `section`, tables before what is in them; of a union, the keys of one variant after another."""
    for name, key in keys(section).items():
        yield (*path, name), key
        for variant in key.variants:
            yield from walk(variant, (*path, name))


def _key(name: str, info: FieldInfo) -> Key:
    marks = dict(_options(info.annotation, info.metadata))
    options = [option for option in marks if option is not type(None)]
    optional = type(None) in marks
    sections = tuple(option for option in options if isinstance(option, type) and issubclass(option, Section))
    items = [get_args(option)[0] for option in options if get_origin(option) is list]
    literals = [option for option in [*options, *items] if get_origin(option) is Literal]
    not_built = [mark for own in marks.values() for mark in own if isinstance(mark, NotBuilt)]
    wants = "a table" if sections else " or ".join(_one(option, marks[option]) for option in options)
    return Key(
        name=name,
        shape=_shape(options, sections),
        wants=wants + (' or "None"' if optional else ""),
        default=REQUIRED if info.is_required() else info.get_default(call_default_factory=True),
        help=" ".join((info.description or "").split()),
        optional=optional,
        variants=sections,
        choices=tuple(choice for literal in literals for choice in get_args(literal)),
        has_bool=bool in options,
        is_text=str in options,
        on_disk=any(isinstance(mark, OnDisk) for option in marks for mark in [*marks[option], *_inner_marks(option)]),
        not_built=not_built[0] if not_built else None,
    )


def _options(annotation: Any, marks: Sequence[Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The types that an annotation joins, each with its marks: A, B, None of `Annotated[A | B, ...] | None`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _options(inner[0], [*marks, *inner[1:]])
    elif origin is Union or origin is types.UnionType:
        for option in inner:
            yield from _options(option, marks)
    else:
        yield annotation, marks


def _inner_marks(option: Any) -> Iterator[Any]:
    """Marks of a list's items."""
    for inner in get_args(option) if get_origin(option) is list else ():
        for _, marks in _options(inner, ()):
            yield from marks


def _shape(options: list[Any], sections: tuple[type[Section], ...]) -> FieldKind:
    if sections:
        return "table"
    origins = {get_origin(option) or option for option in options}
    if dict in origins:
        return "dict"
    if list in origins:
        return "list"
    return "bool" if origins == {bool} else "value"


def _one(option: Any, marks: Sequence[Any]) -> str:
    """What one type takes, in words."""
    origin, inner = get_origin(option), get_args(option)
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(f'"{choice}"' for choice in inner)
    if origin is list:
        return _list_of(next(item for item, _ in _options(inner[0], ())), marks)
    if origin is dict:
        return "a table of names and values"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words.get(option, "a value") + (_bounds(marks) if option in (int, float) else "")


def _list_of(item: Any, marks: Sequence[Any]) -> str:
    """What a list takes, in words."""
    needs_one = any(getattr(mark, "min_length", 0) for mark in marks)
    if get_origin(item) is Literal:
        choices = ", ".join(f'"{choice}"' for choice in get_args(item))
        return f"a list of {'one or more' if needs_one else 'any'} of {choices}"
    kind = {str: "texts", int: "whole numbers", float: "numbers"}.get(item, "values")
    if isinstance(item, type) and issubclass(item, Section):
        kind = "tables"
    return f"a list of {kind}" + (", at least one" if needs_one else "")


def _bounds(marks: Sequence[Any]) -> str:
    kinds = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
    both = " and ".join(
        f"{words} {getattr(mark, kind)}" for kind, words in kinds for mark in marks if hasattr(mark, kind)
    )
    return f" of {both}" if both else ""
