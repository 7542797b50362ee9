"""The operations of one layer on a slot, each with the tensors that it reads, makes and saves for its backward pass, as
the model's own modules and kernels have them.

| operation | saves |
|---|---|
| norm (`kernels/norm.py`) | what it normalises, and a scale a row |
| product | its input, if its weight or an adapter's is trained; of tp that of all tokens, gathered |
| adapter (`model/linear.py`) | what its A makes |
| heads (`kernels/heads.py`) | the projection, and a scale a head |
| attention (`kernels/cpu_attention.py`) | queries, keys, values, output, log-sum-exp |
| SwiGLU (`kernels/swiglu.py`) | gate and up |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ductile.core.layout.memory.slot_shapes import SlotShapes

ROW_BYTES = 4
"""Bytes of the scale that a norm keeps for each row, and of a log-sum-exp: fp32."""
BLOCKS = (1024, 512, 256, 128, 64, 32, 16)
"""Rows of which a CPU multiplies so many at a time: `kernels.products.BLOCKS`."""
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
    views: int = 0
    """Bytes of what its backward pass needs that is a view of what another one saves: offloaded, it has a copy
    of its own."""


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
    operations = [
        Operation("attention_norm", ("x",), {"residual": 0, "normed": hidden, "scale": rows}, ("x", "scale"),
                  {"x": hidden}),
        *_gather(shapes, "normed", "attn_proj"),
        _product(shapes, "attention.qkv_proj", normed, {"qkv": q + k + v}, shapes.qkv_weight),
        Operation("split_heads", ("qkv",), {"turned": q + k, "v": 0, "scales": num_turned * ROW_BYTES},
                  ("qkv", "scales"), target="attn_proj", forward_extra=4 * widened, backward_extra=5 * widened),
        *attention,
        _product(shapes, "attention.o_proj", joined, {attended: shapes.summed_bytes}, shapes.o_weight),
        *_reduce_scatter(shapes, "attended", "attn_proj"),
        Operation("mlp_norm", ("residual", "attended"), {"total": hidden, "normed2": hidden, "scale2": rows},
                  ("total", "scale2"), {"residual": hidden, "attended": 0}),
        *_gather(shapes, "normed2", "mlp"),
        _product(shapes, "mlp.gate_up_proj", normed2, {"gate_up": 2 * gate}, shapes.gate_up_weight),
        Operation("swiglu", ("gate_up",), {"gated": gate}, ("gate_up",), target="mlp",
                  backward_extra=gate if shapes.device == "cuda" else 0),
        _product(shapes, "mlp.down_proj", "gated", {mlp: shapes.summed_bytes}, shapes.down_weight),
        *_reduce_scatter(shapes, "mlp", "mlp"),
        Operation(ADD, ("total", "mlp"), {"y": hidden}, (), {"total": 0, "mlp": 0}),
    ]  # fmt: skip
    return [*_in_blocks(operations, shapes)]


def _product(shapes: SlotShapes, module: str, read: str, makes: Mapping[str, int], weight: int) -> Operation:
    """The product of a module such as "mlp.down_proj", with so many numbers in its weight. An adapter adds what it
    makes to it."""
    adapter, name = shapes.adapter_of(module), module.partition(".")[2]
    target = "attn_proj" if module.startswith("attention") else "mlp"
    if not shapes.adapters:
        return Operation(name, (read,), makes, (read,), weight=weight * shapes.compute_bytes, target=target,
                         is_product=True)  # fmt: skip
    if adapter is None:
        return Operation(name, (read,), makes, target=target, is_product=True)
    low = f"low_{name}"
    return Operation(
        name,
        (read,),
        {**makes, low: shapes.tokens * adapter.down[0] * shapes.compute_bytes},
        (read, low),
        weight=adapter.num_elements * shapes.compute_bytes,
        target=target,
        is_product=True,
        forward_extra=sum(makes.values()),
    )


def _in_blocks(operations: Sequence[Operation], shapes: SlotShapes) -> Iterator[Operation]:
    """The operations, where a product has a block of rows beside the whole of its result while it is put together, as
    it is on some CPUs (`kernels/products.py`)."""
    sizes = {name: size for operation in operations for name, size in operation.makes.items()}
    block = next((rows for rows in BLOCKS if rows <= shapes.tokens), 0)
    is_cut = shapes.device == "cpu" and shapes.compute_bytes == 4 and shapes.tokens not in BLOCKS
    for operation in operations:
        if not (operation.is_product and is_cut):
            yield operation
            continue
        made, read = sum(operation.makes.values()), sum(sizes[name] for name in operation.reads)
        yield replace(
            operation,
            forward_extra=operation.forward_extra + made * block // shapes.tokens,
            backward_extra=read * block // shapes.tokens,
        )


def _attention(shapes: SlotShapes, q: int, k: int, v: int) -> tuple[list[Operation], str]:
    """The operations between the heads and the product behind attention, and the tensor that this product reads."""
    c, extra = shapes.compute_bytes, _kernel_extra(shapes, q, k, v)
    lse = shapes.tokens * shapes.heads[0] * ROW_BYTES
    if shapes.cp == 1 or shapes.cp_style == "ring":
        kept_by_selective = q + lse
        if shapes.cp > 1:  # sums are in fp32, and what they are of is not kept by selective checkpointing
            kept_by_selective = 0
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
            cached=kept_by_selective,
            views=v,
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
