"""What a trainer's state consists of, under which names, and where each of its numbers lies.

    model/<parameter>            all parameters, those that are not trained among them
    exp_avg/<parameter>          what the optimizer keeps beside each trained one (`config.schema.optimizer_state`)
    gradient/<parameter>         what has been accumulated since the last optimizer step, if anything
    step, num_updates, sums      numbers: `ductile.records.TrainProgress`

No random state is part of it: nothing here draws random numbers after the weights are made. The learning rate follows
from the step, Adam's bias correction from the number of updates.
"""

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from ductile.config.schema.model import TrainerModelConfig
from ductile.config.schema.optimizer_state import optimizer_state
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.layout import Layout
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.strategy import block_columns, block_layout, model_layout
from ductile.core.layout.model.parameters import frozen_names
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.transfer.plan import Plan
from ductile.core.transfer.planning import Planner
from ductile.parallel.data import flat_shard, like
from ductile.trainer.trainer import Trainer

MODEL = "model/"
GRADIENT = "gradient/"
REMEMBERED_LAYOUTS = 32
"""Most layouts that are remembered; the least recently used one goes first."""


def named_state(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and moments: the trainer's own tensors, not copies. A write into them changes the state."""
    named: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        named[MODEL + name] = parameter.detach()
        for kept in trainer.optimizer_state.get(name, ()):
            if kept.layout != "scalar":
                named[f"{kept.name}/{name}"] = trainer.optimizer.state[name][kept.name]
    return named


def named_gradient(trainer: Trainer) -> dict[str, Tensor]:
    """The accumulated gradient, also not copies; empty when there is none."""
    parameters = trainer.model.named_parameters()
    return {GRADIENT + name: p.grad for name, p in parameters if p.grad is not None}


def set_gradient(trainer: Trainer, parts: Mapping[str, Tensor]) -> None:
    """Make this memory the accumulated gradient: this rank's parts, flat."""
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = like(parameter, parts[GRADIENT + name])


def device_of(model: TrainerModelConfig, name: str, device: str) -> str:
    """Return the device of a buffer of the state, by its name, on a slot that computes on `device`."""
    is_offloaded = model.optim_cpu_offload and not name.startswith((MODEL, GRADIENT))
    return "cpu" if model.fsdp_cpu_offload or is_offloaded else device


def parts_of(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each tensor, flat, sharing memory: what a `Layout` calls by the same name."""
    return {name: flat_shard(tensor) for name, tensor in named.items()}


class StatePlans:
    """Layouts of this model's state and plans between them, remembered: making one takes longer than using it."""

    def __init__(self, spec: ModelSpec, config: TrainerConfig) -> None:
        self._spec = spec
        self._dtype = config.model.optimization_dtype
        self._optim = config.optim
        self._block_columns = block_columns(spec)
        self._planners = {relays: Planner(relays=relays) for relays in (False, True)}
        self.layout = lru_cache(maxsize=REMEMBERED_LAYOUTS)(self._make)
        """Function that gives the layout of the state, with the gradient or without, on a `ParallelLayout`."""

    def plan(self, before: ParallelLayout, after: ParallelLayout, with_gradient: bool, relays: bool) -> Plan:
        """The plan from one layout to another. `relays`: slots may pass on what they have received."""
        return self._planners[relays].plan(self.layout(before, with_gradient), self.layout(after, with_gradient))

    def _make(self, parallel: ParallelLayout, with_gradient: bool) -> Layout:
        """Every copy is sharded as FSDP2 does it: rows in chunks, rounded up, the last ones short or empty."""
        parameters = model_layout(self._spec, parallel, self._dtype)
        kinds = {MODEL: [parameter.kind(MODEL, self._dtype) for parameter in parameters]}
        blocks: Layout | None = None
        frozen = frozen_names(self._spec)
        trained = [parameter for parameter in parameters if parameter.name not in frozen]
        for parameter in trained:
            columns = self._block_columns.get(parameter.name, 0)
            for kept in optimizer_state(self._optim, parameter.name, self._dtype, columns=columns):
                if kept.layout == "parameter":
                    kinds.setdefault(kept.name, []).append(parameter.kind(f"{kept.name}/", kept.dtype))
                elif kept.layout == "blocks":
                    blocks = blocks or block_layout(self._spec, parallel)
                    kinds.setdefault(kept.name, []).append(blocks[parameter.name].kind(f"{kept.name}/", kept.dtype))
        if with_gradient:
            kinds[GRADIENT] = [parameter.kind(GRADIENT, self._dtype) for parameter in trained]
        return Layout([tensor for of_kind in kinds.values() for tensor in of_kind], parameters.slots)
