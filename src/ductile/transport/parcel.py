"""A command on its way to one slot, or the same one to several: it is encoded once.

All slots of a data-parallel rank get the same micro-batches, and with pp, cp and tp a rank may have dozens of slots.
"""

import asyncio

import msgspec

from ductile.messages.workers import Command
from ductile.transport.codec import enclose, encode_body, is_long


class Parcel:
    def __init__(self, command: Command) -> None:
        self.command = command
        self._long = is_long(command)
        self._encoding = asyncio.Lock()
        self._body: msgspec.Raw | None = None

    async def frame(self, epoch: int, sequence: int) -> bytes:
        """The bytes for one slot. Long ones are made in a thread, so that the event loop goes on meanwhile. Raises
        BadFrame."""
        async with self._encoding:
            if self._body is None:
                given = self.command
                self._body = await asyncio.to_thread(encode_body, given) if self._long else encode_body(given)
        body = self._body
        return await asyncio.to_thread(enclose, epoch, sequence, body) if self._long else enclose(epoch, sequence, body)
