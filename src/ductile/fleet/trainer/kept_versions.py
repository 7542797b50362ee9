"""Published versions, until all who get them are through. A slot of the trainer keeps a snapshot of each for those who
fetch it; of one that the trainer sends there is none. Of a version there may be two: one of what is trained, for those
who have the rest, and a whole one."""

from collections.abc import Collection
from dataclasses import dataclass

from ductile.records import Manifest
from ductile.transport.mailbox import Mailbox


@dataclass(slots=True)
class _Kept:
    """A version that is not withdrawn yet."""

    snapshots: list[tuple[Manifest, int | None]]
    """Manifests, each with the slot that has the snapshot; None where there is none."""
    num_users: int = 1
    """Users that got the version and have not withdrawn it yet; each withdraws it once."""


class KeptVersions:
    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._kept: dict[int, _Kept] = {}

    @property
    def versions(self) -> Collection[int]:
        """Versions that are not withdrawn yet."""
        return self._kept.keys()

    @property
    def newest(self) -> int:
        """The newest of them; 0 where there is none."""
        return max(self._kept, default=0)

    @property
    def slots(self) -> frozenset[int]:
        """Slots that keep a snapshot."""
        return frozenset(slot for kept in self._kept.values() for _, slot in kept.snapshots if slot is not None)

    def has(self, version: int, whole: bool = False) -> bool:
        """Return False when it is not published, is just being withdrawn, or its slot is lost. whole: it must have what
        training does not change, too."""
        return self._usable(version, whole) is not None

    def keep(self, version: int, manifest: Manifest, slot: int | None) -> Manifest:
        """Note a version that is published from now on, and has its first user; or that there is another snapshot of
        one, and one user more. slot: has the snapshot; None where there is none."""
        if self.has(version):
            kept = self._kept[version]
            kept.snapshots.append((manifest, slot))
            kept.num_users += 1
        else:
            self._kept[version] = _Kept([(manifest, slot)])
        return manifest

    def use(self, version: int, whole: bool = False) -> Manifest | None:
        """Return the version for one user more; None where `has` is false."""
        if manifest := self._usable(version, whole):
            self._kept[version].num_users += 1
        return manifest

    def end_use(self, version: int) -> bool:
        """Note that a user has withdrawn the version. Returns whether it was the last one."""
        if (kept := self._kept.get(version)) is not None:
            kept.num_users -= 1
        return kept is None or not kept.num_users

    def slots_until(self, version: int) -> set[int]:
        """Return the slots that keep a snapshot of this version or of older ones."""
        older = [kept for old, kept in self._kept.items() if old <= version]
        return {slot for kept in older for _, slot in kept.snapshots if slot is not None}

    def forget_until(self, version: int) -> None:
        """Keep this version and older ones no more."""
        self._kept = {later: kept for later, kept in self._kept.items() if later > version}

    def _usable(self, version: int, whole: bool) -> Manifest | None:
        kept = self._kept.get(version)
        if kept is None or kept.num_users < 1:
            return None
        there = (manifest for manifest, slot in kept.snapshots if slot not in self._mailbox.lost)
        return next((manifest for manifest in there if manifest.is_whole or not whole), None)
