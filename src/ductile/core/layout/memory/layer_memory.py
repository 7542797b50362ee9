"""What one layer keeps for its backward pass, and the most that it needs in either pass.

A layer is a list of operations (`operations_of`), each with the tensors that it reads, makes and saves, as the model's
own modules have them (`model/transformer.py`, `kernels/`). What is kept follows from the list and the checkpointing; so
does the most that is live, by walking the list forward and back (`walk`).

The count of tensors is that of Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer
models", section 4), for RMSNorm, SwiGLU, grouped-query attention that keeps no scores, and kernels that save what they
read. What each saves:

| operation | saves |
|---|---|
| norm (`kernels/norm.py`) | what it normalises, and a scale a row |
| product | its input; of tp that of all tokens, gathered |
| heads (`kernels/heads.py`) | the projection, and a scale a head |
| attention (`kernels/cpu_attention.py`) | queries, keys, values, output, log-sum-exp |
| SwiGLU (`kernels/swiglu.py`) | gate and up |
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ductile.core.layout.memory.options import Checkpointing
from ductile.core.layout.memory.slot_shapes import SlotShapes

ROW_BYTES = 4
"""Bytes of the scale that a norm keeps for each row, and of a log-sum-exp: fp32."""
ADD = "add"
"""Operation whose gradient needs no memory of its own: it is that of both addends."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a layer. Tensors are known by name."""

    name: str
    reads: tuple[str, ...]
    makes: Mapping[str, int]
    """Bytes of each tensor that it makes; 0 for a view of one that it reads."""
    saves: tuple[str, ...] = ()
    """Tensors that its backward pass needs."""
    gradients: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes of the gradient of each tensor that it reads, where these differ from its own."""
    weight: int = 0
    """Bytes of its weight's gradient, as the backward pass makes it."""
    target: str = "norm"
    """Target of selective checkpointing that it belongs to."""
    is_product: bool = False
    forward_extra: int = 0
    """Bytes that it needs for itself while it runs."""
    backward_extra: int = 0
    cached: int = 0
    """Bytes of results that selective checkpointing never computes again: attention's."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one layer on one slot, for one micro-batch."""

    kept: tuple[int, ...]
    """Sizes of the tensors that it keeps from its forward pass to its backward pass, in the order of saving; its input
    is among them."""
    cached: int
    """Bytes of results that it keeps beside these, and that never leave the device."""
    forward: int
    """The most that is live in its forward pass, its input and what it keeps among it."""
    backward: int
    """The most that is live in its backward pass, its weights' gradients not among it."""
    weight_gradients: int
    """Bytes of all its weights' gradients."""
    backward_with_weights: int
    """The most that is live in its backward pass, its weights' gradients among it as far as they are made."""
    backward_with_one_weight: int
    """The same where each weight's gradient is added to another one as soon as it is made."""

    for_weights: int
    """Bytes of what products read, and of the gradients of what they make: what a schedule that makes gradients of
    weights later keeps until then."""

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept) + self.cached


@lru_cache(maxsize=4096)
def layer_memory(shapes: SlotShapes, checkpointing: Checkpointing | None) -> LayerMemory:
    """Return what a layer takes that does as `checkpointing` says."""
    return walk(operations_of(shapes), checkpointing)


def operations_of(shapes: SlotShapes) -> list[Operation]:
    """The operations of a layer on a slot, in the order of the forward pass."""
    c, tokens, spread = shapes.compute_bytes, shapes.tokens, shapes.spread_tokens
    hidden, rows = spread * shapes.hidden_size * c, spread * ROW_BYTES
    q, k, v = (count * shapes.head_dim * tokens * c for count in (*shapes.heads, shapes.heads[1]))
    gate = tokens * shapes.intermediate_size * c
    num_turned = tokens * (shapes.heads[0] + shapes.heads[1])
    widened = num_turned * shapes.head_dim * 4 if shapes.device == "cuda" else 0
    attention, joined = _attention(shapes, q, k, v)
    is_cut = shapes.tp > 1
    """Whether tokens are gathered before products, and sums are dealt out behind them."""
    normed, normed2 = ("normed_all", "normed2_all") if is_cut else ("normed", "normed2")
    attended, mlp = ("attended_all", "mlp_all") if is_cut else ("attended", "mlp")
    return [
        Operation("attention_norm", ("x",), {"residual": 0, "normed": hidden, "scale": rows}, ("x", "scale"),
                  {"x": hidden}),
        *_gather(shapes, "normed", "attn_proj"),
        Operation("qkv_proj", (normed,), {"qkv": q + k + v}, (normed,), weight=shapes.qkv_weight * c,
                  target="attn_proj", is_product=True),
        Operation("split_heads", ("qkv",), {"turned": q + k, "v": 0, "scales": num_turned * ROW_BYTES},
                  ("qkv", "scales"), target="attn_proj", forward_extra=4 * widened, backward_extra=5 * widened),
        *attention,
        Operation("o_proj", (joined,), {attended: shapes.summed_bytes}, (joined,), weight=shapes.o_weight * c,
                  target="attn_proj", is_product=True),
        *_reduce_scatter(shapes, "attended", "attn_proj"),
        Operation("mlp_norm", ("residual", "attended"), {"total": hidden, "normed2": hidden, "scale2": rows},
                  ("total", "scale2"), {"residual": hidden, "attended": 0}),
        *_gather(shapes, "normed2", "mlp"),
        Operation("gate_up_proj", (normed2,), {"gate_up": 2 * gate}, (normed2,), weight=shapes.gate_up_weight * c,
                  target="mlp", is_product=True),
        Operation("swiglu", ("gate_up",), {"gated": gate}, ("gate_up",), target="mlp",
                  backward_extra=gate if shapes.device == "cuda" else 0),
        Operation("down_proj", ("gated",), {mlp: shapes.summed_bytes}, ("gated",), weight=shapes.down_weight * c,
                  target="mlp", is_product=True),
        *_reduce_scatter(shapes, "mlp", "mlp"),
        Operation(ADD, ("total", "mlp"), {"y": hidden}, (), {"total": 0, "mlp": 0}),
    ]  # fmt: skip


def _attention(shapes: SlotShapes, q: int, k: int, v: int) -> tuple[list[Operation], str]:
    """The operations between the heads and the product behind attention, and the tensor that this product reads."""
    c, extra, cached = shapes.compute_bytes, _kernel_extra(shapes, q, k, v), q
    lse = shapes.tokens * shapes.heads[0] * ROW_BYTES
    if shapes.cp == 1 or shapes.cp_style == "ring":
        if shapes.cp > 1:  # every block's output is one of its own, and sums are in fp32
            cached = q * (2 * shapes.cp + 1) // 2
            extra = (q // c * 4 + 3 * (k + v), 2 * (q + k + v) // c * 4 + 3 * (k + v))
        run = Operation(
            "attention",
            ("turned", "v"),
            {"out": q, "lse": lse},
            ("turned", "qkv", "out", "lse"),
            {"v": v},
            target="attn_proj",
            forward_extra=extra[0],
            backward_extra=extra[1],
            cached=cached + lse,
        )
        return [run], "out"  # fmt: skip
    shared = shapes.exchanged_keys / shapes.heads[1]
    exchanged = q + int((k + v) * shared)
    run = [
        Operation("exchange", ("turned", "v"), {"exchanged": exchanged}, (), {"v": v}, target="attn_proj",
                  forward_extra=2 * exchanged, backward_extra=2 * exchanged),
        Operation("attention", ("exchanged",), {"out": q, "lse": lse}, ("exchanged", "out", "lse"), target="attn_proj",
                  forward_extra=extra[0], backward_extra=extra[1], cached=q + lse),
        Operation("exchange_back", ("out",), {"joined": q}, (), target="attn_proj", forward_extra=2 * q,
                  backward_extra=2 * q),
    ]  # fmt: skip
    return run, "joined"


def _kernel_extra(shapes: SlotShapes, q: int, k: int, v: int) -> tuple[int, int]:
    """Bytes that attention's kernel has for itself, forward and backward. On a CPU results are copied to their places;
    on a GPU the flash kernel adds up the queries' gradients in fp32, and those of a key a query head."""
    if shapes.device == "cpu":
        return q, q + k + v
    return 0, q // shapes.compute_bytes * 4 + (2 * q if shapes.heads[0] > shapes.heads[1] else 0)


def _gather(shapes: SlotShapes, tensor: str, target: str) -> list[Operation]:
    """All tokens of a tensor of which slots along tp have a part each."""
    if shapes.tp == 1:
        return []
    return [Operation("gather", (tensor,), {f"{tensor}_all": shapes.summed_bytes}, target=target)]


def _reduce_scatter(shapes: SlotShapes, tensor: str, target: str) -> list[Operation]:
    """The slot's part of a sum over tp. On a CPU every other slot's addend has memory of its own."""
    if shapes.tp == 1:
        return []
    part = shapes.spread_tokens * shapes.hidden_size * shapes.compute_bytes
    extra = part * (shapes.tp - 1) if shapes.device == "cpu" else 0
    return [Operation("reduce_scatter", (f"{tensor}_all",), {tensor: part}, target=target, forward_extra=extra)]


def walk(operations: Sequence[Operation], checkpointing: Checkpointing | None) -> LayerMemory:
    """Run a layer's operations forward and back, and count."""
    regions = _regions(operations, checkpointing)
    sizes = {"x": next(iter(operations[0].gradients.values()))}
    for operation in operations:
        sizes |= operation.makes
    kept, cached = _kept(operations, regions, checkpointing)
    of_kept = {name: sizes[name] for name in kept}
    forward = _forward_peak(operations, sizes, of_kept)
    cached_bytes = sum(cached.values())
    without, with_weights, with_one = _backward_peaks(operations, sizes, regions, of_kept, cached)
    return LayerMemory(
        kept=tuple(size for size in of_kept.values() if size),
        cached=cached_bytes,
        forward=forward + cached_bytes,
        backward=without,
        weight_gradients=sum(operation.weight for operation in operations),
        backward_with_weights=with_weights,
        backward_with_one_weight=with_one,
        for_weights=sum(
            sizes[name]
            for operation in operations
            if operation.is_product
            for name in (*operation.reads, *operation.makes)
        ),
    )


def _regions(operations: Sequence[Operation], checkpointing: Checkpointing | None) -> list[range]:
    """Runs of operations that are run again as one."""
    if checkpointing is None:
        return []
    if checkpointing.mode == "full" or "norm" in checkpointing.targets:
        return [range(len(operations))]
    found: list[range] = []
    for target in ("attn_proj", "mlp"):
        numbers = [number for number, operation in enumerate(operations) if operation.target == target]
        if target in checkpointing.targets:
            found.append(range(numbers[0], numbers[-1] + 1))
    return found


def _kept(
    operations: Sequence[Operation], regions: Sequence[range], checkpointing: Checkpointing | None
) -> tuple[list[str], dict[int, int]]:
    """Names of the tensors that are kept, in the order of saving; and bytes of cached results by operation."""
    kept: dict[str, None] = {}
    cached: dict[int, int] = {}
    for number, operation in enumerate(operations):
        region = next((region for region in regions if number in region), None)
        if region is None:
            kept |= dict.fromkeys(operation.saves)
            continue
        if number == region.start:
            kept |= dict.fromkeys(operation.reads)
        if checkpointing is None or checkpointing.mode == "full":
            continue
        if operation.cached:
            cached[number] = operation.cached
        elif operation.is_product and operation.target not in checkpointing.targets:
            cached[number] = sum(operation.makes.values())
    return [name for name in kept if name != "y"], cached


def _forward_peak(operations: Sequence[Operation], sizes: Mapping[str, int], kept: Mapping[str, int]) -> int:
    """The most that is live while operations run, of tensors that are kept, or that a later operation reads."""
    last_reader = {name: number for number, operation in enumerate(operations) for name in operation.reads}
    made, peak = {"x"}, 0
    for number, operation in enumerate(operations):
        made |= operation.makes.keys()
        live = {name for name in made if name in kept or last_reader.get(name, -1) >= number} | operation.makes.keys()
        peak = max(peak, sum(sizes[name] for name in live) + operation.forward_extra)
    return peak


def _backward_peaks(
    operations: Sequence[Operation],
    sizes: Mapping[str, int],
    regions: Sequence[range],
    kept: Mapping[str, int],
    cached: Mapping[int, int],
) -> tuple[int, int, int]:
    """The most that is live in the backward pass: without weights' gradients, with all that are made so far, and with
    that of the operation that runs alone."""
    waiting = _waiting(operations, regions)
    live, results = dict(kept), sum(cached.values())
    gradients = {"y": sizes["y"]}
    peaks, made_weights = [0, 0, 0], 0
    for number in reversed(range(len(operations))):
        operation = operations[number]
        region = next((region for region in regions if number == region.stop - 1), None)
        if region is not None:
            live |= {name: sizes[name] for each in region for name in operations[each].saves}
            # A cached result is the tensor that is saved again, or goes, but for the last one, which nothing asks for.
            results -= sum(cached.get(each, 0) for each in region if each != region.stop - 1)
        new = {name: operation.gradients.get(name, sizes[name]) for name in operation.reads}
        now = sum(live.values()) + sum(gradients.values()) + results + sum(new.values()) + operation.backward_extra
        made_weights += operation.weight
        for which, weights in enumerate((0, made_weights, operation.weight)):
            peaks[which] = max(peaks[which], now + weights)
        if operation.name == ADD:  # its gradient is that of both addends
            new["total"] = gradients["y"]
        for name in operation.makes:
            gradients.pop(name, None)
        for name, size in new.items():
            gradients[name] = max(gradients.get(name, 0), size)
        for name in operation.saves:
            waiting[name] -= 1
            if not waiting[name]:
                live.pop(name, None)
    return peaks[0], peaks[1], peaks[2]


def _waiting(operations: Iterable[Operation], regions: Sequence[range]) -> dict[str, int]:
    """How many operations' backward passes need each tensor."""
    waiting: dict[str, int] = {}
    for operation in operations:
        for name in operation.saves:
            waiting[name] = waiting.get(name, 0) + 1
    return waiting
