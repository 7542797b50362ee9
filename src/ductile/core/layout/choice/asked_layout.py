"""What is asked of a trainer's layout: the sizes of its axes, some of which the planner chooses.

AskedLayout(tp="auto", cp=2)                   dp_shard is what the slots leave
AskedLayout().sized({"pp": 2, "tp": 2})        a whole layout: what is not named has size 1
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ductile.core.layout.geometry.context_parallel import CpStyleAsked
from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.geometry.pipeline_schedule import PipelineSchedule

Auto = Literal["auto"]


@dataclass(frozen=True, slots=True)
class AskedLayout:
    """The fields are called like the keys of `trainer.model`, but for `dp_shard`, which has none: only a whole layout
    (`ductile.core.layout.choice.layout_text`) says it."""

    pp: int | Auto = 1
    dp_replicate: int = 1
    dp_shard: int | None = None
    """Shards of a copy; None: what the slots leave."""
    cp: int = 1
    tp: int | Auto = 1
    cp_style: CpStyleAsked = "auto"
    pp_schedule: PipelineSchedule = "1f1b"
    vpp: int | Auto = "auto"
    """Runs of layers on each slot of pp. "auto": 2 where the schedule is "interleaved", else 1."""
    seq_len: int = 2048
    """Most tokens of a micro-batch."""

    @property
    def num_runs(self) -> int:
        """Runs of layers on each slot of pp."""
        if self.vpp == "auto":
            return 2 if self.pp_schedule == "interleaved" else 1
        return self.vpp

    def sized(self, sizes: Mapping[str, int]) -> "AskedLayout":
        """What is asked, with a whole layout: axes that `sizes` lacks have size 1, and `dp_shard` what the slots
        leave."""
        alone = replace(self, pp=1, dp_replicate=1, dp_shard=None, cp=1, tp=1)
        return replace(alone, **sizes)

    def like(self, dims: ParallelDims) -> "AskedLayout":
        """What is asked, with the sizes that a layout has, on any number of slots."""
        return replace(self, pp=dims.pp, dp_replicate=dims.dp_replicate, dp_shard=None, cp=dims.cp, tp=dims.tp)


DATA_PARALLELISM = AskedLayout()
"""A request for FSDP over all slots."""
