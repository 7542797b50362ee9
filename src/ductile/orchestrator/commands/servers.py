"""The servers of a run, put together: the fleet that finds and watches them, the transaction that gives them weights,
and what the run tells of them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit
from uuid import uuid4

from ductile.cluster.make_cluster import has_several_nodes
from ductile.concurrency.deadline import Deadline
from ductile.config.checks.asked_servers import asked_servers
from ductile.config.checks.on_disk import read_spec
from ductile.config.schema.fleet import FileRegistry, FleetConfig, HttpRegistry
from ductile.config.schema.run import RLConfig
from ductile.config.schema.secrets import secret_of
from ductile.config.schema.trainer import NcclBroadcast
from ductile.config.server_address import with_scheme
from ductile.core.instances.carrier_choice import CarrierChoice, choose_carrier
from ductile.core.instances.health import ServerHealth
from ductile.core.instances.topology import TopologyMember
from ductile.core.layout.model.parameters import parameters
from ductile.core.rollouts.provenance import KnownWeights
from ductile.events.servers import ServerChanged, ServerJoined, ServerLeft, ServerNoted, WeightUpdateEnded
from ductile.fabric.process import host
from ductile.fleet.elastic_fleet import ElasticFleet
from ductile.fleet.registry.authority import Authority, FolderAuthority, HttpAuthority
from ductile.fleet.registry.registries import Leases, Registry, RegistryDown, registry_of
from ductile.fleet.registry.registry_server import LeaseTable, registry_app, serve_registry
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.servers.monitor import HttpProbe
from ductile.fleet.servers.pooled_servers import PooledServers
from ductile.fleet.servers.requirements import Requirements
from ductile.fleet.servers.server_http import ServerDeadlines
from ductile.fleet.servers.server_port import ServerPort
from ductile.fleet.servers.shared_state import SharedFleetState
from ductile.fleet.updates.update_attempt import NUM_ASKED
from ductile.fleet.updates.update_parties import ServerHandle, UpdateOptions, UpdateResult
from ductile.fleet.updates.weight_update import WeightUpdates
from ductile.messages.control import FleetRequest, FleetServer, FleetStatus, RunFailed, Unfit
from ductile.messages.control_token import token_of
from ductile.messages.updates import ServerState, TensorSpec, WeightCarrier, model_fingerprint
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.ending.run_until import Stopped, run_until
from ductile.roles import Failure, Late, Refused
from ductile.transport.deadlines import Deadlines

LOOK_S = 0.2
"""Seconds between two looks at whether a run that is to stop waits for servers."""
WAITED_SHARE = 0.9
"""Share of the time that who asks for a join waits, in which it is waited for: then there is time for the answer."""


def has_servers(config: RLConfig) -> bool:
    return bool(asked_servers(config).urls) or config.inference.registry is not None


class Servers:
    """`async with Servers(config, fleet, record, folder) as servers:`. Made in the run's event loop. Follows
    `ductile.fleet.requests.worker_pool.Delivery`: the run's generators have it bring versions to servers."""

    def __init__(self, config: RLConfig, fleet: RunRoles, record: Recorder, folder: Path, stop: asyncio.Event) -> None:
        """folder: the run's. stop: once set, nothing is waited for any more. Raises
        ImportPathError for a custom registry that cannot be imported."""
        client, inference = config.orchestrator.client, config.inference
        self._generators, self._stop = fleet.generators, stop
        self._api_key = secret_of(client.api_key, client.api_key_var)
        broadcast = config.trainer.weight_broadcast
        self._asked_carrier = broadcast.type if broadcast else None
        # Where the trainer's slots may be on any node, none of them is sure to share memory with a server.
        self._trainer_host = "" if has_several_nodes(config.cluster, config.ray) else host()
        self._deadlines = _deadlines(inference, client.timeout_s)
        self._max_num_seqs, self._record = inference.max_num_seqs, record
        spec = read_spec(config.trainer.model.name)
        self._vocab_size = spec.vocab_size if spec else None
        is_served = isinstance(inference.registry, HttpRegistry) and inference.registry.serve
        self._served = inference.registry if is_served else None
        self._registry = RememberedLeases(registry_of(inference.registry, self._tell))
        self._probe = HttpProbe(inference.detection_bound_s, lambda address: self._api_key)
        # Each sender has a store of its own, at a free port.
        self._rendezvous = f"{broadcast.host}:0" if isinstance(broadcast, NcclBroadcast) else ""
        options = update_options(config, folder, self._rendezvous)
        state = SharedFleetState()
        updates = self._updates = WeightUpdates(fleet.trainer, options, self._carrier, state.next_epoch)
        self._pool = PooledServers(fleet.generators, updates, fleet.trainer, self._handle)
        self._fleet = ElasticFleet(
            inference,
            self._pool,
            asked_servers(config).urls,
            self._registry,
            _authority(inference),
            self._probe,
            Deadlines.of(config.cluster).patience_s,
            self._tell,
            state,
        )
        fleet.generators.deliver_by(self)
        events = read_jsonl(folder / "events.jsonl")
        given = (row.get("digest") for row in events if row.get("kind") == "weights_updated")
        self._fleet.require(requirements_of(config), frozenset(each for each in given if each))
        self._fleet.on_change.add(self._on_change)
        self._pool.on_updated.add(self._on_updated)
        self._latest: UpdateResult | None = None
        self._choices: dict[str, CarrierChoice] = {}
        """Carriers that were chosen since the last version went out, by the servers' incarnations."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Servers":
        async with AsyncExitStack() as stack:
            if isinstance(self._served, HttpRegistry):
                await stack.enter_async_context(_serving(self._served))
            stack.push_async_callback(self._probe.close)
            stack.push_async_callback(self._pool.close)
            stack.push_async_callback(self._fleet.close)
            try:
                await run_until(self._fleet.start(), self._stop)
            except RegistryDown as error:
                raise Late(f"{error} (inference.registry)") from error
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _carrier(self, state: ServerState, only: WeightCarrier | None) -> WeightCarrier:
        try:
            choice = choose_carrier(
                self._trainer_host, state.host, state.carriers, self._asked_carrier, self._rendezvous, only
            )
        except ValueError as error:
            raise Refused(str(error)) from error
        self._choices[state.incarnation] = choice
        return choice.carrier

    async def deliver(self, version: int) -> KnownWeights:
        """Bring the trainer's weights to all servers (`ElasticFleet.update`), and return what was sent."""
        await self._fleet.update(version)
        return self._updates.known or KnownWeights(version)

    async def stuck(self) -> str:
        """Returns never: raises Stopped when the run is to stop, and waits for servers, so that no step would come to
        its end."""
        await self._stop.wait()
        while True:
            if self._fleet.is_waiting or (self._generators.num_waiting and not self._generators.instances):
                raise Stopped
            await asyncio.sleep(LOOK_S)

    @property
    def missing(self) -> str:
        return self._fleet.missing

    def counts(self) -> dict[str, float]:
        """Metrics of the run so far."""
        counted = {"servers": float(len(self._fleet.state.serving))}
        if self._latest is not None:
            latest = self._latest
            counted |= {
                "seconds/weight_update": latest.seconds,
                "seconds/weight_update_pause": latest.pause_s,
                "weight_update_attempts": float(latest.attempts),
                "servers_left_behind": float(len(latest.outcomes) - len(latest.committed)),
            }
        return counted

    # -- for those who ask the run (`ductile.orchestrator.control.live_run.AskServers`)

    def status(self) -> FleetStatus:
        state, now_s = self._fleet.state, time.monotonic()
        servers = tuple(
            FleetServer(
                server.instance,
                server.address,
                server.status,
                server.reason,
                now_s - server.since,
                server.version,
                self._pool.num_unfinished(server.instance),
            )
            for server in state.servers.values()
        )
        listed, barred = {each.address for each in state.servers.values()}, self._fleet.kept_out
        servers += tuple(
            FleetServer(address, address, "absent", why, 0.0)
            for address, why in self._fleet.absent.items()
            if address not in listed or address in barred
        )
        return FleetStatus(state.epoch, state.version, servers, self._pool.under_way)

    async def do(self, ask: FleetRequest) -> str:
        if ask.action == "list":
            return ""
        try:
            if ask.action == "join":
                return await self._join(with_scheme(ask.server), ask.timeout_s * WAITED_SHARE)
            return await self._leave(ask.server, "drain" if ask.action == "drain" else "now")
        except ValueError as error:
            raise Unfit(str(error)) from error

    async def _join(self, address: str, timeout_s: float) -> str:
        try:
            found = await self._fleet.join(address, timeout_s)
        except Failure as error:
            raise RunFailed(str(error)) from error
        return f"{found.instance} generates, with version {found.version}."

    async def _leave(self, server: str, mode: Literal["drain", "now"]) -> str:
        found = self._fleet.find(server)
        if found is None and (address := with_scheme(server)) in self._fleet.absent:
            self._fleet.deregister_server(address, mode)
            return f"{address} is not looked for any more."
        if found is None:
            known = sorted(each.instance for each in self._fleet.state.living)
            raise Unfit(f"{server} is none of the run's servers: {', '.join(known) or 'it has none'}")
        self._fleet.deregister_server(found.instance, mode)
        await self._fleet.settled()
        return f"{server} has left" + (" when it had finished what it had." if mode == "drain" else ".")

    # -- what the fleet tells

    def _tell(self, sentence: str) -> None:
        self._record.event(ServerNoted(sentence=sentence))

    def _on_change(self, before: ServerHealth | None, after: ServerHealth, epoch: int) -> None:
        was = before.status if before else ""
        why = after.reason.rstrip(".")
        match after.status:
            case "ready" if was in ("joining", "warming", ""):
                seconds = time.monotonic() - (before.since if before else after.since)
                version = after.version or 0
                sentence = f"Server {after.instance} generates, with version {version}."
                self._record.event(ServerJoined(after.instance, after.address, version, seconds, sentence=sentence))
            case "dead" | "gone":
                is_lost = after.status == "dead"
                sentence = f"Server {after.instance} {'is lost' if is_lost else 'has left'}: {why}."
                self._record.event(ServerLeft(after.instance, is_lost, sentence=sentence))
            case "joining" | "warming":
                pass
            case _:
                sentence = f"Server {after.instance} is {after.status}: {why}."
                self._record.event(ServerChanged(after.instance, was, after.status, sentence=sentence))

    def _on_updated(self, result: UpdateResult) -> None:
        servers = self._fleet.state.servers
        chosen = {name: self._choices.get(servers[name].incarnation) for name in result.carriers if name in servers}
        self._latest, self._choices = result, {}
        left = [f"{each.instance} is {each.outcome} ({each.reason})" for each in result.outcomes]
        left = [said for said, each in zip(left, result.outcomes, strict=True) if each.outcome != "committed"]
        num = len(result.committed)
        sentence = f"Version {result.version} is on {num} server{'s' * (num != 1)} after {result.seconds:.2f} s"
        self._record.event(
            WeightUpdateEnded(
                result.version,
                result.outcomes,
                result.attempts,
                result.seconds,
                result.pause_s,
                result.num_bytes,
                result.digest,
                result.num_bytes_unchanged,
                {name: choice for name, choice in chosen.items() if choice is not None},
                sentence=f"{'; '.join([sentence, *left])}." if left else "",
            )
        )

    def _handle(self, server: TopologyMember) -> ServerHandle[ServerPort]:
        """Raises ValueError where the address is none."""
        lease = self._registry.leases.get(server.address)
        token = self._api_key or token_of(server.address, lease.token_file if lease else "")
        port = ServerPort(
            server.address,
            self._api_key,
            token,
            self._deadlines,
            self._max_num_seqs,
            id=server.instance,
            vocab_size=self._vocab_size,
        )
        return ServerHandle(server.instance, port, server.address, token or "", server.incarnation)


def requirements_of(config: RLConfig) -> Requirements:
    """Return what the run's servers must have."""
    key = "inference.model.max_model_len" if config.seq_len is None else "seq_len"
    return Requirements(models_of(config), config.trainer.model.name or "", config.inference.model.max_model_len, key)


def models_of(config: RLConfig) -> tuple[str, ...]:
    """Return the fingerprints of the model that is trained, as a server may hold it: in any dtype, since only the
    version itself says which one takes its values. () where its folder does not say it."""
    model = config.trainer.model
    if (spec := read_spec(model.name)) is None:
        return ()
    if model.debug.num_layers is not None:
        spec = replace(spec, num_layers=model.debug.num_layers)
    spec = replace(spec, lora=model.adapters)
    return tuple(
        model_fingerprint((TensorSpec(each.name, dtype, each.shape) for each in parameters(spec)), spec.lora)
        for dtype in ("bfloat16", "float32", "float16")
    )


@asynccontextmanager
async def _serving(config: HttpRegistry) -> AsyncGenerator[None]:
    """Serve the registry in this event loop. Raises Refused where its address cannot be had."""
    address = urlsplit(config.url)
    app = registry_app(LeaseTable(config.ttl_seconds), secret_of(None, config.token_var))
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve_registry(app, address.hostname or "", address.port or 80))
        except OSError as error:
            raise Refused(
                f"inference.registry.url = {config.url} cannot be served here: {error.strerror}; another run may serve "
                "it (leave inference.registry.serve out then), or take another port"
            ) from error
        yield


class RememberedLeases:
    """A registry that remembers what it said last. Follows `ductile.fleet.registry.registries.Registry`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.leases: Leases = {}

    async def servers(self) -> Leases:
        self.leases = await self._registry.servers()
        return self.leases

    async def close(self) -> None:
        await self._registry.close()


def update_options(config: RLConfig, folder: Path, rendezvous: str) -> UpdateOptions:
    inference = config.inference
    join = inference.join_transport
    return UpdateOptions(
        bucket_bytes=inference.bucket_bytes,
        num_slots=inference.pipeline_slots,
        bucket_timeout_s=inference.update_bucket_timeout_seconds,
        total_timeout_s=inference.update_total_timeout_seconds,
        max_attempts=inference.update_max_attempts,
        verify=inference.verify,
        pause_mode=inference.pause_mode,
        # A commit may take so long, with what has become of it asked for: one that is not resumed waits no longer.
        pause_lease_s=inference.update_bucket_timeout_seconds + NUM_ASKED * inference.probe_timeout_seconds,
        probe_timeout_s=inference.probe_timeout_seconds,
        join_carrier=None if join == "auto" else join,
        folder=str((folder / "weights").absolute()),
        rendezvous=rendezvous,
    )


def _deadlines(config: FleetConfig, silence_s: float) -> ServerDeadlines:
    return ServerDeadlines(
        state_s=Deadline(config.probe_timeout_seconds, "inference.probe_timeout_seconds"),
        control_s=Deadline(config.update_bucket_timeout_seconds, "inference.update_bucket_timeout_seconds"),
        verify_s=Deadline(config.update_total_timeout_seconds, "inference.update_total_timeout_seconds"),
        silence_s=Deadline(silence_s, "orchestrator.client.timeout_s"),
    )


def _authority(config: FleetConfig) -> Authority | None:
    """Rule over the fleet of the config's registry; None where nobody else can find its servers there."""
    owner = uuid4().hex
    match config.registry:
        case FileRegistry() as registry:
            return FolderAuthority(Path(registry.folder).expanduser(), owner, registry.ttl_seconds)
        case HttpRegistry() as registry:
            token = secret_of(None, registry.token_var)
            return HttpAuthority(registry.url, token, owner, registry.ttl_seconds)
        case _:
            return None
