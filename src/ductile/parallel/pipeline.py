"""Pipeline parallelism: each slot has the layers of its stage, and hidden states go from stage to stage.

`torch.distributed.pipelining` has the schedules: which micro-batch a slot runs next, forward or backward. Its stages
know the shape of one micro-batch, or find it out by running it. Here every micro-batch has a size of its own, which all
slots of a data-parallel rank know, as they have the whole micro-batch; only hidden states travel. So nothing is padded,
and stages and schedule are made for each list of micro-batches. What that takes of torch's private parts is in
`parallel.torch_pipelining`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.pipeline_schedule import PipelineSchedule, num_to_run, runs_of_layers
from ductile.core.layout.model.spec import ModelSpec
from ductile.model.transformer import Transformer
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.scoring import ModelInputs
from ductile.parallel.torch_pipelining import HAS_ZERO_BUBBLE, Schedule, VirtualStage

StageLoss = Callable[[int, Tensor, Tensor], Tensor]
"""Function of a micro-batch's number, its log-probs and its entropies that gives its loss, to be minimised."""


def layers_of_slot(spec: ModelSpec, parallel: ParallelLayout, slot: int) -> tuple[int, ...]:
    """Numbers of the layers that a slot has. Raises ValueError for stages that no schedule takes."""
    return tuple(layer for layers in _runs_of_slot(spec, parallel, slot).values() for layer in layers)


def _runs_of_slot(spec: ModelSpec, parallel: ParallelLayout, slot: int) -> dict[int, range]:
    """Layers of the slot's runs, by number of the run."""
    stage, pp = parallel.coordinates(slot)["pp"], parallel.dims.pp
    runs = runs_of_layers(parallel, spec.num_layers)
    return {number: layers for number, layers in enumerate(runs) if number % pp == stage}


def check_schedule(schedule: PipelineSchedule) -> None:
    """Raise ValueError where this version of torch has not what the schedule needs, also while nothing is a pipeline: a
    resize may make one."""
    if schedule == "zero_bubble" and not HAS_ZERO_BUBBLE:
        raise ValueError(
            f'trainer.model.pp_schedule = "zero_bubble" needs torch 2.13 (this is {torch.__version__}): "1f1b" and '
            '"interleaved" do not'
        )


class Pipeline:
    """A slot's place in the pipeline of its data-parallel rank. All slots of the pipeline call the same methods."""

    def __init__(
        self,
        model: Transformer,
        context: ParallelContext,
        schedule: PipelineSchedule,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`model` has the layers of this slot's runs. `dtype` is that of hidden states."""
        self._model, self._dtype, self._device = model, dtype, device
        self._schedule: PipelineSchedule = schedule
        self._group = context.send_recv_group("pp")
        self._pp, self._runs = context.layout.dims.pp, _runs_of_slot(model.spec, context.layout, context.slot)
        self._num_runs = self._pp * len(self._runs)
        self.has_loss = self._num_runs - 1 in self._runs
        """Whether this slot has the last stage, and with it the loss."""

    def num_to_run(self, num_micro_batches: int) -> int:
        """How many micro-batches `run` takes, at least so many."""
        return num_to_run(num_micro_batches, self._pp, len(self._runs), self._schedule)

    def run(self, micro_batches: Sequence[ModelInputs], loss: StageLoss) -> None:
        """Run the micro-batches, at least one, forward and backward, and add to the gradients, divided by nothing.
        Collective.

        `loss` is called once for each, in the last stage.
        """
        number = len(micro_batches)
        hidden = [(inputs.num_hidden, self._model.spec.hidden_size) for inputs in micro_batches]
        stages = [
            VirtualStage(
                _ModelPart(self._model, layers, micro_batches),
                index,
                self._num_runs,
                hidden,
                self._dtype,
                self._device,
                self._group,
            )
            for index, layers in self._runs.items()
        ]
        schedule = self._make_schedule(stages, number, lambda scores, which: loss(int(which), *scores))
        which = torch.arange(number)  # torch splits it, and so each stage is told the number of its micro-batch
        schedule.step(micro_batch=which, target=which, return_outputs=False)

    def _make_schedule(
        self, stages: Sequence[VirtualStage], number: int, loss: Callable[[tuple[Tensor, Tensor], Tensor], Tensor]
    ) -> Schedule:
        if self._schedule == "zero_bubble":
            return ScheduleInterleavedZeroBubble([*stages], number, loss, scale_grads=False)
        if len(stages) > 1:
            return ScheduleInterleaved1F1B([*stages], number, loss, scale_grads=False)
        # With fewer micro-batches than stages 1F1B is GPipe, and torch asks for the latter.
        kind = Schedule1F1B if number >= self._pp else ScheduleGPipe
        return kind(stages[0], number, loss, scale_grads=False)


class _ModelPart(nn.Module):
    """A run of layers of the slot's model, as torch's stage calls it. It is no module of FSDP2's, which torch's
    schedules thus leave alone."""

    def __init__(self, model: Transformer, layers: range, micro_batches: Sequence[ModelInputs]) -> None:
        super().__init__()
        self.model, self._layers, self._micro_batches = model, layers, micro_batches

    def forward(self, *hidden: Tensor, micro_batch: Tensor) -> Tensor:
        inputs = self._micro_batches[int(micro_batch)]
        x = hidden[0] if hidden else inputs.token_ids
        return self.model(x, inputs.positions, inputs.attend, inputs.head, self._layers)
