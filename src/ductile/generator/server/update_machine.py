"""Weight updates as one server goes through them. No clock, no tensors, no sockets: what comes in is a message, what
goes out is what to do, or why not.

    prepared → receiving → staged → verified → committed        or, from each but the last: aborted, failed

The fence: a message is of the update that is under way and of an epoch that nothing newer has been seen of, or it is
refused. Whatever is said twice changes nothing the second time, and gets the same reply.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ductile.messages.updates import (
    Bucket,
    Digest,
    EndUpdate,
    PrepareUpdate,
    UpdatePhase,
    UpdateProgress,
    UpdateProof,
)

UNDER_WAY: frozenset[UpdatePhase] = frozenset({"prepared", "receiving", "staged", "verified"})
REMEMBERED = 64
"""Updates that are over, and still are answered for."""


class Fenced(Exception):
    """The message comes too late, or too early: it is of another update or epoch, or of a phase that is over."""


class Unusable(Exception):
    """The message does not fit: another model, or a bucket that nobody has announced."""


@dataclass(slots=True)
class Update:
    """An update that the server has been told of."""

    update_id: str
    epoch: int
    version: int
    verify: UpdateProof
    bucket_timeout_s: float
    buckets: Mapping[tuple[str, int], Bucket]
    """Buckets that are expected, by sender and index."""
    most_bucket_bytes: int
    """Bytes of the largest of them."""
    phase: UpdatePhase = "prepared"
    loaded: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    digest: Digest = ""
    reason: str = ""

    @property
    def under_way(self) -> bool:
        return self.phase in UNDER_WAY

    def progress(self) -> UpdateProgress:
        return UpdateProgress(self.update_id, self.phase, len(self.loaded), self.digest, self.reason)


class UpdateMachine:
    """The update that is under way, those before it, and the newest epoch that anybody has spoken of."""

    def __init__(self) -> None:
        self.epoch = 0
        self.last: Update | None = None
        self._over: dict[str, UpdateProgress] = {}

    def see(self, epoch: int) -> None:
        """Note an epoch. Raises `Fenced` for one that is older than the newest."""
        if epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is over: this server has seen epoch {self.epoch}")
        self.epoch = epoch

    def prepare(self, message: PrepareUpdate) -> Update | None:
        """Begin an update, and return it; None where it was begun, or ended, before. An older one that is under way is
        aborted when this one's epoch is newer. Raises `Fenced`, `Unusable`."""
        update = message.update
        if self.progress(update.update_id) is not None:
            if self.last is not None and self.last.update_id == update.update_id and self.last.epoch != update.epoch:
                raise Fenced(f"update {update.update_id} is of epoch {self.last.epoch}, and not of {update.epoch}")
            return None
        last = self.last
        if last is not None and last.under_way and last.epoch >= update.epoch:
            raise Fenced(f"update {last.update_id} of epoch {last.epoch} is under way: it is {last.phase}")
        self.see(update.epoch)
        if not 0 <= update.version < 2**31:
            raise Unusable(f"version {update.version} is not a number of 31 bits")
        buckets = {(offer.sender, bucket.index): bucket for offer in message.offers for bucket in offer.buckets}
        if len(buckets) != sum(len(offer.buckets) for offer in message.offers):
            raise Unusable("two offers have the same sender, or two buckets of one the same index")
        if last is not None and last.under_way:
            self.end("aborted", f"update {update.update_id} of epoch {update.epoch} came in its place")
        self._remember()
        self.last = Update(
            update.update_id,
            update.epoch,
            update.version,
            update.verify,
            update.bucket_timeout_s,
            buckets,
            max((bucket.num_bytes for bucket in buckets.values()), default=0),
        )
        if not buckets:
            self.last.phase = "staged"
        return self.last

    def expects(self, update_id: str, epoch: int, sender: str, index: int) -> Bucket | None:
        """Return the bucket that is to be loaded; None where it has been. Raises `Fenced`, `Unusable`."""
        update = self._current(update_id, epoch)
        bucket = update.buckets.get((sender, index))
        if bucket is None:
            raise Unusable(f"no bucket {index} of {sender[:80]!r} belongs to update {update_id}")
        if (sender, index) in update.loaded:
            return None
        if update.phase not in ("prepared", "receiving"):
            raise Fenced(f"update {update_id} is {update.phase}, and takes no more buckets")
        return bucket

    def loaded(self, update: Update, sender: str, index: int) -> None:
        if not update.under_way:
            raise Fenced(f"update {update.update_id} is {update.phase}")
        update.loaded.add((sender, index))
        update.phase = "staged" if len(update.loaded) == len(update.buckets) else "receiving"

    def check_end(self, message: EndUpdate) -> Update:
        """Return the update that a verify or a commit is of. Raises `Fenced`."""
        update = self._current(message.update_id, message.epoch)
        if message.version not in (0, update.version):
            raise Fenced(f"update {update.update_id} is of version {update.version}, and not of {message.version}")
        return update

    def verified(self, update: Update, found: Digest, wanted: Digest) -> None:
        """Note the digest `found` of what is staged; "" where nobody has asked for it."""
        update.digest = found or wanted
        if found and wanted and found != wanted:
            self.end("failed", f"what was staged of version {update.version} has digest {found}, and not {wanted}")
        elif update.phase == "staged":
            update.phase = "verified"

    def may_commit(self, message: EndUpdate) -> Update | None:
        """Return the update that is to be committed; None where it is over, one way or the other. Raises `Fenced`."""
        update = self.check_end(message)
        if not update.under_way:
            return None
        if update.phase != "verified" and (update.phase, update.verify) != ("staged", "none"):
            raise Fenced(f"update {update.update_id} is {update.phase}, and can be committed once it is verified")
        if message.digest and update.digest and message.digest != update.digest:
            self.end("failed", f"version {update.version} was staged with digest {update.digest}, not {message.digest}")
            return None
        update.digest = update.digest or message.digest
        return update

    def end(self, phase: UpdatePhase, reason: str = "") -> None:
        """Have the update that is under way committed, aborted or failed."""
        if self.last is not None and self.last.under_way:
            self.last.phase, self.last.reason = phase, reason

    def abort(self, message: EndUpdate) -> UpdateProgress:
        """Abort an update. One that is over stays what it is. One that nobody has heard of is over before it has
        begun."""
        update_id = message.update_id
        if self.last is not None and self.last.update_id == update_id:
            self.end("aborted", "it was aborted")
        elif update_id not in self._over:
            self._over[update_id] = UpdateProgress(update_id, "aborted", reason="it was aborted before it began")
            self._trim()
        progress = self.progress(update_id)
        assert progress is not None
        return progress

    def progress(self, update_id: str) -> UpdateProgress | None:
        """Return how far an update is, or how it ended. None: nobody has spoken of it."""
        if self.last is not None and self.last.update_id == update_id:
            return self.last.progress()
        return self._over.get(update_id)

    def _current(self, update_id: str, epoch: int) -> Update:
        if self.last is None or self.last.update_id != update_id:
            known = self._over.get(update_id)
            raise Fenced(f"update {update_id[:80]} {f'was {known.phase}' if known else 'was never prepared here'}")
        if self.last.epoch != epoch:
            raise Fenced(f"update {update_id} is of epoch {self.last.epoch}, and not of {epoch}")
        if self.last.under_way and epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is over: this server has seen epoch {self.epoch}")
        return self.last

    def _remember(self) -> None:
        if self.last is not None:
            self._over[self.last.update_id] = self.last.progress()
            self._trim()

    def _trim(self) -> None:
        while len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]
