"""A weight update, as the orchestrator, the trainer's ranks and the servers that generate speak of it.

    prepare → buckets → verify → commit, or abort

The orchestrator decides once, in a `WeightUpdate`, and every rank and every server gets the same object. A rank says
what it will send (`Offer`: its own boxes of the tensors, in buckets), and sends it to all receivers; the bytes never
pass the orchestrator. A server stages the buckets beside the weights that it generates with, and changes over when it
is told to commit. Everything carries `update_id` and `epoch`; what is older than a server has seen is refused (409).

Over HTTP all of this is JSON, and a bucket is its raw bytes.
"""

from collections.abc import Iterable
from hashlib import blake2b
from secrets import token_hex
from typing import Annotated, Literal

import msgspec

from ductile.core.instances.carrier_choice import WeightCarrier
from ductile.core.layout.model.lora import LoraSpec

Digest = str
"""13 hexadecimal digits: the fingerprint of a whole version (`ductile.weights.digest`). It does not depend on how the
tensors were cut, so ranks sum their parts up, and anybody who has all tensors finds the same."""

LONGEST_LEASE_S = 3600
"""Seconds that a server keeps a version for others at most."""


def digest_text(value: int) -> Digest:
    """Return a sum of fingerprints as a digest, modulo 2^52, as `ductile.fabric.fingerprint` sums them up."""
    return f"{value % (1 << 52):013x}"


def digest_number(digest: Digest) -> int:
    """Return the number that a digest stands for; "" counts as nothing. Raises ValueError for another text."""
    return int(digest or "0", 16)


def total_of(parts: Iterable[Digest]) -> Digest:
    """Return the digest of what several senders, or tensors, have between them. "" counts as nothing."""
    return digest_text(sum(map(digest_number, parts)))


UpdateProof = Literal["none", "sum", "crc"]
"""Proof that is asked of a staged version: none; its digest; its digest and each bucket's checksum on arrival."""


class TensorSpec(msgspec.Struct, frozen=True):
    """A whole tensor of the model. `dtype` is torch's name without the prefix: "bfloat16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def model_fingerprint(tensors: Iterable[TensorSpec], adapters: LoraSpec | None = None) -> str:
    """Return 16 hexadecimal digits that are equal for models with the same tensors, by names, shapes and dtypes, and
    adapters that count alike: tensors do not say by which factor, nor of which projections they are."""
    lines = sorted(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    if adapters is not None:
        lines.append(f"adapters {adapters.scale!r} {' '.join(adapters.targets)}")
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


class TensorBox(msgspec.Struct, frozen=True):
    """A box of a tensor, contiguous in its bucket: `tensor[start:stop]` in every dim."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


class Bucket(msgspec.Struct, frozen=True):
    """Boxes that travel together. `index` is its place among the buckets of its sender, from 0."""

    index: int
    num_bytes: int
    boxes: tuple[TensorBox, ...]


class Offer(msgspec.Struct, frozen=True):
    """Boxes that one rank (or one instance that has a version) sends, and where it is found. Made once for a layout,
    and the same for every version until the layout changes; `location` is of one update."""

    sender: str
    """ "slot-2", or the id of the instance that gives its weights to one that joins."""
    tensors: tuple[TensorSpec, ...]
    """Tensors of which a box is in the buckets."""
    buckets: tuple[Bucket, ...]
    location: str = ""
    """host:port of the sender's control socket (shared_memory, point_to_point), or the URL of a server's lease (http):
    then the receiver asks that server for each bucket, at `<location>/<index>`. "" where nobody connects to it."""


class Receiver(msgspec.Struct, frozen=True):
    """Server that gets the version, and the carrier that was chosen for it."""

    instance: str
    carrier: WeightCarrier
    url: str = ""
    """Root of the server's HTTP routes, without /v1: for carrier "http"."""
    token: str = ""
    """Bearer token of the server's control routes: for carrier "http". It is shown nowhere."""

    def __repr__(self) -> str:
        return f"Receiver({self.instance!r}, {self.carrier!r})"


class WeightUpdate(msgspec.Struct, frozen=True):
    """One decision for all ranks and servers. `receivers` is the live set, decided while nothing is under way."""

    update_id: str
    """Unique in all runs: a server may have been in another one's fleet."""
    epoch: int
    """Membership epoch of the fleet. A server refuses an update whose epoch is older than one that it has seen."""
    version: int
    receivers: tuple[Receiver, ...]
    bucket_bytes: int = 4 << 20
    """Bytes of a bucket at most; a row of a tensor that is larger is a bucket of its own."""
    num_slots: int = 4
    """Buckets that a sender has under way at a time; 1: one pending bucket."""
    bucket_timeout_s: float = 10.0
    """A receiver that does not acknowledge a bucket for so long has failed; the others go on."""
    total_timeout_s: float = 300.0
    verify: UpdateProof = "sum"
    base_version: int | None = None
    """Version that every receiver has committed, where boxes that did not change since then are left out."""
    rendezvous: str = ""
    """host:port near which receivers find the senders (point_to_point): those of an update that stays on this machine,
    and where it is "", listen on loopback. Each has a port of its own."""
    folder: str = ""
    """Folder that sender and receiver see (disk)."""
    secret: str = msgspec.field(default_factory=token_hex)
    """Proof that senders and receivers are of this update, which they ask of each other. It is shown nowhere."""

    def __repr__(self) -> str:
        return f"WeightUpdate({self.update_id!r}, epoch={self.epoch}, version={self.version}, {self.receivers!r})"


UpdatePhase = Literal["prepared", "receiving", "staged", "verified", "committed", "aborted", "failed"]


class UpdateProgress(msgspec.Struct, frozen=True):
    """Progress of a receiver with an update."""

    update_id: str
    phase: UpdatePhase
    num_buckets: int = 0
    """Buckets that have been loaded into the staged version."""
    digest: Digest = ""
    """Digest of what is staged, once all buckets are there; "" where none was asked for."""
    reason: str = ""
    """Reason for which it failed, a sentence; "" where it has not."""


class SendReport(msgspec.Struct, frozen=True):
    """One sender's end of an update."""

    update_id: str
    sender: str
    digest: Digest
    """Part of the version's digest that is of this sender's boxes; parts add up modulo 2^52."""
    num_bytes: int
    seconds: float
    failed: dict[str, str] = {}
    """Receivers that did not take everything, each with a sentence."""
    num_bytes_unchanged: int = 0
    """Bytes that were left out, as they are those of `base_version`. `digest` has their part all the same."""
    num_bytes_equal: int = 0
    """Bytes that are those of the version that was sent before, also the ones that were left out: so much is worth
    looking for by the next version."""
    tensors: dict[str, Digest] = {}
    """Parts of `digest`, by the tensors' names; empty where not all of them could be read."""


# -- What a server says and is told over HTTP -----------------------------------------------------------------------


class ServerState(msgspec.Struct, frozen=True):
    """GET /fleet/state: a server as its fleet sees it. It needs no token, and says nothing that a probe may not
    know."""

    incarnation: str
    """Random, made when the process starts: another one means another process, with other weights."""
    model: str
    """Fingerprint of the model's tensors (`model_fingerprint`)."""
    version: int
    """Version that the next token is sampled from; 0 for the folder's own weights."""
    digest: Digest
    epoch: int
    """Newest membership epoch that the server has seen."""
    paused: bool = False
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    carriers: tuple[WeightCarrier, ...] = ("shared_memory", "point_to_point", "http", "disk")
    host: str = ""
    """Identity of the machine (its boot id): equal to the trainer's where memory can be shared."""
    serving: bool = True
    """False while it holds weights of no version, as its memory has no room for two: nothing is generated until a
    commit."""
    num_sampled: int = 0
    """Tokens sampled since the process began: a wedged engine answers probes, and samples nothing."""
    update: UpdateProgress | None = None
    """The update that is under way, or the last one."""
    model_name: str = ""
    """Name under which it serves its model; "" where it does not say it."""
    leaving: bool = False
    """It finishes what it has, takes nothing new, and ends."""


class PrepareUpdate(msgspec.Struct, frozen=True):
    """POST /weights/prepare. The same update again is no error, and changes nothing.

    Replies `UpdateProgress`; 409 for an older epoch, or another update at the same epoch that is still under way; 422
    with a sentence where the tensors are not the server's model's."""

    update: WeightUpdate
    carrier: WeightCarrier
    offers: tuple[Offer, ...]
    """Offers of all senders: together every tensor exactly once (with `base_version`: those that changed)."""
    instance: str = ""
    """Receiver of the update that this server is. "" is enough where only one has the carrier."""


class EndUpdate(msgspec.Struct, frozen=True):
    """POST /weights/verify, /weights/commit, /weights/abort. Each is idempotent, and replies `UpdateProgress`. `verify`
    waits until all buckets are staged, at most the update's `bucket_timeout_s` without progress."""

    update_id: str
    epoch: int
    version: int = 0
    digest: Digest = ""
    """The version's: the sum of all senders' parts. "" where nothing is verified."""


class PauseServer(msgspec.Struct, frozen=True):
    """POST /pause. Until /resume no request is begun or continued, of any client. mode: abort what runs, keep it where
    it is, or let it end first. After `lease_s` the server goes on by itself. Replies `ServerState`, as /resume does."""

    epoch: int
    mode: Literal["abort", "keep", "drain"] = "keep"
    lease_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0


class ResumeServer(msgspec.Struct, frozen=True):
    """POST /resume. One that is not paused resumes all the same: nothing happens."""

    epoch: int = 0
    """0: whoever has paused it."""


class LeaseVersion(msgspec.Struct, frozen=True):
    """POST /weights/lease. The server keeps the version that is live now, for a server that joins, until the lease is
    over. Replies `VersionLease`; 409 where another version is live."""

    version: int | None = None
    """None: whichever is live."""
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1)] = 4 << 20
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE_S)] = 60.0


class VersionLease(msgspec.Struct, frozen=True):
    """A version that one server has, as another can get it: `offer` goes into a `PrepareUpdate` of carrier "http"."""

    version: int
    digest: Digest
    offer: Offer


class EndVersionLease(msgspec.Struct, frozen=True):
    """POST /weights/lease/end. The server need not keep the version for it any more; one that is over already is no
    error. Replies {}."""

    location: str
    """URL of the lease, as its offer has it."""


class LiveDigest(msgspec.Struct, frozen=True):
    """GET /weights/digest: read from the weights that are sampled from, just now."""

    version: int
    digest: Digest
    """ "" where they are rounded, and so not those that were published."""
    announced: Digest = ""
    """Digest that the version came with, which its tokens carry; "" where none did."""
    tensors: dict[str, Digest] = {}
    """Parts of `digest`, by the tensors' names."""
