"""How much memory a slot needs to train, by part, from a model's spec, a layout and a trainer's options: `predict`.

predict(spec, ParallelDims(dp_shard=8), options).device
    MemoryParts(parameters=..., gradients=..., optimizer=..., gathered=..., activations=..., logits=..., ...)

It is the one estimate of the planner ("auto"), of `ductile check` and of `ductile fit`. It counts bytes of tensors, as
a run's own count does (`benchmarks/memory.py` compares the two): an allocator's rounding and fragmentation are not in
it, but in the share of a device that counts as usable (`ductile.core.layout.choice.slot_memory.USABLE`).
"""

from functools import lru_cache

from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.memory.parts import SlotUse
from ductile.core.layout.memory.step_memory import slot_use
from ductile.core.layout.model.spec import ModelSpec


@lru_cache(maxsize=4096)
def predict(spec: ModelSpec, dims: ParallelDims, options: MemoryOptions) -> SlotUse:
    """Return what a slot takes at its worst moment: of all stages, the one whose slots need most on the device.

    Raises ValueError for a layout that the model cannot have, such as one of more stages than layers.
    """
    uses = [slot_use(spec, dims, options, stage) for stage in range(dims.pp)]
    return max(uses, key=lambda use: use.device.total)
