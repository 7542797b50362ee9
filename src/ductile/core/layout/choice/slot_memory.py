"""Whether a slot has the memory that training takes in a layout: `SlotMemory`.

What is needed is predicted (`ductile.core.layout.memory.predict`); what there is follows from the config
(`ductile.config.checks.trainer_layout.slot_memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.memory.parts import SlotUse
from ductile.core.layout.memory.predict import predict
from ductile.core.layout.model.spec import ModelSpec

USABLE = 0.9
"""Share of a device's memory that its roles may take; the rest goes to fragmentation and an allocator's rounding."""
DEFAULT_OPTIONS = MemoryOptions()


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """How a trainer keeps what it keeps, and how much memory a slot has for it."""

    room_bytes: int
    """Memory of a slot."""
    options: MemoryOptions = DEFAULT_OPTIONS
    least_bytes: int = 0
    """Bytes that a slot is taken to have in any case: those that the layouts need in which the run begins, and that
    were asked for by hand."""

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "SlotMemory":
        """The inverse of `dataclasses.asdict`. It reads what runs wrote before there were options, too."""
        own: dict[str, Any] = dict(fields)
        if "options" in own:
            own["options"] = MemoryOptions.from_fields(own["options"])
            return SlotMemory(**own)
        parameter_bytes = 4 if own["state_bytes"] >= 12 else 2
        options = MemoryOptions(
            parameter_bytes=parameter_bytes,
            compute_bytes=own["compute_bytes"],
            reduce_bytes=own["gradient_bytes"] or 4,
            optimizer_bytes=own["state_bytes"] - 2 * parameter_bytes,
            reduce_every_step=own["gradient_bytes"] > 0,
            reshard_after_forward=not own["keeps_gathered"],
        )
        return SlotMemory(own["room_bytes"], options, own["least_bytes"])

    def use(self, spec: ModelSpec, dims: ParallelDims, asked: AskedLayout) -> SlotUse:
        """Return what a slot takes in a layout of these sizes, where the rest is as asked."""
        return predict(spec, dims, self.options_of(asked))

    def options_of(self, asked: AskedLayout) -> MemoryOptions:
        """Return the options, with what is asked of a layout besides its sizes."""
        return replace(
            self.options,
            cp_style=asked.cp_style,
            pp_schedule=asked.pp_schedule,
            num_runs=asked.num_runs,
            seq_len=asked.seq_len,
        )

    def missing(self, needed_bytes: int) -> int:
        """Bytes of these that a slot does not have."""
        return max(0, needed_bytes - max(self.room_bytes, self.least_bytes))
