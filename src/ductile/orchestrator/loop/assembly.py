"""Puts a loop together from the parts that runs, simulations and tests have each for themselves:

buffer     = Buffer(prompts, staleness bound)          which groups are under way, which may be trained on
rollouts   = Rollouts(buffer, episodes, generators)    prompt -> GenerateRequests -> RolloutGroup -> buffer
accounting = StepAccounting(..., buffer, rollouts)     how far a step is, for the controller
output     = RunOutput(record, buffer, saver, ...)     metrics, samples, checkpoints
await assemble(schedule, trainer, rollouts, SampleBuilder(scorer), ...).run()
"""

import asyncio

from ductile.elastic.controller import ElasticController
from ductile.elastic.step_accounting import StepAccounting
from ductile.events.phases import StepListeners
from ductile.orchestrator.loop.evaluate import Evaluation
from ductile.orchestrator.loop.loop import Loop, PausableTrainer
from ductile.orchestrator.loop.publisher import ElasticPublisher, Publisher
from ductile.orchestrator.loop.rollouts import Rollouts
from ductile.orchestrator.loop.run_output import RunOutput
from ductile.orchestrator.loop.run_schedule import RunSchedule
from ductile.orchestrator.loop.sample_builder import SampleBuilder


def assemble(
    schedule: RunSchedule,
    trainer: PausableTrainer,
    rollouts: Rollouts,
    sample_builder: SampleBuilder,
    evaluation: Evaluation | None,
    output: RunOutput,
    accounting: StepAccounting,
    controller: ElasticController | None,
    stop: asyncio.Event,
) -> Loop:
    """controller: moves slots between roles; None: slots keep the roles that they have.
    stop: as `Loop` has it."""
    if controller is None:
        listeners = StepListeners(accounting, output)
        publisher = Publisher(trainer, rollouts, sample_builder.scorer, listeners)
    else:
        listeners = StepListeners(accounting, output, controller)
        publisher = ElasticPublisher(trainer, rollouts, sample_builder.scorer, listeners, controller)
    return Loop(schedule, trainer, rollouts, sample_builder, publisher, evaluation, output, listeners, stop)
