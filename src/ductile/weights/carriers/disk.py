"""Buckets by files in a folder that sender and receivers see: the way for hosts that share nothing else.

    <folder>/ductile-update-<update id>/<sender>/       0700
        lock            held by the sender as long as it lives; who gets it knows that the sender has ended
        nonce           shows a receiver that it sees the sender's folder and not another one of that name
        bucket-0, ...   each under another name while it is written
        manifest.json   their checksums; written last, so what lacks it is half written, and is never loaded

A disk that is full, or hangs, fails the receivers of this carrier and no others: a thread of its own writes, which is
waited for a bucket's time and no longer. The files go with the update; those of a sender that was killed go when the
next one begins.
"""

import fcntl
import hmac
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

import msgspec
import torch
from torch import Tensor

from ductile.disk import named
from ductile.error_text import error_text
from ductile.messages.updates import Bucket, Offer, WeightUpdate
from ductile.weights.carriers.carrier import UpdateFailed, checksum_of
from ductile.weights.carriers.control import TICK_S

PREFIX = "ductile-update-"
REMOVE_S = 1.0
"""Seconds that a folder has to be removed before others go on: a thread goes on with it."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*")


class FolderManifest(msgspec.Struct, frozen=True):
    checksums: tuple[str, ...]


def folder_of(update: WeightUpdate, sender: str) -> Path:
    """Return the folder for a sender's buckets. Raises ValueError for names that may lead elsewhere."""
    if not update.folder:
        raise ValueError(f"update {update.update_id} names no folder, which carrier disk needs")
    for name in (update.update_id, sender):
        if not _PLAIN.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of a folder")
    return Path(update.folder) / f"{PREFIX}{update.update_id}" / sender


class DiskSender:
    """One thread does all that is done in the folder, in order."""

    def __init__(self, update: WeightUpdate, sender: str, instances: Sequence[str]) -> None:
        """Raises ValueError for names that may lead elsewhere."""
        self._folder, self._timeout_s = folder_of(update, sender), update.bucket_timeout_s
        self._nonce = _nonce(update, sender)
        self._instances = list(instances)
        self._failed: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._checksums: list[str] = []
        self._written: dict[int, Event] = {}
        self._removed: Event | None = None
        self._error = ""
        """Why the thread could not go on."""
        self._lock = -1
        self._steps: SimpleQueue[tuple[Callable[[], None], Event] | None] = SimpleQueue()
        # No pool's: the end of the process does not wait for a daemon, which may hang for ever.
        Thread(target=self._work, name=f"weights to {self._folder}", daemon=True).start()
        self._begin(self._prepare)

    @property
    def live(self) -> bool:
        return len(self._failed) < len(self._instances)

    def send(self, bucket: Bucket, slot: int, content: Tensor, checksum: str) -> None:
        if self.live:
            self._written[bucket.index] = self._begin(lambda: self._write(bucket, content, checksum))

    def wait(self, bucket: Bucket) -> None:
        """Return once the bucket has been written, or the carrier is dropped. No receiver is waited for: they
        acknowledge nothing, and the orchestrator asks them, as it verifies the version."""
        if written := self._written.pop(bucket.index, None):
            self._await_step(written, f"bucket {bucket.index}")

    def leave_out(self, instance: str) -> None:
        """Have `wait` return soon where no other receiver is left."""
        self._left_out.add(instance)

    def close(self, reason: str = "") -> dict[str, str]:
        """Write the manifest, unless something failed. What has been written stays until `remove`."""
        if not reason and self.live:
            self._await_step(self._begin(self._finish), "the manifest")
        if reason:
            self._drop(f"has not got everything: {reason}")
            self.remove()
        return self._failed

    def remove(self, timeout_s: float = REMOVE_S) -> None:
        """Remove what has been written, and end the thread. Where the folder hangs it does both later: it is waited for
        at most so long."""
        self._begin_removal().wait(max(0.0, timeout_s))

    def _await_step(self, step: Event, what: str) -> None:
        """Wait until a step has been done, and drop the carrier where it fails, or is not done in time."""
        until = time.monotonic() + self._timeout_s
        while self.live and not step.wait(TICK_S):
            if self._left_out.issuperset(self._instances):
                self._drop("was left out")
            elif time.monotonic() > until:
                self._drop(f"gets nothing by disk: {self._folder} did not take {what} within {self._timeout_s:g} s")
        if self._error:
            self._drop(f"gets nothing by disk: {self._error}")

    def _drop(self, reason: str) -> None:
        for instance in self._instances:
            self._failed.setdefault(instance, f"{instance} {reason}")
        self._begin_removal()

    def _begin(self, step: Callable[[], None]) -> Event:
        done = Event()
        self._steps.put((step, done))
        return done

    def _begin_removal(self) -> Event:
        if self._removed is None:
            self._removed = self._begin(self._remove)
            self._steps.put(None)
        return self._removed

    # -- In the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while begun := self._steps.get():
            step, done = begun
            try:
                step()
            except Exception as error:
                self._error = str(named(error, self._folder)) if isinstance(error, OSError) else error_text(error)
                self._remove()
            done.set()
            del begun, step  # else the last bucket's memory would be held until the next step

    def _prepare(self) -> None:
        _sweep(self._folder.parent.parent)
        self._folder.mkdir(mode=0o700, parents=True)
        self._lock = _held_lock(self._folder / "lock")
        _write(self._folder / "nonce", self._nonce)

    def _write(self, bucket: Bucket, content: Tensor, checksum: str) -> None:
        if self.live and not self._error:
            self._checksums.append(checksum or checksum_of(content))
            _write(self._folder / f"bucket-{bucket.index}", content.numpy().data)

    def _finish(self) -> None:
        if not self._error:
            _write(self._folder / "manifest.json", msgspec.json.encode(FolderManifest(tuple(self._checksums))))

    def _remove(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):
                self._folder.parent.rmdir()  # the last sender succeeds
            os.close(self._lock)
            self._lock = -1


def receive(update: WeightUpdate, offer: Offer, load: Callable[[Bucket, Tensor, str], None], stopped: Event) -> None:
    """Load all buckets of one sender, once it has written them all. Raises `UpdateFailed`."""
    try:
        folder = folder_of(update, offer.sender)
    except ValueError as error:
        raise UpdateFailed(str(error)) from error
    _wait_for(folder / "nonce", update.bucket_timeout_s, stopped, lambda: None)
    if _read(folder / "nonce") != _nonce(update, offer.sender):
        raise UpdateFailed(f"{folder} is not the folder that {offer.sender} writes to")
    _wait_for(folder / "manifest.json", update.bucket_timeout_s, stopped, lambda: _refuse_ended(folder, offer.sender))
    try:
        checksums = msgspec.json.decode(_read(folder / "manifest.json"), type=FolderManifest).checksums
    except msgspec.MsgspecError as error:
        raise UpdateFailed(f"{folder / 'manifest.json'} is damaged: {error}") from error
    if len(checksums) != len(offer.buckets):
        raise UpdateFailed(f"{folder} has {len(checksums)} buckets, and {len(offer.buckets)} were offered")
    for bucket, expected in zip(offer.buckets, checksums, strict=True):
        if stopped.is_set():
            raise UpdateFailed("the update was stopped")
        load(bucket, _map(folder / f"bucket-{bucket.index}", bucket.num_bytes), expected)


def _wait_for(file: Path, timeout_s: float, stopped: Event, look: Callable[[], None]) -> None:
    """Return once there is such a file. It is waited for as long as something appears in its folder."""
    count, deadline = -1, time.monotonic() + timeout_s
    while not file.exists():
        if stopped.wait(TICK_S):
            raise UpdateFailed("the update was stopped")
        look()
        if (found := _num_files(file.parent)) != count:
            count, deadline = found, time.monotonic() + timeout_s
        if time.monotonic() > deadline:
            raise UpdateFailed(f"{file} did not appear within {timeout_s:g} s: is it the folder that the sender sees?")


def _num_files(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def _refuse_ended(folder: Path, sender: str) -> None:
    """Raise `UpdateFailed` when the sender has ended before all was written."""
    try:
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UpdateFailed(f"{sender} gave the update up: {folder} is gone") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(lock)
    if not (folder / "manifest.json").exists():
        raise UpdateFailed(f"{sender} ended before all of its buckets were in {folder}")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UpdateFailed(f"{file} cannot be read: {error.strerror}") from error


def _map(file: Path, num_bytes: int) -> Tensor:
    """Return the file's bytes, which are not copied."""
    try:
        if (found := file.stat().st_size) != num_bytes:
            raise UpdateFailed(f"{file} has {found} bytes, and {num_bytes} were offered")
        return torch.from_file(str(file), shared=False, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise UpdateFailed(f"{file} cannot be read: {error}") from error


def _nonce(update: WeightUpdate, sender: str) -> bytes:
    return hmac.digest(update.secret.encode(), f"folder of {update.update_id} {sender}".encode(), "sha256")


def _write(file: Path, content: bytes | memoryview) -> None:
    """Write a file that is whole, or not there. Raises OSError."""
    partial = file.with_name(f".{file.name}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)
    partial.rename(file)


def _held_lock(file: Path) -> int:
    """Make a locked file, locked from the first moment that it has its name. The kernel drops the lock with its
    holder."""
    unnamed = file.with_name(".lock.partial")
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(file)
    except OSError:
        os.close(lock)
        raise
    return lock


def _sweep(folder: Path) -> None:
    """Remove what senders have left that were killed."""
    for file in folder.glob(f"{PREFIX}*/*/lock"):
        try:
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)
            with suppress(OSError):
                file.parent.parent.rmdir()
        except BlockingIOError:
            pass  # its sender is alive
        finally:
            os.close(lock)
