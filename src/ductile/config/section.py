"""The base of every section, and the mark for a key whose feature is not built yet."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


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


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Marks a field that exists so that configs of other systems are understood, but whose feature is not there yet.

    Any value but the default is refused with `what` in the message; it is never ignored. Used as
    `cp: Annotated[int, NotBuilt("context parallelism")] = 1`.
    """

    what: str
    only: tuple[object, ...] = ()
    """Refuse just these values; empty: everything but the default."""
    instead: str = ""
    """What to write, or what happens, instead: a sentence."""

    def refuses(self, value: object, default: object) -> bool:
        if self.only:
            return value in self.only
        return value != default

    def sentence(self) -> str:
        return f"Not built yet: {self.what}." + (f" {self.instead}" if self.instead else "")
