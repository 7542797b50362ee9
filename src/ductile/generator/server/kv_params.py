"""`kv_transfer_params` of a request, as vLLM has it: who computes the prompt, and where its keys and values are.

    {"do_remote_decode": true}                        compute the prompt, and keep keys and values for another server
    {"do_remote_prefill": true, "remote": {...}}      take them over, and go on: what the other server has replied

A router says it (`ductile.fleet.router`), to servers that it may control: they fetch from the address in it.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ductile.columns import TokenIds
from ductile.config.server_address import is_address
from ductile.messages.updates import Digest
from ductile.records import KVHandle

Size = Annotated[int, Field(ge=0, lt=1 << 62)]


class RemoteKV(BaseModel):
    """Keys and values that a server keeps."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    url: Annotated[str, Field(max_length=1024)]
    """Address at which they are fetched."""
    host: Annotated[str, Field(max_length=256)]
    """Identity of the server's machine, as `ductile.fabric.process.host` has it."""
    location: Annotated[str, Field(max_length=256)]
    """Path of the memory segment that has them there."""
    num_tokens: Size
    num_bytes: Size
    version: Size
    digest: Digest
    """Version and digest of the weights that computed them."""
    fingerprint: Annotated[int, Field(ge=0, lt=1 << 64)]
    tokens: Annotated[str, Field(max_length=64)]
    """Digest of the tokens that they are of: two servers may read a text otherwise."""

    @property
    def handle(self) -> KVHandle:
        return KVHandle(self.location, self.num_tokens, self.num_bytes, self.version, self.fingerprint)


class KVTransferParams(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote: RemoteKV | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.do_remote_decode == self.do_remote_prefill or self.do_remote_prefill != (self.remote is not None):
            raise ValueError(
                "kv_transfer_params must have do_remote_decode, or do_remote_prefill with the remote that a server gave"
            )
        if self.remote is not None and not is_address(self.remote.url):
            raise ValueError("kv_transfer_params.remote.url must be an address with http:// or https://")
        return self


def digest_of(tokens: Sequence[int]) -> str:
    """Return what tells one row of tokens from another."""
    return blake2b(TokenIds(tokens).array.tobytes(), digest_size=16).hexdigest()
