"""What a run writes down of itself so that `ductile plan`, `ductile report` and the simulator can say what it did.

`events.jsonl` has them as fields of two kinds of events: one `Setting` ("setting") when the slots have their roles, and
one `StepProfile` ("profile") a step. Both are plain values; `as_fields` and `from_fields` are each other's inverse.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ductile.core.instances.instances import Instance, instances_from
from ductile.core.instances.placement import Placement
from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_rules import NO_RULES, LayoutRules
from ductile.core.layout.geometry.parallel_layout import ONE_SLOT, ParallelDims, ParallelLayout, RankShape
from ductile.core.rollouts.staleness import OnStale
from ductile.core.scheduling.costs.cost import DecodeSpeed, Speeds, SwitchCosts, TrainSpeed
from ductile.core.scheduling.facts.cluster_state import Limits, first_instances
from ductile.core.scheduling.facts.ledger import Span

FORMAT = 3
"""Number of the events' format: 1 had slots where 2 has instances, and did not say its number; 2 had the sizes of the
trainer's axes where 3 has the rules by which they follow from the number of slots."""
COSTS_OF_FORMAT_1 = {"grant_s": "assign_s", "handoff_s": "migration_s"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run has to do, and what it began with."""

    home: Placement
    limits: Limits
    policy: str
    """Name of the policy, such as "static", "rules" or "model", or an import path."""
    num_steps: int
    groups_per_step: int
    group_size: int
    max_tokens: int
    """Most tokens of one completion."""
    seq_len: int
    n_minibatches: int = 1
    max_async_level: int = 0
    max_off_policy_steps: int = 8
    on_stale: OnStale = "drop"
    block_size: int = 16
    """Tokens of a KV cache block that sequences share; 0 where they share none."""
    use_pre_process_policy: bool | None = None
    """`cluster.use_pre_process_policy` as configured; None when it was not."""
    use_wait_before_last_iter_policy: bool | None = None
    """`cluster.use_wait_before_last_iter_policy` as configured; None when it was not."""
    on_gpu: bool = False
    """Whether the slots are GPUs: which roles may share one then follows from the placement (`state.may_share`)."""
    share_devices: bool | None = None
    """`cluster.share_devices` as configured; None when it was not."""
    offloads: bool = False
    """Train slots may lend their devices, with the trainer's state in host memory meanwhile."""
    instances: tuple[Instance, ...] = ()
    """Generators and scorers that the run begins with."""
    layout: ParallelLayout = ONE_SLOT
    """The trainer's layout at the start."""
    rules: LayoutRules = NO_RULES
    """Which layout the trainer has on any number of slots."""
    version: int = FORMAT
    """Format of the events that follow this one in events.jsonl."""

    def as_fields(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "Setting":
        """Raises KeyError or TypeError when something is missing, and ValueError for a format that is newer."""
        own = _only(Setting, {"version": 1, **fields})
        if own["version"] > FORMAT:
            raise ValueError(f"format {own['version']}, and this ductile reads formats 1 to {FORMAT}")
        home: dict[str, Any] = dict(own["home"])
        home |= {role: tuple(home[role]) for role in ("train", "generate", "score")}
        own |= {"home": Placement(**home), "limits": Limits(**own["limits"])}
        if own["version"] == 1:
            own["instances"] = first_instances(own["home"], own["limits"])  # each slot of a role was one
            own["layout"] = ParallelLayout.of(own["home"].train)
        else:
            own["instances"] = instances_from(own["instances"])
            layout = own["layout"]
            dims = ParallelDims(**layout["dims"])
            own["layout"] = ParallelLayout(tuple(layout["slots"]), dims, tuple(layout["stages"]))
        if "rules" in own:
            own["rules"] = LayoutRules.from_fields(own["rules"])
        else:
            own["rules"] = LayoutRules(asked=AskedLayout().like(own["layout"].dims))
        return Setting(**own)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step as it was. Times are seconds since the run's slots had their roles; the first step begins at 0."""

    step: int
    """Number of the step that was finished; 1 is the first."""
    start_s: float
    end_s: float
    spans: tuple[Span, ...]
    """Spans of all slots that ended in this step; the run's spans, all steps together, cover slots x time."""
    lengths: tuple[int, ...]
    """Tokens of each completion that ended in this step."""
    prompt_tokens: float
    """Tokens of a prompt, on average."""
    speeds: Speeds
    """Speeds as measured by the end of this step."""
    costs: SwitchCosts
    num_switches: int = 0
    """Decisions that were carried out in this step."""

    def as_fields(self) -> dict[str, Any]:
        spans = [(s.slot, round(s.start_s, 4), round(s.end_s, 4), s.activity, s.cause) for s in self.spans]
        return {**asdict(self), "spans": spans}

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "StepProfile":
        """Raises KeyError or TypeError when something is missing."""
        own = _only(StepProfile, fields)
        speeds: dict[str, Any] = dict(own["speeds"])
        train = dict(speeds["train"])
        rank_speeds = tuple((RankShape(*shape), speed) for shape, speed in train.pop("rank_speeds", ()))
        speeds |= {
            "decode": DecodeSpeed(**speeds["decode"]),
            "train": TrainSpeed(**train, rank_speeds=rank_speeds),
        }
        # JSON has no infinity: a run without a scorer has no speed of scoring.
        if speeds.get("score_tokens_per_s") is None:
            speeds["score_tokens_per_s"] = float("inf")
        own |= {
            "spans": tuple(Span(*span) for span in own["spans"]),
            "lengths": tuple(own["lengths"]),
            "speeds": Speeds(**speeds),
            "costs": SwitchCosts(**{COSTS_OF_FORMAT_1.get(name, name): value for name, value in own["costs"].items()}),
        }
        return StepProfile(**own)


def _only(kind: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `kind` has: an event's line also has its time, kind and sentence."""
    return {name: fields[name] for name in kind.__dataclass_fields__ if name in fields}
