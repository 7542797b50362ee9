"""Turns a validated config into processes, and what becomes of them into an exit code.

One function for each command of the CLI that starts slots.

How a command ends, whatever happens to it, is `ductile.orchestrator.ending.supervise`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress

from rich.console import RenderableType

from ductile.cluster.cluster import Cluster
from ductile.cluster.local import ROLES
from ductile.cluster.make_cluster import make_cluster
from ductile.concurrency.deadline import Deadline
from ductile.config.checks.asked_placement import SlotsConfig, most_slots, placement_of, slots_per_node_of
from ductile.config.checks.asked_policy import policy_name, replaced_roles
from ductile.config.checks.serving_plan import router_of
from ductile.config.checks.trainer_layout import layout_rules
from ductile.config.schema.inference import shared_block_tokens
from ductile.config.schema.run import (
    InferenceRunConfig,
    OrchestratorRunConfig,
    RLConfig,
    RouterRunConfig,
    SFTConfig,
    TrainerRunConfig,
)
from ductile.config.schema.secrets import secret_of
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.instances.instances import Serving
from ductile.core.instances.placement import SPELLED, Placement
from ductile.core.layout.choice.layout_rules import layout_for
from ductile.core.layout.model.peak import arithmetic_of, compute_dtype
from ductile.core.scheduling.facts.cluster_state import first_instances, groups_of
from ductile.elastic.activity import SlotActivity
from ductile.elastic.drains import Drains
from ductile.elastic.loss_log import LossLog
from ductile.elastic.recovery import Recovery
from ductile.elastic.trainer_mover import TrainerMover
from ductile.elastic.trainer_resizer import TrainerResizer
from ductile.elastic.transaction import ResizeOptions
from ductile.events.slots import SlotStarted
from ductile.fleet.requests.assign_role import assign_role, begin_instances
from ductile.fleet.requests.generators import RemoteGenerators
from ductile.fleet.requests.instance_port import RoleSlots
from ductile.fleet.requests.scorer import RemoteScorer
from ductile.fleet.requests.weight_offers import WeightOffers
from ductile.fleet.run_roles import RunRoles
from ductile.fleet.servers.http_generators import HttpGenerators
from ductile.fleet.trainer.remote_trainer import RemoteTrainer, VersionReceivers
from ductile.messages.message import RoleName
from ductile.orchestrator.commands.bench import Bench
from ductile.orchestrator.commands.compose import Prepared, canaries_of, prepare, run_loop
from ductile.orchestrator.commands.going_back import START_CANCEL_S, C, P, RunAttempt, RunAttempts
from ductile.orchestrator.commands.rollout_only import PreparedRolloutOnly, prepare_rollout_only, run_rollout_only
from ductile.orchestrator.commands.routing import route_between, serve_several, with_key
from ductile.orchestrator.commands.run_context import RunContext
from ductile.orchestrator.commands.scheduling import Scheduling, limits_of
from ductile.orchestrator.commands.servers import Servers, has_servers
from ductile.orchestrator.commands.serving import become_server, bench_server
from ductile.orchestrator.commands.sft import PreparedBatches, prepare_fake, prepare_sft, run_batches
from ductile.orchestrator.commands.tracing import SlotTracer
from ductile.orchestrator.control.endpoint import Endpoint
from ductile.orchestrator.control.live_run import LiveRun
from ductile.orchestrator.ending.final_summary import batches_summary, rl_summary, rollout_only_summary
from ductile.orchestrator.ending.meaning import Beginning
from ductile.orchestrator.ending.run_until import SlotDied, Stopped, first_of, run_until
from ductile.orchestrator.ending.supervise import Session, supervise
from ductile.roles import Failure
from ductile.transport.deadlines import Deadlines


def run_rl(config: RLConfig) -> int:
    return supervise("rl", config, prepare, lambda prepared: prepared.schedule.max_steps, _rl, _began)


def run_sft(config: SFTConfig) -> int:
    return supervise("sft", config, prepare_sft, lambda prepared: prepared.max_steps, _batches, _began)


def run_trainer(config: TrainerRunConfig) -> int:
    return supervise("trainer", config, prepare_fake, lambda prepared: prepared.max_steps, _fake_batches)


def run_orchestrator(config: OrchestratorRunConfig) -> int:
    return supervise("orchestrator", config, prepare_rollout_only, lambda prepared: prepared.max_steps, _rollout_only)


def run_inference(config: InferenceRunConfig) -> int:
    config = config.model_copy(update={"server": with_key(config.server)})
    if config.bench is not None:
        return bench_server(config, config.bench)
    return become_server(config) if router_of(config) is None else serve_several(config)


def run_router(config: RouterRunConfig) -> int:
    return route_between(config.model_copy(update={"server": with_key(config.server)}))


def _began(prepared: Prepared | PreparedBatches) -> Beginning:
    return prepared.began


async def _rl(config: RLConfig, prepared: Prepared, session: Session) -> RenderableType:
    """Start the slots, and run the RL loop on them."""
    return await _on_slots(config, prepared, session, prepare, _live_rl)


async def _batches(config: SFTConfig, prepared: PreparedBatches, session: Session) -> RenderableType:
    """The trainer alone, on data that is there."""
    return await _on_slots(config, prepared, session, prepare_sft, _live_batches)


async def _fake_batches(config: TrainerRunConfig, prepared: PreparedBatches, session: Session) -> RenderableType:
    """The trainer alone, on made-up data."""
    return await _on_slots(config, prepared, session, prepare_fake, _live_batches)


async def _on_slots(
    config: C,
    prepared: P,
    session: Session,
    prepare: Callable[[C], P],
    live: Callable[[C, RunAttempt[P], Cluster, Session], Awaitable[RenderableType]],
) -> RenderableType:
    """Start the slots, and have the run live on them: once, and again from the last checkpoint when the trainer has
    lost some (`RunAttempts`)."""
    attempt = RunAttempt(prepared, placement_of(config), layout_rules(config), session.began_s)
    async with _slots(config, attempt.placement, prepared.trainer, session) as cluster:
        attempts = RunAttempts(config, cluster, session, prepare)
        while True:
            try:
                return await live(config, attempt, cluster, session)
            except Failure as failure:
                attempt = await attempts.after(attempt, failure)
                _announce(cluster, attempt.placement, session)


async def _live_rl(
    config: RLConfig, attempt: RunAttempt[Prepared], cluster: Cluster, session: Session
) -> RenderableType:
    """Give the slots their roles, and run the RL loop."""
    prepared, placement, stop = attempt.prepared, attempt.placement, session.interrupt.graceful
    activity = _activity(cluster, session)
    fleet = await run_until(_take_roles(config, attempt, cluster), stop, cluster.death())
    _begin_traces(config, cluster, session, lambda: fleet.trainer.layout.slots, prepared.progress.step)
    servers = Servers(config, fleet, session.record, session.folder, stop) if has_servers(config) else None
    async with _live(config, attempt, cluster, fleet.trainer, activity, session, fleet, servers) as (resizer, drains):

        async def change_over(slot: int) -> None:
            await activity.change_over(slot)
            await resizer.change_over(slot)

        recovery = Recovery(
            cluster,
            fleet,
            session.record,
            config.cluster.max_restarts,
            change_over,
            is_scheduled=config.cluster.auto_scheduler,
            replaced=replaced_roles(config.cluster),
            groups=lambda role: groups_of(role, placement, cluster.slots, limits_of(config)),
        )
        scheduling = Scheduling(
            config, prepared, cluster, fleet, resizer, recovery, activity, session.record, placement
        )
        scheduling.on_controller.add(drains.begin)
        context = _context(session, attempt.began_s, lambda: fleet.slots_by_role, resizer, cluster, drains, servers)
        device = next(iter(cluster.devices.values()))
        # They may not begin: then there is no loop.
        async with recovery, servers or nullcontext(), scheduling, drains:
            rl_loop = run_loop(
                prepared,
                fleet.trainer,
                fleet.generators,
                fleet.scorer,
                context,
                scheduling.begin,
                scheduling.spent,
                canaries_of(prepared, fleet.generators, fleet.trainer, fleet.scorer, device, session.record),
            )
            result = await run_until(rl_loop, session.interrupt.forced)
    return rl_summary(result)


async def _live_batches(
    config: SFTConfig | TrainerRunConfig, attempt: RunAttempt[PreparedBatches], cluster: Cluster, session: Session
) -> RenderableType:
    """Give the slots their role, and train on one batch after the other."""
    prepared, deadlines, activity = attempt.prepared, Deadlines.of(config.cluster), _activity(cluster, session)
    settings, layout = prepared.trainer.model_dump(mode="json"), layout_for(attempt.placement.train, attempt.rules)
    taking = assign_role(cluster.mailbox, "train", settings, [layout], deadlines.command_s, cluster.rendezvous)
    await run_until(taking, session.interrupt.graceful, cluster.death())
    trainer = RemoteTrainer(cluster.mailbox, layout, deadlines, prepared.chat_format)
    _begin_traces(config, cluster, session, lambda: trainer.layout.slots, prepared.progress.step)
    async with _live(config, attempt, cluster, trainer, activity, session) as (resizer, drains):
        drains.begin(TrainerMover(trainer, resizer))
        slots = lambda: {"train": trainer.layout.slots}  # noqa: E731
        context = _context(session, attempt.began_s, slots, resizer, cluster, drains)
        async with drains:
            summary = await run_until(run_batches(prepared, trainer, context), session.interrupt.forced)
    return batches_summary(summary, prepared.model_folder)


async def _rollout_only(
    config: OrchestratorRunConfig, prepared: PreparedRolloutOnly, session: Session
) -> RenderableType:
    """Rollouts from a server that is not the run's own."""
    client = config.client
    api_key = secret_of(client.api_key, client.api_key_var)
    async with HttpGenerators(client.urls, api_key, Deadline(client.timeout_s, "client.timeout_s")) as generators:
        running = run_rollout_only(prepared, generators, session.record, session.interrupt.graceful)
        summary = await run_until(running, session.interrupt.forced)
    return rollout_only_summary(summary, session.folder)


def _context(
    session: Session,
    began_s: float,
    slots: Callable[[], Mapping[str, Sequence[int]]],
    resizer: TrainerResizer,
    cluster: Cluster,
    drains: Drains,
    servers: Servers | None = None,
) -> RunContext:
    def counts() -> dict[str, float]:
        return {**resizer.metrics(), **(servers.counts() if servers else {})}

    async def death() -> str:
        return await first_of(cluster.death(), *([servers.stuck()] if servers else []))

    stop, save_soon = session.interrupt.graceful, drains.save_soon
    return RunContext(session.record, stop, slots, counts, death, save_soon, began_s)


def _roles(config: SlotsConfig, placement: Placement) -> dict[RoleName, str]:
    """The roles that a slot must know: where slots change roles, to train and to generate at least."""
    moving = ("train", "generate") if config.cluster.auto_scheduler else ()
    return {role: ROLES[role] for role in SPELLED if placement.of(role) or role in moving}


@asynccontextmanager
async def _slots(
    config: SlotsConfig, placement: Placement, trainer: TrainerConfig, session: Session
) -> AsyncGenerator[Cluster]:
    """The slots, which have no roles yet, from their start to their end.

    A benchmark measures the devices before the roles are taken (models leave little room to measure in, and what
    measuring takes is none of the run's memory), and asks for the memory that was used when all is done.
    """
    roles, per_node, bench = _roles(config, placement), slots_per_node_of(config, placement), session.bench
    tell = session.record.event
    cluster = make_cluster(placement.slots, config.cluster, session.folder, roles, per_node, tell, config.ray)
    try:
        await run_until(cluster.start(), session.interrupt.graceful, cancel_s=START_CANCEL_S)
        _announce(cluster, placement, session)
        if bench:
            await _begin(bench, trainer, cluster, session)
        yield cluster
        await _hear_the_slots(cluster, session)
    finally:
        await cluster.stop()


def _activity(cluster: Cluster, session: Session) -> SlotActivity:
    activity = SlotActivity(cluster.mailbox)
    activity.on_slot.add(session.view.on_slot)
    return activity


def _announce(cluster: Cluster, placement: Placement, session: Session) -> None:
    for slot in placement.slots:
        roles, device, pid = placement.roles(slot), cluster.devices[slot], cluster.processes[slot].pid
        sentence = f"Slot {slot} ({' and '.join(roles)}) runs on {device}, pid {pid}."
        session.record.event(SlotStarted(slot, roles, device, pid, sentence=sentence))


async def _begin(bench: Bench, trainer: TrainerConfig, cluster: Cluster, session: Session) -> None:
    device = next(iter(cluster.devices.values()))
    arithmetic = arithmetic_of(compute_dtype(trainer.model.compute_dtype, device), trainer.matmul_precision, device)
    await run_until(bench.begin(cluster.survey, arithmetic), session.interrupt.graceful, cluster.death())


def _begin_traces(
    config: SlotsConfig, cluster: Cluster, session: Session, train_slots: Callable[[], Sequence[int]], step: int
) -> None:
    """The slots have their roles. step: the last one that is done."""
    if session.tracing is None and session.bench is None:
        return
    tracer = SlotTracer(cluster.mailbox, Deadlines.of(config.cluster).command_s)
    if session.tracing:
        session.tracing.begin(tracer, lambda: cluster.slots, step)
    if session.bench:
        session.bench.trace(tracer, train_slots)


async def _hear_the_slots(cluster: Cluster, session: Session) -> None:
    """Wait for what slots say of the steps: how much memory they have taken, and their traces. It is not known where
    the user stops the run, or a slot dies, before they have replied."""
    with suppress(Stopped, SlotDied):
        for listener in (session.bench, session.tracing):
            if listener:
                await run_until(listener.wait_for_replies(), session.interrupt.graceful, cluster.death())


@asynccontextmanager
async def _live(
    config: SlotsConfig,
    attempt: RunAttempt[Prepared] | RunAttempt[PreparedBatches],
    cluster: Cluster,
    trainer: RemoteTrainer,
    activity: SlotActivity,
    session: Session,
    fleet: RunRoles | None = None,
    servers: Servers | None = None,
) -> AsyncGenerator[tuple[TrainerResizer, Drains]]:
    """Meanwhile the run serves `ductile status`, `ductile resize`, `ductile drain` and `ductile fleet`. fleet: has the
    trainer; None where there is nothing else."""
    command_s, trainer_config = Deadlines.of(config.cluster).command_s, attempt.prepared.trainer
    options = ResizeOptions(
        settings=trainer_config.model_dump(mode="json"),
        rendezvous=cluster.rendezvous,
        timeout_s=Deadline(trainer_config.resize.timeout_s, "trainer.resize.timeout_s"),
        leave_s=command_s,
        keeps_old=trainer_config.resize.memory == "shadow",
        patience_s=command_s,
    )
    resizer = TrainerResizer(cluster, trainer, options, session.record, most_slots(config), fleet, attempt.rules)
    attempt.trains_by(resizer)
    policy = policy_name(config.cluster) if config.cluster.auto_scheduler else ""
    drains = Drains(cluster, trainer, session.record, session.interrupt.graceful.is_set)
    live = LiveRun(session, cluster, trainer, activity, resizer, drains, policy, servers)
    with LossLog(cluster, resizer, session.record):
        async with Endpoint(session.folder, live.respond):
            yield resizer, drains


async def _take_roles(config: RLConfig, attempt: RunAttempt[Prepared], cluster: Cluster) -> RunRoles:
    """Give all slots their roles; they load their models at the same time."""
    mailbox, deadlines = cluster.mailbox, Deadlines.of(config.cluster)
    prepared, placement = attempt.prepared, attempt.placement
    timeout_s = deadlines.command_s
    generate = config.inference.model_dump(mode="json")
    train = score = prepared.trainer.model_dump(mode="json")
    layout = layout_for(placement.train, attempt.rules)
    instances = first_instances(placement, limits_of(config))
    generators = [each for each in instances if each.role == "generate"]
    scorers = [each for each in instances if each.role == "score"]
    await asyncio.gather(
        assign_role(mailbox, "train", train, [layout], timeout_s, cluster.rendezvous),
        begin_instances(mailbox, generators, generate, timeout_s),
        begin_instances(mailbox, scorers, score, timeout_s, cluster.rendezvous),
    )
    slots_get_versions = config.cluster.auto_scheduler or placement.generate or placement.score
    receivers: VersionReceivers = "slots" if not has_servers(config) else "both" if slots_get_versions else "servers"
    trainer = RemoteTrainer(mailbox, layout, deadlines, prepared.tokenizer.chat_format, receivers)
    offers = WeightOffers(trainer)
    num_seqs, block_tokens = config.inference.max_num_seqs, shared_block_tokens(config.inference)

    def slots_of(role: Serving, rendezvous: str = "") -> RoleSlots:
        return RoleSlots(mailbox, role, timeout_s, cluster.condemn, trainer.needs, rendezvous)

    return RunRoles(
        trainer,
        RemoteGenerators(slots_of("generate"), generators, num_seqs, block_tokens, deadlines, offers),
        RemoteScorer(slots_of("score", cluster.rendezvous), scorers, deadlines, offers) if scorers else None,
        {"generate": generate, "score": score},
    )
