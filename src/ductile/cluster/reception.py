"""The socket at which the agents of a run's nodes arrive, and over which all is said with them afterwards."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

from ductile.cluster.agent import LONGEST_BEAT_S, version
from ductile.cluster.remote_node import RemoteNode
from ductile.concurrency.background import start_reported
from ductile.messages.agents import AgentHello, FromAgent, Leave, Refuse, Renew, ToAgent
from ductile.transport.codec import BadFrame, decode_as, encode_message
from ductile.transport.curve import RunKey
from ductile.transport.frames import FrameRouter


@dataclass(frozen=True, slots=True, eq=False)
class Visitor:
    """An agent that has said Hello and is not admitted yet."""

    connection: bytes
    said: AgentHello

    def __str__(self) -> str:
        return f"{self.said.host} ({self.said.address})"


class Reception:
    """Keeps visitors waiting, who hear `Renew` meanwhile, until they are admitted as nodes or refused.

    Made inside a running event loop; `close` ends it.
    """

    def __init__(
        self,
        key: RunKey,
        address: str,
        on_visitor: Callable[[Visitor], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        """address: as ZeroMQ has it. on_visitor: told of each new one. Raises `zmq.ZMQError`."""
        self._frames = FrameRouter(key.token, address, key)
        self.address = self._frames.address.removeprefix("tcp://")
        """host:port"""
        self._on_visitor = on_visitor
        self.waiting: list[Visitor] = []
        """Visitors in the order of their arrival."""
        self._nodes: dict[bytes, RemoteNode] = {}
        hears = "the agents of the nodes cannot be heard any more"
        self._working = [start_reported(work, hears, on_error) for work in (self._receive(), self._keep_waiting())]

    @property
    def dropped(self) -> dict[str, int]:
        """Number of messages and connections that were not let in, by reason."""
        return dict(self._frames.dropped)

    def admit(self, visitor: Visitor, node: RemoteNode) -> None:
        """Have what the visitor says from now on be the node's."""
        self.waiting.remove(visitor)
        self._nodes[visitor.connection] = node

    async def refuse(self, visitor: Visitor, why: str, is_for_now: bool = False) -> None:
        """why, is_for_now: as `Refuse` has them."""
        if visitor in self.waiting:
            self.waiting.remove(visitor)
        await self.send(visitor.connection, Refuse(why, is_for_now))

    async def send(self, connection: bytes, message: ToAgent) -> bool:
        """Returns False when the agent is not connected."""
        try:
            await self._frames.send(connection, encode_message(message))
        except zmq.ZMQError:
            return False
        return True

    async def close(self) -> None:
        for visitor in self.waiting:
            await self.send(visitor.connection, Leave())
        for task in self._working:
            task.cancel()
        await asyncio.wait(self._working, timeout=1.0)
        self._frames.close(linger_s=1.0)

    async def _receive(self) -> None:
        while True:
            connection, _, payload = await self._frames.receive()
            try:
                message: FromAgent = decode_as(FromAgent, payload)
            except BadFrame:
                self._frames.dropped["unreadable"] += 1
                continue
            if (node := self._nodes.get(connection)) is not None:
                node.hear(message)
            elif isinstance(message, AgentHello):
                await self._welcome(Visitor(connection, message))
            elif not any(visitor.connection == connection for visitor in self.waiting):
                self._frames.dropped["no Hello"] += 1

    async def _welcome(self, visitor: Visitor) -> None:
        if any(each.connection == visitor.connection for each in self.waiting):
            return
        if visitor.said.version != (ours := version()):
            theirs = visitor.said.version
            await self.refuse(
                visitor, f"the run is of ductile {ours!r}, and this machine has {theirs!r}: install the run's"
            )
            return
        self.waiting.append(visitor)
        await self.send(visitor.connection, Renew())
        self._on_visitor(visitor)

    async def _keep_waiting(self) -> None:
        while True:
            await asyncio.sleep(LONGEST_BEAT_S)
            for visitor in list(self.waiting):
                if not await self.send(visitor.connection, Renew()) and visitor in self.waiting:
                    with suppress(ValueError):
                        self.waiting.remove(visitor)
