"""`ductile simulate`: a cluster that need not exist, its work and its speeds."""

from typing import Annotated, Literal

from pydantic import Field

from ductile.config.schema.section import FilePath, ImportPath, Section
from ductile.core.rollouts.staleness import OnStale


class SimulatedCluster(Section):
    component_placement: dict[str, str | int | list[str | int]] = {"actor": "0-3", "rollout": "4-7"}
    """Roles to slots, as in `ductile rl`. A slot is what holds one generator: one device, or several that hold a model
    together; all speeds are of one slot."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that a generator runs at once."""
    min_train: int = Field(default=1, ge=1)
    """Slots that the trainer's state needs at the least."""
    slots_per_scorer: int = Field(default=1, ge=1)
    """Slots that hold one scorer together, as `scorer.tp` of a run; it must divide the number of `inference` slots."""
    layouts: list[str] = []
    """Layouts of the trainer by number of slots, as `trainer.resize.layouts`; other numbers are data-parallel. What tp,
    cp and pp cost is assumed (docs/simulator.md), or as a recorded run has measured it."""
    slots_per_node: int | None = Field(default=None, ge=1)
    """Slots of a node; they are numbered node by node. Absent: all slots are on one, or as a recorded run has them."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the slots are. On a CPU each has memory for the trainer's state and a generator; a GPU ("cuda") where the
    placement has `actor` and `rollout` share slots, as in a run."""
    enable_offload: bool = True
    """Train slots without memory for two roles may lend their devices to generators, as in a run; the trainer's state
    is in host memory meanwhile."""
    coalesce_s: float = Field(default=0.5, ge=0)
    """Seconds from one decision to the next at the least; events in between are looked at together."""


class LognormalLengths(Section):
    type: Literal["lognormal"] = "lognormal"
    median: float = Field(default=200.0, gt=0)
    sigma: float = Field(default=1.0, ge=0)


class RecordedLengths(Section):
    type: Literal["file"] = "file"
    path: FilePath
    """Lengths in tokens, one a line."""


LengthsConfig = Annotated[LognormalLengths | RecordedLengths, Field(discriminator="type")]


class SimulatedWork(Section):
    steps: int = Field(default=5, ge=1)
    prompts_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)
    prompt_tokens: int = Field(default=64, ge=1)
    max_tokens: int = Field(default=2048, ge=1)
    """Most tokens of one completion."""
    lengths: LengthsConfig = LognormalLengths()
    alike: float = Field(default=0.3, ge=0, le=1)
    """Share of a group's completions that are about equally long."""
    seq_len: int | None = Field(default=None, ge=1)
    """Tokens of a slot's micro-batch. Default: one prompt and the longest completion."""
    n_minibatches: int = Field(default=1, ge=1)
    max_async_level: int = Field(default=0, ge=0)
    max_off_policy_steps: int = Field(default=8, ge=0)
    on_stale: OnStale = "drop"
    """Fate of a group that takes longer, as `orchestrator.on_stale` says of a run."""


class SimulatedSpeeds(Section):
    """Speeds of one slot."""

    decode_step_s: float = Field(default=0.01, gt=0)
    """Seconds of a decode step, without what its sequences and their contexts add."""
    decode_per_sequence_s: float = Field(default=0.0005, ge=0)
    decode_per_context_s: float = Field(default=0.0, ge=0)
    """Seconds that each token in the KV cache adds to a decode step."""
    prefill_tokens_per_s: float = Field(default=10_000.0, gt=0)
    train_tokens_per_s: float = Field(default=1_000.0, gt=0)
    train_overhead: float = Field(default=0.02, ge=0)
    """Overhead of each further slot: `n` slots train `n / (1 + overhead (n - 1))` times as fast as one."""
    micro_step_s: float = Field(default=0.01, ge=0)
    score_tokens_per_s: float = Field(default=5_000.0, gt=0)
    optim_s: float = Field(default=0.1, ge=0)
    publish_s: float = Field(default=0.1, ge=0)
    receive_s: float = Field(default=0.1, ge=0)


class SimulatedCosts(Section):
    prepare_s: float = Field(default=0.0, ge=0)
    """Seconds from the decision to resize until the trainer is ready to; all slots work on meanwhile."""
    resize_s: float = Field(default=0.5, ge=0)
    assign_s: float = Field(default=0.5, ge=0)
    release_s: float = Field(default=0.1, ge=0)
    park_s: float = Field(default=0.1, ge=0)
    """Seconds in which the trainer's state leaves devices that are lent."""
    unpark_s: float = Field(default=0.1, ge=0)
    """Seconds in which it comes back."""
    migration_s: float = Field(default=0.01, ge=0)
    """Seconds that rollouts wait while they migrate, however many migrate at once."""
    cache_bytes_per_token: float = Field(default=0.0, ge=0)
    cache_bytes_per_s: float = Field(default=0.0, ge=0)
    """Bytes of KV cache that go from slot to slot in a second. 0: the cache stays, and what migrates is prefilled
    again."""
    resize_network_s: float = Field(default=0.0, ge=0)
    """Seconds that a resize takes more where its slots are on several nodes."""
    assign_network_s: float = Field(default=0.0, ge=0)
    """Seconds that a slot takes more to get a role where no slot of its node has the weights."""
    cache_network_bytes_per_s: float = Field(default=0.0, ge=0)
    """Bytes of KV cache that go to a slot of another node in a second. 0: as many as inside one."""


class SimulateConfig(Section):
    """`ductile simulate`: who would do what when, and how long would it take?"""

    output_dir: FilePath = "runs/simulated"
    seed: int = 0
    run: FilePath | None = None
    """The folder of a run: its slots, work, lengths, speeds and costs as it recorded them, where nothing is written."""
    arms: list[ImportPath] = ["best_static", "collocated", "rules", "rules_policies", "model"]
    """What to compare: static (the placement as it is), best_static (the best split into train and generate slots),
    collocated, rules, rules_policies (with both optional policies), model, or `package.module.Class` of your own. Arms
    with a policy begin where best_static does, if it is named before them; with `run` on the placement of the run."""
    cluster: SimulatedCluster = SimulatedCluster()
    work: SimulatedWork = SimulatedWork()
    speeds: SimulatedSpeeds = SimulatedSpeeds()
    costs: SimulatedCosts = SimulatedCosts()
