"""A sender that keeps what it sends: `ductile.weights.sender.WeightSender` without receivers."""

import threading
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from ductile.messages.updates import Bucket, Offer, SendReport, TensorBox, WeightUpdate, digest_text
from ductile.weights.sender import Fill


class MemorySender:
    made: ClassVar[list["MemorySender"]] = []
    hold: ClassVar[Path | None] = None
    """While this file is there, no sender goes on from its first bucket to the next."""

    def __init__(
        self, update: WeightUpdate, offer: Offer, fill: Fill, tell: Callable[[SendReport], None], memory: object
    ) -> None:
        self.update, self.offer, self.content = update, offer, dict[int, Tensor]()
        self.report: SendReport | None = None
        self._fill, self._tell, self._aborted = fill, tell, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        MemorySender.made.append(self)

    def start(self) -> Offer:
        self._thread.start()
        return msgspec.structs.replace(self.offer, location="memory")

    def abort(self) -> None:
        self._aborted.set()

    def finish(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError("the sender did not end")

    def _run(self) -> None:
        digest, failed = 0, dict[str, str]()
        try:
            for bucket in self.offer.buckets:
                digest += self._bucket(bucket)
        except Exception as error:
            failed = {"everybody": str(error)}
        num_bytes = sum(len(content) for content in self.content.values())
        self.report = SendReport(self.update.update_id, self.offer.sender, digest_text(digest), num_bytes, 0.0, failed)
        self._tell(self.report)

    def _bucket(self, bucket: Bucket) -> int:
        while bucket.index and self.hold and self.hold.exists() and not self._aborted.is_set():
            sleep(0.005)
        content = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        part = self._fill(bucket, content)
        self.content[bucket.index] = content
        return part


def assemble(tensors: dict[str, Tensor], offer: Offer, content: dict[int, Tensor], *only: Bucket) -> None:
    """Load the content of buckets, by index, into `tensors`, by name, which are made where there are none."""
    for spec in offer.tensors:
        tensors.setdefault(spec.name, torch.zeros(spec.shape, dtype=vars(torch)[spec.dtype]))
    for bucket in only or offer.buckets:
        for box in bucket.boxes:
            into = box_of(tensors, box)
            sent = content[bucket.index][box.offset_bytes : box.offset_bytes + box.num_bytes]
            into.copy_(sent.view(into.dtype).view(into.shape))


def box_of(tensors: dict[str, Tensor], box: TensorBox) -> Tensor:
    return tensors[box.name][tuple(map(slice, box.start, box.stop))]
