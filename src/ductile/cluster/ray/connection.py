"""All that is said to Ray: which nodes there are, which are about to go, and a run's agents on them.

Ray is asked in a thread of its own: its calls block, and in the main thread it would take the run's signal handlers.
"""

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from ductile.cluster.agent import Departure
from ductile.cluster.cluster import StartFailed
from ductile.cluster.ray.node_actor import AgentPlace, NodeActor
from ductile.config.schema.cluster import RayConfig
from ductile.core.instances.node_choice import PoolNode
from ductile.error_text import error_text
from ductile.transport.sockets import LOOPBACK

INSTALL = 'pip install "ductile[ray]"'
OF_A_TOKEN = "If it asks for a token, set RAY_AUTH_MODE=token here (docs/ray.md)"
ASK_S = 20.0
"""How long Ray may take to answer; the first time, `cluster.start_timeout_s`."""
LOST = 1

T = TypeVar("T")


class RayConnection:
    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._requests: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        Thread(target=self._serve, name="ray", daemon=True).start()  # a call that hangs keeps no process from ending
        self._ray: Any = None
        self._actors: dict[str, Any] = {}
        """Agents by the id of their Ray node."""
        self._has_requested = False

    async def open(self, within_s: float) -> str:
        """Attach to the cluster, or start one. Returns the address of its head. Raises StartFailed."""
        try:
            return await self._ask(self._open, within_s)
        except ModuleNotFoundError as error:
            raise StartFailed(f"[ray] needs Ray, and there is no module {error.name!r} here: {INSTALL}") from None
        except TimeoutError:
            raise StartFailed(f"{self._named} did not answer within {within_s:g} s (cluster.start_timeout_s)") from None
        except Exception as error:
            hint = "" if "RAY_AUTH_MODE" in os.environ else f". {OF_A_TOKEN}"
            what = f"{self._named} cannot be used: {error_text(error).rstrip('.')}"
            raise StartFailed(f"{what}{hint if isinstance(error, ConnectionError) else ''}") from error

    async def nodes(self) -> Sequence[PoolNode]:
        """Return the nodes that are alive."""
        return await self._ask(self._nodes, ASK_S)

    async def draining(self) -> Mapping[str, float | None]:
        """Return the seconds that are left to each node that Ray is about to take away, by its id; None where Ray does
        not say. Versions of Ray that tell nobody have none."""
        return await self._ask(self._draining, ASK_S)

    async def start_agent(self, node: PoolNode, place: AgentPlace, needed: Mapping[str, float]) -> Awaitable[Departure]:
        """Have the agent of a node run there, and nowhere else. Returns how it ends, once it does. needed: what it
        reserves."""
        ended = await self._ask(lambda: self._start_agent(node, place, needed), ASK_S)
        return self._departure(node, asyncio.wrap_future(ended))

    async def request_nodes(self, num_nodes: int, needed: Mapping[str, float]) -> None:
        """Ask the cluster's autoscaler to have room for so many agents. The cluster keeps one request, the last one;
        `close` takes it back."""
        await self._ask(lambda: self._request_nodes(num_nodes, needed), ASK_S)

    async def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._ray is not None:
            with suppress(Exception):  # whatever Ray raises: the run is over, and has its own result
                await self._ask(self._close, ASK_S)

    @property
    def _named(self) -> str:
        address = self._config.address
        return f"the Ray cluster at {address} (ray.address)" if address else "a Ray cluster on this machine"

    async def _ask(self, work: Callable[[], T], within_s: float) -> T:
        result: Future[T] = Future()
        self._requests.put((work, result))
        async with asyncio.timeout(within_s):
            return await asyncio.wrap_future(result)

    def _serve(self) -> None:
        while True:
            work, result = self._requests.get()
            if not result.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

    def _open(self) -> str:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody that it is there
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray = importlib.import_module("ray")
        quietly: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if self._config.address is not None:
            context = ray.init(address=self._config.address, **quietly)
        else:
            context = ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **quietly)
        self._ray = ray
        return context.address_info["gcs_address"].rpartition(":")[0]

    def _nodes(self) -> Sequence[PoolNode]:
        own = self._ray.get_runtime_context().get_node_id()
        return [
            PoolNode(row["NodeID"], row["NodeManagerAddress"], row["Resources"], row["NodeID"] == own)
            for row in self._ray.nodes()
            if row["Alive"]
        ]

    def _draining(self) -> Mapping[str, float | None]:
        get_draining_nodes = find_draining()
        if get_draining_nodes is None:
            return {}
        now_s = time.time()
        return {node: max(ms / 1000 - now_s, 0.0) if ms else None for node, ms in get_draining_nodes().items()}

    def _request_nodes(self, num_nodes: int, needed: Mapping[str, float]) -> None:
        self._has_requested = True
        sdk = importlib.import_module("ray.autoscaler.sdk")
        sdk.request_resources(bundles=[dict(needed) for _ in range(num_nodes)])

    def _start_agent(self, node: PoolNode, place: AgentPlace, needed: Mapping[str, float]) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        custom = {name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")}
        actor = self._ray.remote(NodeActor).options(
            num_cpus=needed.get("CPU", 0.0),
            num_gpus=needed.get("GPU", 0.0),
            resources=custom,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        self._actors[node.id] = made = actor.remote()
        return made.run.remote(place).future()

    async def _departure(self, node: PoolNode, ended: "asyncio.Future[Departure]") -> Departure:
        exceptions = importlib.import_module("ray.exceptions")
        try:
            return await ended
        except exceptions.RayActorError as error:
            preempted = bool(getattr(error, "preempted", False))
            return Departure(LOST, "its node was preempted" if preempted else _first_line(error), preempted=preempted)
        except exceptions.RayError as error:
            return Departure(LOST, _first_line(error))
        finally:
            self._actors.pop(node.id, None)

    def _close(self) -> None:
        ray, self._ray = self._ray, None
        if ray is None:
            return  # closed already
        with suppress(Exception):  # the agents are to be ended, and Ray to be left, in any case
            if self._has_requested:
                self._request_nodes(0, {})
        for actor in list(self._actors.values()):
            ray.kill(actor)
        ray.shutdown()


def find_draining() -> Callable[[], Mapping[str, int]] | None:
    """Return Ray's own function that has the nodes that are drained, with their deadlines in Unix milliseconds (0:
    none); None where this version of Ray has none. It is not public; Ray Train asks it."""
    try:
        state = importlib.import_module("ray._private.state")
    except ImportError:
        return None
    return getattr(getattr(state, "state", None), "get_draining_nodes", None)


def _first_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"Ray says: {text.rstrip('.')}"
