"""The real loop, with simulated roles, in virtual time."""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ductile.core.rollouts.staleness import StalenessBound
from ductile.core.scheduling.facts.ledger import Activity, IdleCause, Ledger, Span
from ductile.core.scheduling.orders import Policy
from ductile.elastic.controller import ElasticController
from ductile.elastic.decision_log import ExecutedDecision
from ductile.elastic.step_accounting import StepAccounting
from ductile.observe import Recorder
from ductile.orchestrator.loop.assembly import assemble
from ductile.orchestrator.loop.buffer import Buffer
from ductile.orchestrator.loop.episode import Episodes
from ductile.orchestrator.loop.loop import Loop
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.orchestrator.loop.run_output import RunOutput
from ductile.orchestrator.loop.run_schedule import RunSchedule
from ductile.orchestrator.loop.sample_builder import SampleBuilder
from ductile.records import Sampling
from ductile.sim.clock import now_s, run
from ductile.sim.preempted import play, run_beside
from ductile.sim.preemptions import Preemption
from ductile.sim.scenario import Scenario
from ductile.sim.simulated_actuator import SimulatedActuator
from ductile.sim.simulated_roles import SimGenerators, SimScorer, SimTrainer
from ductile.sim.simulated_task import Blocks, NoGraders, SimulatedTask
from ductile.tasks.prompts import ExampleOrder, Prompts

PATIENCE_S = 1e7
"""Virtual seconds that the loop waits for groups: no simulated wait is too long."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out of a simulation. Seconds are virtual, but for `decide_s`."""

    wall_s: float
    num_slots: int
    step_s: tuple[float, ...]
    slot_seconds: float
    """Seconds of all slots together, without those in which they were gone."""
    totals: Mapping[Activity, float]
    """Slot-seconds by activity; they add up to `slot_seconds`."""
    idle: Mapping[IdleCause, float]
    changes: tuple[ExecutedDecision, ...]
    spans: tuple[Span, ...]
    num_rollouts: int
    num_tokens: int
    """Tokens that were trained on, of prompts and completions."""
    decide_s: tuple[float, ...]
    by_node: Mapping[int, Mapping[Activity, float]]
    """The same as `totals` for each node."""

    @property
    def idle_share(self) -> float:
        return self.totals.get("idle", 0.0) / max(1e-9, self.slot_seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


def simulate(
    scenario: Scenario, policy: Policy, folder: Path | None = None, preemptions: Sequence[Preemption] = ()
) -> Simulated:
    """Run the scenario to its end. folder: where `events.jsonl` and `metrics.jsonl` go; None keeps nothing.
    preemptions: slots that are taken away meanwhile, and come back.

    Raises BadDecision when the policy orders what cannot be, NotSurvived when slots cannot be emptied before they are
    taken away, and Deadlock when all tasks wait for ever.
    """
    if folder is not None:
        return run(_simulate(scenario, policy, folder, preemptions))
    with tempfile.TemporaryDirectory() as nowhere:
        return run(_simulate(scenario, policy, Path(nowhere), preemptions))


async def _simulate(scenario: Scenario, policy: Policy, folder: Path, preemptions: Sequence[Preemption]) -> Simulated:
    spans: list[Span] = []
    ledger, work = Ledger(spans.append), scenario.work
    record = Recorder(folder, clock=now_s)
    try:
        actuator = SimulatedActuator(scenario, ledger)
        controller = ElasticController(policy, actuator, record, rest_s=lambda took_s: scenario.coalesce_s)
        looping = _loop(scenario, actuator, controller, record).run()
        if preemptions:
            await run_beside(looping, play(preemptions, actuator, controller))
        else:
            await looping
    finally:
        record.close()
    ended_s = now_s()
    ledger.finish(ended_s)
    return Simulated(
        wall_s=ended_s,
        num_slots=scenario.placement.num_slots,
        slot_seconds=ledger.slot_seconds(ended_s),
        step_s=tuple(actuator.step_s),
        totals=ledger.totals(ended_s),
        idle=ledger.idle(ended_s),
        changes=tuple(controller.changes),
        spans=tuple(spans),
        num_rollouts=work.num_steps * work.rollouts_per_step,
        num_tokens=actuator.trained_tokens,
        decide_s=tuple(controller.decide_s),
        by_node=ledger.totals_by_node(scenario.topology, ended_s),
    )


def _loop(scenario: Scenario, actuator: SimulatedActuator, controller: ElasticController, record: Recorder) -> Loop:
    work, stop = scenario.work, asyncio.Event()
    generators, trainer = SimGenerators(actuator, controller), SimTrainer(actuator, controller)
    scorer = SimScorer(actuator, controller) if scenario.score else None
    num_prompts = work.num_steps * work.groups_per_step
    task, tokenizer = SimulatedTask(num_prompts, scenario.blocks(work.prompt_tokens)), Blocks()
    max_blocks = scenario.blocks(work.prompt_tokens) + scenario.blocks(work.max_tokens)
    schedule = RunSchedule(
        work.num_steps,
        StalenessBound(work.groups_per_step, work.max_async_level, work.max_off_policy_steps, work.on_stale),
        work.group_size,
        work.n_minibatches,
        max(1, work.seq_len // scenario.block_tokens),
    )
    prompts = Prompts(task, tokenizer, ExampleOrder(range(num_prompts), work.seed), max_blocks)
    buffer = Buffer(
        prompts, schedule.staleness, record, version=0, max_steps=work.num_steps, timeout_s=PATIENCE_S, stop=stop
    )
    episodes = Episodes({"train": task}, tokenizer, generators, NoGraders(), max_blocks)
    sampling = Sampling(max_tokens=scenario.blocks(work.max_tokens))
    rollouts = Rollouts(buffer, episodes, generators, sampling, work.group_size)
    accounting = StepAccounting(schedule.step_size(scores=scenario.score), buffer, rollouts)
    actuator.reads(accounting)
    actuator.engines.on_capacity.add(buffer.wake)
    actuator.on_wanted.add(controller.notify)
    for changed in (actuator.look_again, controller.notify):
        buffer.on_change.add(changed)
    sample_builder = SampleBuilder(scorer, drop_zero_advantage=False)
    output = RunOutput(record, schedule, buffer, tokenizer, clock=now_s)
    return assemble(schedule, trainer, rollouts, sample_builder, None, output, accounting, controller, stop)
