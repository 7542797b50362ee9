"""An update of one server by hand, a message at a time, so that a test may leave one out, repeat it or say it wrongly.

    update = HandUpdate.of(server, tensors, version=2, epoch=5)
    update.prepare()
    update.send(0)                    the buckets, one by one
    update.verify(); update.commit(); update.resume()

It knows the contract (`ductile.messages.updates`) and nothing of the product's own sender.
"""

import itertools
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

import httpx
import msgspec
import torch
from torch import Tensor

from ductile.messages.updates import (
    Bucket,
    Digest,
    EndUpdate,
    Offer,
    PauseServer,
    PrepareUpdate,
    Receiver,
    TensorBox,
    TensorSpec,
    UpdateProgress,
    UpdateProof,
    WeightUpdate,
)
from ductile.weights.digest import whole_digest
from tests.fleet.live.servers import LiveServer

BUCKET_BYTES = 16 << 10


def cut(tensors: Mapping[str, Tensor], sender: str, bucket_bytes: int = BUCKET_BYTES) -> tuple[Offer, list[bytes]]:
    """Return what one sender offers that has all tensors, and the bytes of its buckets. A bucket has whole rows."""
    pieces = [
        (name, start, tensor[start : start + rows] if tensor.dim() else tensor)
        for name, tensor in tensors.items()
        for rows in [max(1, bucket_bytes // max(1, tensor[:1].numel() * tensor.element_size()))]
        for start in range(0, len(tensor), rows)
    ]
    groups: list[list[tuple[str, int, Tensor]]] = [[]]
    for piece in pieces:
        if groups[-1] and sum(box.nbytes for _, _, box in [*groups[-1], piece]) > bucket_bytes:
            groups.append([])
        groups[-1].append(piece)
    buckets, contents = [], []
    for index, group in enumerate(groups):
        offsets = itertools.accumulate((box.nbytes for _, _, box in group), initial=0)
        boxes = tuple(
            TensorBox(name, (start, *(0,) * (box.dim() - 1)), (start + len(box), *box.shape[1:]), offset, box.nbytes)
            for (name, start, box), offset in zip(group, offsets, strict=False)
        )
        content = b"".join(box.contiguous().view(torch.uint8).numpy().tobytes() for _, _, box in group)
        buckets.append(Bucket(index, len(content), boxes))
        contents.append(content)
    specs = tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    return Offer(sender, specs, tuple(buckets)), contents


@dataclass
class HandUpdate:
    server: LiveServer
    token: str
    update: WeightUpdate
    offer: Offer
    contents: list[bytes]
    digest: Digest

    @staticmethod
    def of(
        server: LiveServer,
        tensors: Mapping[str, Tensor],
        version: int,
        epoch: int,
        verify: UpdateProof = "sum",
        bucket_timeout_s: float = 1.0,
        **changes: object,
    ) -> "HandUpdate":
        offer, contents = cut(tensors, "hand")
        token = server.control_token
        receiver = Receiver(server.name, "http", server.url, token)
        update = WeightUpdate(
            uuid4().hex,
            epoch,
            version,
            (receiver,),
            bucket_bytes=BUCKET_BYTES,
            bucket_timeout_s=bucket_timeout_s,
            total_timeout_s=10.0,
            verify=verify,
        )
        update = msgspec.structs.replace(update, **changes)
        return HandUpdate(server, token, update, offer, contents, whole_digest(tensors.items()))

    @staticmethod
    def in_background(call: Callable[..., object], *args: object) -> threading.Thread:
        def run() -> None:
            with suppress(httpx.HTTPError):
                call(*args)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def prepare(self, *offers: Offer) -> httpx.Response:
        return self._post("/weights/prepare", PrepareUpdate(self.update, "http", offers or (self.offer,)))

    def send(self, index: int, content: bytes | None = None, checksum: str | None = None) -> httpx.Response:
        content = self.contents[index] if content is None else content
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/octet-stream",
            "X-Ductile-Epoch": str(self.update.epoch),
        }
        if checksum is not None:
            headers["X-Ductile-Checksum"] = checksum
        route = f"/weights/buckets/{self.update.update_id}/{self.offer.sender}/{index}"
        return self.server.http.post(self.server.url + route, content=content, headers=headers)

    def send_all(self) -> None:
        for index in range(len(self.contents)):
            reply = self.send(index)
            assert reply.status_code == 200, reply.text

    def verify(self, digest: Digest | None = None) -> httpx.Response:
        return self._post("/weights/verify", self._end(digest))

    def commit(self, digest: Digest | None = None, timeout_s: float = 10.0) -> httpx.Response:
        return self._post("/weights/commit", self._end(digest), timeout_s)

    def abort(self) -> httpx.Response:
        return self._post("/weights/abort", self._end(None))

    def pause(self, **how: object) -> httpx.Response:
        return self._post("/pause", PauseServer(self.update.epoch, **how))  # type: ignore[arg-type]

    def resume(self) -> httpx.Response:
        return self._post("/resume", PauseServer(self.update.epoch))

    def whole(self) -> None:
        """All of it, as it should be."""
        for step in (self.prepare, self.send_all, self.verify, self.commit):
            reply = step()
            assert reply is None or reply.status_code == 200, reply.text

    def _end(self, digest: Digest | None) -> EndUpdate:
        digest = self.digest if digest is None else digest
        return EndUpdate(self.update.update_id, self.update.epoch, self.update.version, digest)

    def _post(self, route: str, body: object, timeout_s: float = 10.0) -> httpx.Response:
        return self.server.post(route, body, self.token, timeout_s)


def progress(reply: httpx.Response) -> UpdateProgress:
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=UpdateProgress)
