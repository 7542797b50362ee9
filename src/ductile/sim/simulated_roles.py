"""The loop's roles in virtual time. They follow the Protocols of `ductile.roles`; seconds are
`core.scheduling.costs.cost`'s.

The loop counts tokens in blocks (`Scenario.block_tokens`); time is reckoned in tokens.
"""

import asyncio
import heapq
from collections.abc import Sequence
from typing import Literal

from ductile.columns import Floats, TokenIds, Versions
from ductile.core.instances.instances import slots_on
from ductile.core.instances.routing import predicted_tokens
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.rollouts.provenance import KnownWeights
from ductile.elastic.controller import ElasticController
from ductile.elastic.step_accounting import SamplesInFlight
from ductile.records import GenerateRequest, Generation, Manifest, Sample, StepReport
from ductile.sim.simulated_actuator import SimulatedActuator
from ductile.sim.simulated_engine import SimulatedRequest


class SimGenerators:
    def __init__(self, actuator: SimulatedActuator, controller: ElasticController) -> None:
        self._actuator, self._controller = actuator, controller
        self._num_finished = self._finished_tokens = 0
        actuator.engines.on_finished.add(self._on_finished)

    @property
    def capacity(self) -> int:
        return self._actuator.engines.capacity

    async def generate(self, request: GenerateRequest) -> Generation:
        actuator, scenario = self._actuator, self._actuator.scenario
        mean = self._finished_tokens / self._num_finished if self._num_finished else None
        simulated = SimulatedRequest(
            request,
            prompt_tokens=scenario.work.prompt_tokens,
            num_tokens=scenario.work.length(request.group, request.id),
            predicted_tokens=predicted_tokens(scenario.work.max_tokens, 0, mean),
            completion=asyncio.get_running_loop().create_future(),
            flips=[(0, actuator.live_version)],
        )
        await actuator.engines.start(simulated)
        try:
            await simulated.completion
        except asyncio.CancelledError:
            actuator.engines.abort(simulated)
            raise
        num_blocks = scenario.blocks(simulated.num_tokens)
        return Generation(
            request.id,
            TokenIds.full(num_blocks, 1),
            Floats.full(num_blocks, -1.0),
            _versions(simulated, num_blocks, scenario.block_tokens),
            "length" if simulated.num_tokens >= scenario.work.max_tokens else "stop",
        )

    async def receive(self, manifest: Manifest) -> KnownWeights:
        actuator = self._actuator
        seconds = actuator.scenario.speeds.receive_s
        slots = slots_on(actuator.instances_of("generate"))
        actuator.engines.stall(slots, seconds)
        await actuator.busy("publish", slots, seconds)
        actuator.now_live(manifest.version)
        return KnownWeights.of(manifest)

    def _on_finished(self, requests: Sequence[SimulatedRequest]) -> None:
        for simulated in requests:
            self._num_finished += 1
            self._finished_tokens += simulated.num_tokens
            if not simulated.completion.done():
                simulated.completion.set_result(None)
        self._controller.notify()


class SimTrainer:
    def __init__(self, actuator: SimulatedActuator, controller: ElasticController) -> None:
        self._actuator, self._controller = actuator, controller
        self.pause = actuator.pause

    @property
    def num_ranks(self) -> int:
        return self._actuator.layout.num_data_parallel

    @property
    def micro_batches_per_rank(self) -> int:
        return PipelineShape.of(self._actuator.layout).full_message

    async def forward_backward(self, samples: Sequence[Sample], seq_len: int) -> None:
        """Micro-step by micro-step, on the slots that the trainer has at each."""
        actuator, block = self._actuator, self._actuator.scenario.block_tokens
        left = sorted((len(sample) for sample in samples), reverse=True)
        actuator.on_given(SamplesInFlight(len(left), sum(left)))
        while left:
            await actuator.pause.over.wait()
            await actuator.lent.over.wait()  # a policy that lends the devices knows that training waits
            async with actuator.boundary:
                if actuator.pause.begun.is_set() or actuator.lent.begun.is_set():
                    continue
                slots = actuator.layout.slots
                pipeline, shape = PipelineShape.of(actuator.layout), actuator.layout.dims.rank_shape
                done, left, tokens = _message(left, self.num_ranks, seq_len, pipeline)
                seconds = actuator.scenario.speeds.train.seconds(tokens * block, self.num_ranks, shape)
                actuator.engines.stall(slots, seconds)
                await actuator.busy("train", slots, seconds)
                actuator.on_trained(SamplesInFlight(len(done), sum(done)))
            self._controller.notify()

    async def optim_step(self, loss_denominator: float) -> StepReport:
        actuator = self._actuator
        if loss_denominator == 0:
            return StepReport(actuator.num_updates, loss=0.0, grad_norm=0.0, lr=0.0, num_tokens=0)
        async with actuator.with_state():
            await actuator.busy("train", actuator.layout.slots, actuator.scenario.speeds.optim_s)
        actuator.on_updated()
        self._controller.notify()
        return StepReport(actuator.num_updates, loss=0.0, grad_norm=0.0, lr=0.0, num_tokens=int(loss_denominator))

    async def publish(self, version: int) -> Manifest:
        actuator = self._actuator
        async with actuator.with_state():
            await actuator.busy("publish", actuator.layout.slots, actuator.scenario.speeds.publish_s)
        actuator.now_published(version)
        return Manifest(version, "shared_memory", "nowhere", 0, 0, ())

    async def withdraw(self, version: int) -> None:
        pass

    async def save(self, path: str) -> None:
        pass

    async def load(self, path: str) -> None:
        pass

    async def export(self, path: str, dtype: str) -> None:
        pass


class SimScorer:
    def __init__(self, actuator: SimulatedActuator, controller: ElasticController) -> None:
        self._actuator, self._controller = actuator, controller

    async def score(self, samples: Sequence[Sample], model: Literal["policy", "reference"]) -> list[Floats]:
        actuator = self._actuator
        scorers = await actuator.scorers()
        tokens = sum(map(len, samples)) * actuator.scenario.block_tokens
        seconds = tokens / (actuator.scenario.speeds.score_tokens_per_s * len(scorers))
        await actuator.busy("score", slots_on(scorers), seconds)
        self._controller.notify()
        return [Floats.full(len(sample), 0.0) for sample in samples]

    async def receive(self, manifest: Manifest) -> KnownWeights:
        slots = slots_on(self._actuator.instances_of("score"))
        await self._actuator.busy("publish", slots, self._actuator.scenario.speeds.receive_s)
        return KnownWeights.of(manifest)


def _message(
    lengths: Sequence[int], num_ranks: int, seq_len: int, pipeline: PipelineShape
) -> tuple[list[int], list[int], float]:
    """One micro-step: samples in it, samples left, and tokens of a full message that takes as long. With pp it is
    several rows, or fewer that packing has split, as long as there are samples for that.

    lengths: descending, in the unit of `seq_len`.
    """
    if pipeline.pp == 1:
        return _row(lengths, num_ranks, seq_len)
    rows: list[tuple[list[int], int]] = []
    left = [*lengths]
    while left:
        samples, left, longest = _row(left, num_ranks, seq_len)
        rows.append((samples, longest))
    in_message = rows[: pipeline.messages(len(rows))[0]]
    done = [length for samples, _ in in_message for length in samples]
    per_rank = max(len(in_message), min(pipeline.full_message, len(done) // num_ranks))
    tokens = sum(longest for _, longest in in_message) * pipeline.stretch(per_rank)
    return done, [*lengths[len(done) :]], tokens


def _row(lengths: Sequence[int], num_ranks: int, seq_len: int) -> tuple[list[int], list[int], int]:
    """A micro-batch for each rank: (samples in it, samples left, the fullest rank's tokens). The longest sample goes
    first, to the emptiest rank.

    lengths: descending, in the unit of `seq_len`.
    """
    filled = [0] * num_ranks
    done: list[int] = []
    for place, length in enumerate(lengths):
        if filled[0] and filled[0] + length > seq_len:
            # Shorter ones may still fit, but are as many as the next micro-step wants.
            return done, [*lengths[place:]], max(filled)
        heapq.heapreplace(filled, filled[0] + length)
        done.append(length)
    return done, [], max(filled)


def _versions(simulated: SimulatedRequest, num_blocks: int, block_tokens: int) -> Versions:
    """The weight version of each block."""
    if len(simulated.flips) == 1:
        return Versions.full(num_blocks, simulated.flips[0][1])
    versions: list[int] = []
    for (tokens, version), (until, _) in zip(
        simulated.flips, [*simulated.flips[1:], (simulated.num_tokens, -1)], strict=True
    ):
        versions += [version] * (round(until / block_tokens) - round(tokens / block_tokens))
    versions += [simulated.flips[-1][1]] * (num_blocks - len(versions))
    return Versions(versions[:num_blocks])
