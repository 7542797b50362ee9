"""The versions that a trainer publishes: which its weights are, which are kept for others, and for how long."""

from collections.abc import Awaitable, Callable, Collection, Generator
from contextlib import contextmanager
from typing import Literal

from ductile.concurrency.change_signal import ChangeSignal
from ductile.fleet.trainer.kept_versions import KeptVersions
from ductile.messages.workers import Done, Withdraw
from ductile.records import Manifest
from ductile.roles import Refused
from ductile.transport.fanout import ask_each
from ductile.transport.mailbox import Mailbox

VersionReceivers = Literal["slots", "servers", "both"]
"""Receivers of each version: slots of the run, for which the ranks make a snapshot that is read while training goes on,
or servers, to which they send it, so that the next optimizer step waits until it is withdrawn."""


class PublishedVersions:
    """Knows no turns: what asks the ranks is called by `RemoteTrainer` at a boundary."""

    def __init__(
        self,
        mailbox: Mailbox,
        receivers: VersionReceivers,
        publish: Callable[[int, bool], Awaitable[tuple[Manifest | None, int]]],
        changed: ChangeSignal,
    ) -> None:
        """publish: has the ranks publish a version, whole or what is trained of it; returns its manifest, and the slot
        that has the snapshot. changed: notified of what others may wait for."""
        self._of_weights: set[int] = set()
        """Versions that the weights still are: several, where steps had nothing to learn."""
        self.newest = -1
        """Newest version that the weights have ever been."""
        self._mailbox, self._publish, self._changed = mailbox, publish, changed
        self._receivers: VersionReceivers = receivers
        self._num_sending = 0
        """Blocks of `sending` under way."""
        self._kept = KeptVersions(mailbox)
        self._wants_whole = True
        """Somebody waits for the next version who has none, and so lacks what training does not change."""

    @property
    def current(self) -> int | None:
        """Latest version that the weights still are; None before the first, and once the weights have changed."""
        return max(self._of_weights, default=None)

    def are(self, version: int) -> bool:
        """Return whether the weights still are this version."""
        return version in self._of_weights

    @property
    def slots(self) -> frozenset[int]:
        """Slots that keep a snapshot which is not withdrawn yet."""
        return self._kept.slots

    @property
    def may_change(self) -> bool:
        """True when nobody is sent the weights: the next optimizer step may change them."""
        is_published = self._receivers != "slots" and not self._of_weights.isdisjoint(self._kept.versions)
        return not (self._num_sending or is_published)

    def weights_are(self, version: int) -> None:
        self._of_weights.add(version)
        self.newest = max(version, self.newest)
        self._changed.notify_all()  # the slots may be about to lend their devices

    def end_current(self) -> None:
        """The weights are about to be none of the versions."""
        self._of_weights.clear()

    def is_newest(self, version: int) -> bool:
        """Return whether no later version is published, or about to be."""
        return version >= max(self._kept.newest, self.current or 0)

    def check_current(self, version: int) -> None:
        """Raise Refused where the weights are another version by now."""
        if not self.are(version):
            raise Refused(f"the trainer has gone on from version {version}, and cannot offer it")

    def want_whole(self) -> None:
        """Publish the next version with what training does not change."""
        self._wants_whole = True

    def has_whole(self, version: int) -> bool:
        """Return whether all of the version is published."""
        return self._kept.has(version, whole=True)

    def use_whole(self, version: int) -> Manifest | None:
        """Return all of the version for one user more; None where it is not published."""
        return self._kept.use(version, whole=True)

    async def publish(self, version: int) -> Manifest:
        """Publish what is trained of a version, or all of it where somebody wants that."""
        self.weights_are(version)
        whole = self._wants_whole
        manifest = await self.keep(version, whole)
        if whole:  # who wants it meanwhile gets this one
            self._wants_whole = False
        return manifest

    async def keep(self, version: int, whole: bool = True) -> Manifest:
        """Publish a version, or what is published of it for one user more."""
        if manifest := self._kept.use(version, whole):
            return manifest
        if self._receivers == "servers":
            return self._kept.keep(version, Manifest(version, "none", "", 0, 0, ()), slot=None)
        manifest, slot = await self._publish(version, whole)
        if manifest is None:
            raise Refused(f"{self._mailbox.describe(slot)} published version {version} without a manifest")
        return self._kept.keep(version, manifest, slot=slot)

    async def withdraw(self, version: int, train_slots: Collection[int], deadline_s: float) -> None:
        """Note that a user is through with a version; after the last one, have the slots keep neither it nor older
        ones. train_slots: those of the trainer. Raises a Failure."""
        if not self._kept.end_use(version):
            return
        # A slot that has left the trainer may be gone by now, and with it what it kept.
        asked = self._kept.slots_until(version).difference(set(self._mailbox.lost).difference(train_slots))
        await ask_each(self._mailbox, dict.fromkeys(asked, Withdraw(version)), deadline_s, Done)
        self._kept.forget_until(version)
        self._changed.notify_all()

    @contextmanager
    def sending(self, version: int) -> Generator[None]:
        """Have the weights stay meanwhile, as others are sent them. Raises Refused once training has gone on."""
        self.check_current(version)
        self._num_sending += 1
        try:
            yield
        finally:
            self._num_sending -= 1
            self._changed.notify_all()
