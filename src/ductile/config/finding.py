"""What a check across sections finds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that cannot work."""

    keys: tuple[str, ...]
    """The keys that it is about, dotted; first the one to change."""
    what: str
    """What is wrong and what to write instead. The sentence goes on after its subject, the first key."""
