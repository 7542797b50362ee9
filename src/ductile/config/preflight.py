"""What must hold between sections, and between the config and the disk, before anything starts.

Pure on the tree, except that it looks at the files which the config names: an hour in a queue should not end with
"no such folder".
"""

from dataclasses import dataclass

from ductile.config.section import Section


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that cannot work. `keys` are the keys that it is about, dotted, the one to change first."""

    keys: tuple[str, ...]
    what: str


def preflight(config: Section) -> list[Finding]:
    return []
