"""The receiving end of weight updates in a server: what `UpdateMachine` decides is done here, to tensors and threads.

Buckets come by POST, one route call each, or by a carrier that a thread of this server reads (`carriers.receive`). All
of them go through `_load`. The engine goes on generating; it notices the commit alone, between two steps.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from ductile.error_text import error_text
from ductile.generator.server.pause_gate import PauseGate
from ductile.generator.server.runner import EngineRunner
from ductile.generator.server.update_machine import Fenced, Unusable, Update, UpdateMachine
from ductile.messages.updates import Bucket, EndUpdate, Offer, PrepareUpdate, UpdateProgress
from ductile.weights.carriers import receive
from ductile.weights.carriers.carrier import UpdateFailed, bytes_of, refuse_damaged, sentence
from ductile.weights.live_weights import LiveWeights
from ductile.weights.staged_weights import StagedWeights

LOG = logging.getLogger(__name__)

LOADERS = 4
"""Buckets that are loaded at a time."""


class WeightReceiver:
    """Made in the loop that serves; `close` at the end. Raises `Fenced`, `Unusable`."""

    def __init__(
        self,
        runner: EngineRunner,
        live: LiveWeights,
        machine: UpdateMachine,
        gate: PauseGate,
        in_place: bool,
    ) -> None:
        """in_place: as `StagedWeights` has it."""
        self._runner, self._live, self._machine = runner, live, machine
        self._in_place, self._gate = in_place, gate
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        """Set whenever a bucket has been loaded, or the update ended."""
        self._loaders = ThreadPoolExecutor(LOADERS, "weights")
        self._busy: set[tuple[str, str, int]] = set()
        """Buckets that are being loaded."""
        self._changed = threading.Condition()
        """Held for each look at the machine; told when a bucket is not busy any more."""
        self._staged: StagedWeights | None = None
        self._say_end: Callable[[], None] = lambda: None
        """Tells the log of the end of what is staged."""
        self._stopped = threading.Event()
        """Tells the threads of the update that is under way to end."""
        self._deadline: asyncio.TimerHandle | None = None
        self._ending = asyncio.Lock()
        """Held by one prepare, verify, commit or abort at a time."""

    @property
    def most_bucket_bytes(self) -> int:
        """The largest bucket of the last update; 0 before any."""
        return self._machine.last.most_bucket_bytes if self._machine.last else 0

    async def prepare(self, message: PrepareUpdate) -> UpdateProgress:
        async with self._ending:
            with self._changed:
                update = self._machine.prepare(message)
                if update is None:
                    return self.progress(message.update.update_id)
                self._drop()
                staged = self._staged = StagedWeights(self._live, update.version, self._in_place)
                self._say_begin(update, message)
            try:
                if self._gate.torn and message.update.base_version is not None:
                    raise ValueError("what is live here is of no version, so all of its tensors must come")
                await asyncio.to_thread(stage, staged, message)
                if self._in_place:
                    await self._gate.close_for_loading(message.update.total_timeout_s)
            except ValueError as why:
                self._fail(update, f"version {update.version}: {why}")
                raise Unusable(update.reason) from None
            except (RuntimeError, MemoryError) as why:
                self._fail(update, f"there is no room to stage version {update.version}: {error_text(why)}")
                return self.progress(update.update_id)
            late = f"version {update.version} was not committed within {message.update.total_timeout_s:g} s"
            self._deadline = self._loop.call_later(message.update.total_timeout_s, lambda: self._fail(update, late))
            self._start_receiving(message, update, staged)
        return self.progress(update.update_id)

    async def take(
        self, update_id: str, epoch: int, sender: str, index: int, checksum: str, content: bytearray
    ) -> UpdateProgress:
        """Load a bucket that came by POST. Returns once it is loaded."""
        async with self._ending:  # senders look whether the update is known here, which it is a moment before its room
            pass
        with self._changed:
            bucket = self._machine.expects(update_id, epoch, sender, index)
            update, staged = self._machine.last, self._staged
        if bucket is not None and update is not None and staged is not None:
            if update.verify == "crc" and not checksum:
                raise Unusable(f"bucket {index} came without X-Ductile-Checksum, and the update is verified by it")

            tensor = bytes_of(content)

            def load() -> None:
                refuse_damaged(sender, bucket, tensor, checksum)
                self._load(update, staged, sender, bucket, tensor)

            try:
                await self._loop.run_in_executor(self._loaders, load)
            except UpdateFailed as why:
                raise Unusable(str(why)) from None
            except ValueError as why:
                raise Fenced(str(why)) from None
        return self.progress(update_id)

    async def verify(self, message: EndUpdate) -> UpdateProgress:
        with self._changed:
            update = self._machine.check_end(message)
        await self._until_staged(update)
        async with self._ending:
            staged = self._staged
            if update.phase == "staged" and staged is not None:
                found = "" if update.verify == "none" else await asyncio.to_thread(staged.digest)
                with self._changed:
                    self._machine.verified(update, found, message.digest)
                self._drop_if_over()
        return self.progress(update.update_id)

    async def commit(self, message: EndUpdate) -> UpdateProgress:
        async with self._ending:
            with self._changed:
                update, staged = self._machine.may_commit(message), self._staged
            if update is not None and staged is not None:
                await self._runner.between_steps(lambda: self._swap(update, staged), fatal=True)
            self._drop_if_over()
        return self.progress(message.update_id)

    async def abort(self, message: EndUpdate) -> UpdateProgress:
        async with self._ending:
            with self._changed:
                progress = self._machine.abort(message)
            self._drop_if_over()
        return progress

    def progress(self, update_id: str) -> UpdateProgress:
        progress = self._machine.progress(update_id)
        if progress is None:
            raise Fenced(f"update {update_id[:80]} was never prepared here")
        return progress

    def close(self) -> None:
        self._drop()
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def _swap(self, update: Update, staged: StagedWeights) -> None:
        """Commit, in the engine's thread, unless the update has failed a moment ago."""
        with self._changed:
            if update.under_way:
                swap = self._runner.engine.swap_weights
                self._runner.change_over(update.version, update.digest, lambda: staged.commit(swap))
                self._machine.end("committed")

    def _drop_if_over(self) -> None:
        with self._changed:
            if self._machine.last is not None and not self._machine.last.under_way:
                self._drop()
                if self._machine.last.phase == "committed":
                    self._gate.open_after_loading()
                else:
                    self._gate.stay_closed()

    def _drop(self) -> None:
        """Let go of what an update that is over has here."""
        self._stopped.set()
        self._stopped = threading.Event()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._staged is not None:
            self._staged.abort()
            self._staged = None
            self._say_end()
        self._moved.set()

    def _say_begin(self, update: Update, message: PrepareUpdate) -> None:
        began_s, epoch, carrier = self._loop.time(), message.update.epoch, message.carrier
        what = f"version {update.version} by {carrier} (epoch {epoch})"
        LOG.info("update begins: %s, %d buckets", what, len(update.buckets))

        def say_end() -> None:
            took_s = self._loop.time() - began_s
            if update.phase == "committed":
                LOG.info("update committed: %s is live after %.2f s", what, took_s)
            else:
                ended = update.phase if not update.under_way else "dropped"
                LOG.warning("update %s: %s, after %.2f s: %s", ended, what, took_s, update.reason or "this server ends")

        self._say_end = say_end

    def _fail(self, update: Update, reason: str) -> None:
        with self._changed:
            if self._machine.last is update and update.under_way:
                self._machine.end("failed", reason)
                self._drop_if_over()

    def _tell(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call)

    async def _until_staged(self, update: Update) -> None:
        """Return when all buckets are there, or the update is over. Where none comes for too long it fails."""
        while update.phase in ("prepared", "receiving"):
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), update.bucket_timeout_s)
            except TimeoutError:
                there = f"{len(update.loaded)} of {len(update.buckets)} buckets are there"
                self._fail(update, f"no bucket came for {update.bucket_timeout_s:g} s: {there}")

    def _load(self, update: Update, staged: StagedWeights, sender: str, bucket: Bucket, buffer: Tensor) -> None:
        """Load a bucket, in any thread; a second one of the same place waits for the first. Raises `Fenced`."""
        place = (update.update_id, sender, bucket.index)
        with self._changed:
            if not self._changed.wait_for(lambda: place not in self._busy, update.bucket_timeout_s):
                raise Fenced(f"bucket {bucket.index} of {sender} is being loaded, and does not come to an end")
            if self._machine.expects(update.update_id, update.epoch, sender, bucket.index) is None:
                return
            self._busy.add(place)
        try:
            staged.load(bucket, buffer)
            with self._changed:
                self._machine.loaded(update, sender, bucket.index)
        finally:
            with self._changed:
                self._busy.discard(place)
                self._changed.notify_all()
            self._tell(self._moved.set)

    def _start_receiving(self, message: PrepareUpdate, update: Update, staged: StagedWeights) -> None:
        """Start the thread that gets the buckets which nobody posts."""
        stopped = self._stopped

        def sink(offer: Offer, bucket: Bucket, buffer: Tensor) -> None:
            if stopped.is_set():
                raise Fenced(f"update {update.update_id} is {update.phase}")
            self._load(update, staged, offer.sender, bucket, buffer)

        def run() -> None:
            try:
                receive(message, sink, stopped)
            except Exception as why:
                reason = f"version {update.version} did not come: {sentence(why)}"
                self._tell(lambda: self._fail(update, reason))

        threading.Thread(target=run, name=f"weights-{update.version}", daemon=True).start()


def stage(staged: StagedWeights, message: PrepareUpdate) -> None:
    tensors = {tensor.name: tensor for offer in message.offers for tensor in offer.tensors}
    if any(tensors[tensor.name] != tensor for offer in message.offers for tensor in offer.tensors):
        raise ValueError("two senders offer the same tensor with another shape or dtype")
    buckets = [bucket for offer in message.offers for bucket in offer.buckets]
    boxes = [box for bucket in buckets for box in bucket.boxes]
    for bucket in buckets:
        if any(box.offset_bytes + box.num_bytes > bucket.num_bytes for box in bucket.boxes):
            raise ValueError(f"a box of bucket {bucket.index} ends behind the bucket's {bucket.num_bytes} bytes")
    staged.prepare(list(tensors.values()), boxes, message.update.base_version)
