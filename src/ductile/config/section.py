"""The base of every section, and the mark for a key whose feature is not built yet."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the config. Unknown keys are errors; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=False, frozen=True)


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Marks a field that exists so that configs of other systems are understood, but whose feature is not there yet.

    Any value but the default is refused with `what` in the message; it is never ignored. Used as
    `cp: Annotated[int, NotBuilt("context parallelism")] = 1`.
    """

    what: str
