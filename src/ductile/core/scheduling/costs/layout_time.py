"""How long an optimizer step takes in a layout, with the knobs that save memory: predicted from the model's operations
and from a device's speeds, before anything runs.

    speed = SlotSpeed.of_device("NVIDIA H100 80GB HBM3")
    layout_time(spec, ParallelDims(dp_shard=8), options, 64, speed).step_s

A step has so many samples, each of them a full micro-batch. Its time is

1. computing: forward and backward operations (`core.layout.model.flops`), and again what checkpointing computes twice,
   at the speed of the slots that work together on a micro-batch (`cost.assumed_rank_speed`), with the pipeline's bubble
2. collectives of FSDP2: weights are gathered for the forward pass, and once more for the backward pass unless they are
   kept; gradients are summed. Each is as fast as the slowest link of its group: that between nodes, where ranks lie
   node by node and the group is on several (`SlotSpeed.slots_per_node`). Likewise cp; messages of pp count as nothing
3. copies between device and host memory, by the knobs that keep something there
4. the optimizer, which reads and writes each parameter and its state

On a GPU 2 and 3 run beside 1, and only what is longer than computing counts; where they take the same cores, they add
up. It is for comparing layouts: how fast a device really is, is measured by a run (`SlotSpeed.tokens_per_s`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from ductile.core.layout.geometry.node_order import is_inside
from ductile.core.layout.geometry.parallel_layout import ParallelDims, RankShape
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.layout.geometry.topology import NETWORK_BYTES_S, NODE_BYTES_S
from ductile.core.layout.memory.layer_memory import layer_memory
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.memory.slot_shapes import slot_shapes
from ductile.core.layout.model.flops import ForwardWork, forward_flops, layer_matrix_parameters
from ductile.core.layout.model.peak import Arithmetic, known_peak
from ductile.core.layout.model.spec import ModelSpec
from ductile.core.scheduling.costs.cost import ASSUMED_OVERHEADS, assumed_rank_speed

REACHED = 0.4
"""Share of a GPU's peak that training reaches on one slot: prime-rl's published runs have 26 % to 54 % on H100
and H200, most of them near 40 %."""
ELEMENTWISE = 0.04
"""Share of a forward pass that norms, rotations and SwiGLU take, which all checkpointing does once more."""
HIDDEN = 0.95
"""Share of a collective or of a copy that computing hides, where they run beside each other."""


class HostSpeeds(NamedTuple):
    """Speeds of the machine around a device, in bytes a second."""

    link_bytes_per_s: float = NODE_BYTES_S
    """Collectives among slots of one node."""
    network_bytes_per_s: float = NETWORK_BYTES_S
    """Collectives among slots of several nodes, for each slot."""
    copy_bytes_per_s: float = 25e9
    """Between device and pinned host memory: PCIe 4 x16, and half of PCIe 5's."""
    memory_bytes_per_s: float = 2e12
    """The device's own memory: an optimizer step is bound by it."""
    host_memory_bytes_per_s: float = 50e9
    """Host memory, where the optimizer runs with `fsdp_cpu_offload`."""


GPU_MACHINE = HostSpeeds()


@dataclass(frozen=True, slots=True)
class SlotSpeed:
    """How fast a slot is, and what moves bytes to and from it."""

    flops_per_s: float = 0.0
    """Operations a second that products reach, on one slot."""
    tokens_per_s: float = 0.0
    """Tokens that one slot alone trains on per second, without checkpointing, as measured; 0: `flops_per_s` says it."""
    machine: HostSpeeds = GPU_MACHINE
    overlaps: bool = True
    """Whether collectives and copies run beside computing."""
    message_s: float = 0.0
    """Seconds that a collective takes however small it is."""
    slots_per_node: int | None = None
    """Slots of a node; None: all share one."""
    slots_per_core: float = 1.0
    """Slots that share a core of a CPU, where there are more of them than cores: one that waits for another stage
    leaves its time to the others. `flops_per_s` and `tokens_per_s` are those of a slot that has its share."""
    rank_speeds: tuple[tuple[RankShape, float], ...] = ()
    """How many times as fast as one slot those of a data-parallel rank are, in a full message, where it was measured;
    elsewhere it is assumed."""

    @staticmethod
    def of_device(name: str, arithmetic: Arithmetic = "bfloat16") -> "SlotSpeed | None":
        """The speed of a known device; None where it is not known (`core.layout.model.peak`)."""
        peak = known_peak(name, arithmetic)
        return None if peak is None else SlotSpeed(flops_per_s=peak * REACHED)

    def rank_speed(self, shape: RankShape) -> float:
        return dict(self.rank_speeds).get(shape) or assumed_rank_speed(shape)

    def link_bytes_per_s(self, reach: int, num_slots: int) -> float:
        """Bytes a second of a group that reaches over so many neighbouring ranks of a layout on so many slots."""
        inside = is_inside(reach, num_slots, self.slots_per_node)
        return self.machine.link_bytes_per_s if inside else self.machine.network_bytes_per_s


@dataclass(frozen=True, slots=True)
class LayoutTime:
    """Seconds of an optimizer step, and what they are made of: parts that run beside others are there in full."""

    step_s: float
    compute_s: float
    collectives_s: float
    copies_s: float
    optimizer_s: float


def layout_time(
    spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, num_samples: int, speed: SlotSpeed
) -> LayoutTime:
    """Return the time of a step of so many samples of `options.seq_len` tokens each."""
    micro_batches = -(-num_samples // dims.num_data_parallel)
    compute_s = _compute_s(spec, dims, options, micro_batches, speed)
    collectives_s = _collectives_s(spec, dims, options, micro_batches, speed)
    copies_s = _copies_s(spec, dims, options, micro_batches, speed)
    state_s = _state_copies_s(spec, dims, options, micro_batches, speed)
    optimizer_s = _optimizer_s(spec, dims, options, speed)
    beside = [compute_s, collectives_s, copies_s]
    hidden_s = HIDDEN * (sum(beside) - max(beside)) if speed.overlaps else 0.0
    step_s = sum(beside) - hidden_s + state_s + optimizer_s
    return LayoutTime(step_s, compute_s, collectives_s, copies_s + state_s, optimizer_s)


def recomputed_share(spec: ModelSpec, options: MemoryOptions) -> float:
    """Share of a forward pass that checkpointing computes once more."""
    checkpointing = options.checkpointing
    if checkpointing is None:
        return 0.0
    work = ForwardWork.of([options.seq_len], [[]], options.seq_len)
    whole = forward_flops(spec, work)
    layers = whole - 2 * spec.vocab_size * spec.hidden_size * work.num_scored
    if checkpointing.mode == "full":
        share = layers / whole
    else:
        mlp = 3 * spec.hidden_size * spec.intermediate_size
        of_layer = {"mlp": mlp, "attn_proj": layer_matrix_parameters(spec) - mlp}
        again = sum(of_layer.get(target, 0) for target in checkpointing.targets)
        share = 2 * spec.num_layers * again * work.num_tokens / whole + ELEMENTWISE
    num_layers = -(-spec.num_layers // checkpointing.freq)
    return share * num_layers / spec.num_layers


def _compute_s(
    spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, micro_batches: int, speed: SlotSpeed
) -> float:
    work = ForwardWork.of([options.seq_len], [[]], options.seq_len)
    if speed.tokens_per_s:
        one_slot_s = options.seq_len / speed.tokens_per_s
    else:
        one_slot_s = _passes(spec) * forward_flops(spec, work) / speed.flops_per_s
    one_slot_s *= 1 + recomputed_share(spec, options) / _passes(spec)
    one_slot_s *= _slower_across(dims, speed)
    pipeline = PipelineShape(dims.pp, options.num_runs)
    without_bubble = speed.rank_speed(dims.rank_shape) / (1 - pipeline.bubble(pipeline.full_message))
    seconds = 0.0
    for size in pipeline.messages(micro_batches):
        waits = 1 / (1 - pipeline.bubble(size))
        seconds += size * one_slot_s / without_bubble * max(1.0, waits / speed.slots_per_core)
    return seconds


def _slower_across(dims: ParallelDims, speed: SlotSpeed) -> float:
    """How many times as long computing takes because groups of tp and cp are on several nodes: what an axis is assumed
    to cost grows as links are slower."""
    factor = 1.0
    for axis, reach in (("tp", dims.tp), ("cp", dims.cp * dims.tp)):
        slower = speed.machine.link_bytes_per_s / speed.link_bytes_per_s(reach, dims.num_slots)
        lost = ASSUMED_OVERHEADS[axis] * (getattr(dims, axis) - 1)
        factor *= (1 + lost * slower) / (1 + lost)
    return factor


def _collectives_s(
    spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, micro_batches: int, speed: SlotSpeed
) -> float:
    shards, copies = dims.dp_shard * dims.cp, dims.dp_replicate
    if shards * copies == 1:
        return 0.0
    of_slot = spec.num_parameters / (dims.pp * dims.tp)
    messages = _num_reductions(dims, options, micro_batches)
    gathers = messages * (2 if options.reshard_after_forward and dims.pp == 1 else 1)
    sums = 1 if options.reduce_every_step else messages
    around = (shards - 1) / shards
    trained = of_slot * _trained_share(spec)
    moved = gathers * of_slot * options.compute_bytes * around + sums * trained * options.reduce_bytes * around
    of_copies = sums * 2 * trained / shards * options.reduce_bytes * (copies - 1) / copies
    units, reach = spec.num_layers / dims.pp + 1, shards * dims.tp
    seconds = moved / speed.link_bytes_per_s(reach, dims.num_slots)
    seconds += of_copies / speed.link_bytes_per_s(reach * copies, dims.num_slots)
    return seconds + (gathers + sums) * units * speed.message_s


def _num_reductions(dims: ParallelDims, options: MemoryOptions, micro_batches: int) -> int:
    """Number of times that parameters are gathered and gradients summed: with pp once for a whole schedule."""
    return len(PipelineShape(dims.pp, options.num_runs).messages(micro_batches)) if dims.pp > 1 else micro_batches


def _copies_s(
    spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, micro_batches: int, speed: SlotSpeed
) -> float:
    """Seconds of copies of activations to host memory and back, which run beside computing."""
    if options.offloaded_in_flight is None:
        return 0.0
    shapes, checkpointing = slot_shapes(spec, dims, options), options.checkpointing
    share = 0.0 if checkpointing is None else 1 / checkpointing.freq
    of_layer = share * sum(layer_memory(shapes, checkpointing).kept) + (1 - share) * sum(
        layer_memory(shapes, None).kept
    )
    moved = 2 * micro_batches * of_layer * spec.num_layers / dims.pp
    return moved / speed.machine.copy_bytes_per_s


def _state_copies_s(
    spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, micro_batches: int, speed: SlotSpeed
) -> float:
    """Seconds of copies of parameters, gradients and the optimizer's state, for which computing waits."""
    shard, moved = _num_shard(spec, dims), 0.0
    if options.optim_cpu_offload:
        # One bucket comes while another one goes back.
        moved += shard * _trained_share(spec) * options.optimizer_bytes
    if options.fsdp_cpu_offload:
        gathers = 2 if options.reshard_after_forward and dims.pp == 1 else 1
        each = gathers + _trained_share(spec)  # gradients are those of what is trained
        moved += _num_reductions(dims, options, micro_batches) * shard * options.parameter_bytes * each
    return moved / speed.machine.copy_bytes_per_s


def _optimizer_s(spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, speed: SlotSpeed) -> float:
    """Seconds in which an optimizer step reads and writes a shard's state; gradients are read twice, for their norm."""
    moved = _num_shard(spec, dims) * _trained_share(spec) * (4 * options.parameter_bytes + 2 * options.optimizer_bytes)
    machine = speed.machine
    return moved / (machine.host_memory_bytes_per_s if options.fsdp_cpu_offload else machine.memory_bytes_per_s)


def _trained_share(spec: ModelSpec) -> float:
    """Share of the parameters that training changes."""
    return spec.num_trained / spec.num_parameters


def _passes(spec: ModelSpec) -> float:
    """Forward passes whose operations a forward and a backward pass have: gradients are of inputs and of weights, and
    of frozen weights there are none."""
    return 2 + _trained_share(spec)


def _num_shard(spec: ModelSpec, dims: ParallelDims) -> float:
    """Parameters of a slot's shard."""
    return spec.num_parameters / (dims.pp * dims.tp * dims.dp_shard * dims.cp)
