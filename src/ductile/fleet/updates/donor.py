"""A server that gives the version which it has to another one that joins."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ductile.fleet.servers.server_port import ServerPort
from ductile.messages.updates import (
    EndVersionLease,
    LeaseVersion,
    Offer,
    SendReport,
    VersionLease,
    WeightCarrier,
    WeightUpdate,
)
from ductile.roles import Failure, Refused


class Donor:
    """Follows `update_parties.Senders`. The joiner asks the donor for bucket after bucket, so nothing is sent here."""

    carrier: WeightCarrier | None = "http"

    def __init__(self, port: ServerPort, version: int) -> None:
        self._port, self._version = port, version
        self._lease: VersionLease | None = None

    @contextmanager
    def keeping(self, version: int) -> Generator[None]:
        """Do nothing: the donor keeps its version for as long as the lease lasts."""
        yield

    async def begin_update(self, update: WeightUpdate) -> Sequence[Offer]:
        asked = LeaseVersion(self._version, update.bucket_bytes, update.total_timeout_s)
        try:
            self._lease = await self._port.lease(asked)
        except Failure as error:
            raise Refused(str(error)) from error  # also of one that is gone: the joiner asks the next source
        return (self._lease.offer,)

    async def sent(self, update_id: str) -> Sequence[SendReport]:
        assert self._lease is not None, "an update begins before it is sent"
        num_bytes = sum(bucket.num_bytes for bucket in self._lease.offer.buckets)
        return (SendReport(update_id, self._lease.offer.sender, self._lease.digest, num_bytes, 0.0),)

    async def leave_out(self, update_id: str, instance: str, reason: str) -> None:
        """Do nothing: the donor waits for no receiver."""

    async def finish_update(self, update_id: str, aborted: bool) -> None:
        """Have the donor free its copy; where it cannot be told, the lease ends by itself. Raises Refused where the
        joiner has not got the version and the donor is gone: that is no fault of the joiner's, which asks the next
        source."""
        if self._lease is None:
            return
        try:
            await self._port.end_lease(EndVersionLease(self._lease.offer.location))
            if aborted:
                await self._port.state()
        except Failure as error:
            if aborted:
                raise Refused(f"{self._port.describe()} was giving version {self._version}: {error}") from error
