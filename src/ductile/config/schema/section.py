"""The base of every section, and the mark for a key whose feature is not built yet."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator


class Section(BaseModel):
    """A table of the config. Unknown keys are errors; the docstring under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=False,
        frozen=True,
        allow_inf_nan=False,  # a deadline of `inf` would be a wait without an end
        protected_namespaces=(),
    )

    @model_validator(mode="wrap")
    @classmethod
    def _tables_keep_their_defaults(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """A table whose default differs from its section's own (evaluation is greedy, SFT has a learning rate of its
        own) keeps what is not written: one key never changes another's default."""
        if not isinstance(given, dict):
            return validate(given)
        table = cast(dict[str, Any], given)
        defaults = {name: cls.model_fields[name].default for name in table.keys() & cls.model_fields.keys()}
        filled = {
            name: _filled(table[name], default) for name, default in defaults.items() if isinstance(default, Section)
        }
        section = validate(table | filled)
        for name, whole in filled.items():
            inner = cast(object, getattr(section, name))
            if isinstance(inner, Section) and isinstance(table[name], dict):  # else as it was given
                inner.model_fields_set.difference_update(whole.keys() - cast(dict[str, Any], table[name]).keys())
        return section


def _filled(table: Any, default: Section) -> Any:
    """The table with the values that its default sets; those of another variant are not for it."""
    if not isinstance(table, dict):
        return cast(object, table)
    given = cast(dict[str, Any], table)
    variant = default.model_dump().get("type")
    if given.get("type", variant) != variant:
        return given
    return default.model_dump(include=default.model_fields_set) | given


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Marks a text that names something on disk: `~` is expanded in it, and variables are refused."""

    kind: Literal["path", "code"]
    """path: a file or a folder; code: `package.module.name`, or `file.py:name`."""


FilePath = Annotated[str, OnDisk("path")]
ImportPath = Annotated[str, OnDisk("code")]


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Marks a field that exists so that configs of other systems are understood, but whose feature is not there yet.

    Any value but the default is refused with `what` in the message; it is never ignored. Used as
    `ep: Annotated[int, NotBuilt("expert parallelism")] = 1`.
    """

    what: str
    only: tuple[object, ...] = ()
    """The values that are refused; empty: every value but the default."""
    instead: str = ""
    """What to write, or what happens, instead: a sentence."""

    def refuses(self, value: object, default: object) -> bool:
        if self.only:
            return value in self.only
        return value != default

    def sentence(self) -> str:
        return f"Not built yet: {self.what}." + (f" {self.instead}" if self.instead else "")
