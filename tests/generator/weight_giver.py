"""A trainer for a server under test: versions of a model, cut into buckets, and sent over HTTP."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import torch
from fastapi.testclient import TestClient
from msgspec.structs import replace
from torch import Tensor

from ductile.generator.server.weight_donor import content_of, offered
from ductile.messages.updates import EndUpdate, PrepareUpdate, Receiver, TensorSpec, WeightUpdate
from ductile.weights.buckets import only
from ductile.weights.carriers.carrier import bytes_of, checksum_of
from ductile.weights.live_weights import VersionTensors


def perturbed(tensors: Mapping[str, Tensor], seed: int, scale: float = 0.02) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: each + (torch.randn(each.shape, generator=generator) * scale).to(each.dtype)
        for name, each in tensors.items()
    }


@dataclass
class Giver:
    """One update at a server. Every call returns the reply's status and JSON."""

    client: httpx.Client | TestClient
    tensors: Mapping[str, Tensor]
    version: int
    epoch: int = 1
    bucket_bytes: int = 30_000
    senders: int = 1
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.held = VersionTensors(
            self.version, self.tensors, {name: each.dtype for name, each in self.tensors.items()}
        )
        whole = offered(self.held, "all", self.bucket_bytes)
        rank_of = {name: rank % self.senders for rank, name in enumerate(self.tensors)}
        self.offers = [
            only(
                replace(whole, sender=f"slot-{rank}"),
                self.bucket_bytes,
                lambda box, rank=rank: rank_of[box.name] == rank,
            )
            for rank in range(self.senders)
        ]
        update_id = secrets.token_hex(8)
        receivers = (Receiver("it", "http"),)
        self.update = WeightUpdate(
            update_id, self.epoch, self.version, receivers, bucket_bytes=self.bucket_bytes, **self.settings
        )
        self.digest = self.held.digest()

    def retell(self, change: Callable[[tuple[TensorSpec, ...]], tuple[TensorSpec, ...]]) -> None:
        """Offer other tensors than those that are in the buckets."""
        self.offers = [replace(offer, tensors=change(offer.tensors)) for offer in self.offers]

    def only(self, name: str) -> None:
        """Offer one tensor alone; the digest stays that of all."""
        self.offers = [only(offer, self.bucket_bytes, lambda box: box.name == name) for offer in self.offers]

    def prepare(self) -> tuple[int, Any]:
        return self.post("/weights/prepare", PrepareUpdate(self.update, "http", tuple(self.offers)))

    def send(self, sender: int, index: int, **changed: Any) -> tuple[int, Any]:
        offer = self.offers[sender]
        content = changed.get("content", content_of(self.held, offer.buckets[index]).numpy().tobytes())
        reply = self.client.post(
            f"/weights/buckets/{self.update.update_id}/{offer.sender}/{changed.get('to', index)}",
            content=content,
            headers={
                "Content-Type": "application/octet-stream",
                "X-Ductile-Epoch": str(changed.get("epoch", self.epoch)),
                "X-Ductile-Checksum": changed.get("checksum", checksum_of(bytes_of(bytearray(content)))),
            },
        )
        return reply.status_code, reply.json()

    def send_all(self) -> None:
        for sender, offer in enumerate(self.offers):
            for bucket in offer.buckets:
                status, said = self.send(sender, bucket.index)
                assert status == 200, said

    def end(self, what: str, **changed: Any) -> tuple[int, Any]:
        said = {"epoch": self.epoch, "version": self.version, "digest": self.digest} | changed
        return self.post(f"/weights/{what}", EndUpdate(self.update.update_id, **said))

    def stage(self) -> None:
        """Give all but the commit."""
        assert self.prepare()[0] == 200
        self.send_all()
        status, said = self.end("verify")
        assert (status, said["phase"]) == (200, "verified"), said

    def give(self) -> None:
        self.stage()
        status, said = self.end("commit")
        assert (status, said["phase"]) == (200, "committed"), said

    def post(self, path: str, said: msgspec.Struct) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        reply = self.client.post(path, content=msgspec.json.encode(said), headers=headers)
        return reply.status_code, reply.json()
