"""Plans a trainer's layout: the mesh that is asked for on these slots, why it is that one, and all that is wrong.

1. Each size that is asked for is held against the model and against the number of slots; every finding says what to
   write instead.
2. Of the sizes that are left to the planner ("auto") it takes those with which a slot has room, where its memory is
   known, and least time is lost for lack of samples: data-parallel ranks have none, or a pipeline's messages are short
   and its slots wait. Of equally good ones it takes the smallest, as data parallelism costs least. pp grows last.
3. Layers are dealt to stages so that these take equally long.

    planned = plan_layout(8, AskedLayout(tp="auto", pp=2), spec, num_samples=2)
    planned.layout.dims        pp 2, tp 4
    planned.reasons["tp"]      "auto: with tp 2 stages are idle for 50% of the time, as a data-parallel rank has 1 ..."
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ductile.core.layout.choice.asked_layout import AskedLayout
from ductile.core.layout.choice.layout_text import in_words
from ductile.core.layout.choice.slot_memory import SlotMemory
from ductile.core.layout.choice.tp_sizes import even_tp_sizes, tp_notes, why_not_tp
from ductile.core.layout.geometry.context_parallel import (
    CpStyle,
    StyleViolation,
    chosen_style,
    style_violation,
    token_multiple,
)
from ductile.core.layout.geometry.node_order import is_inside
from ductile.core.layout.geometry.parallel_layout import ParallelDims, ParallelLayout
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape, runs_of_layers
from ductile.core.layout.geometry.stages import balanced_stages, head_layers
from ductile.core.layout.memory.parts import SlotUse, gib
from ductile.core.layout.model.spec import ModelSpec

MOST_AUTO_TP = 8
"""Largest tp that the planner chooses by itself: slots of one machine, inside which tp's messages are fast. Where nodes
have fewer, no more than these."""
SIZED = ("pp", "dp_replicate", "cp", "tp")
"""Axes that are asked for; `dp_shard` is what they leave."""
MUCH_IDLE = 1 / 3
"""Share of the time for which slots may wait for other stages before that is worth a warning."""


@dataclass(frozen=True, slots=True)
class LayoutFinding:
    """Something about a layout that cannot be, or that is good to know."""

    keys: tuple[str, ...]
    """Fields of `AskedLayout` that it is about; first the one to change."""
    value: object
    """Value of the first key."""
    what: str
    """What is wrong and what to write instead. The sentence goes on after its subject, the first key."""

    @property
    def sentence(self) -> str:
        shown = f'"{self.value}"' if isinstance(self.value, str) else self.value
        return f"{self.keys[0]} = {shown} {self.what}"


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """What comes of a request: a layout or errors."""

    layout: ParallelLayout | None
    cp_style: CpStyle = "ulysses"
    """Style that the trainer has where cp is above 1."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why the planner chose what was left to it, by key; "stages" has who has which layers."""
    errors: tuple[LayoutFinding, ...] = ()
    warnings: tuple[LayoutFinding, ...] = ()
    use: SlotUse | None = None
    """What a slot takes, as predicted; None where the memory of slots is not known."""
    short: str = ""
    """Sentence that a slot has less; "" where it has enough, or that is not known."""
    too_little: LayoutFinding | None = None
    """The warning that a slot probably has less, as it is among `warnings`; None where it has enough."""

    @property
    def needed_bytes(self) -> int:
        """About what a slot needs; 0 where the memory of slots is not known."""
        return self.use.device.total if self.use is not None else 0


def plan_layout(
    slots: int | Sequence[int],
    asked: AskedLayout,
    spec: ModelSpec | None = None,
    num_samples: int | None = None,
    memory: SlotMemory | None = None,
    slots_per_node: int | None = None,
) -> PlannedLayout:
    """The layout that is asked for, on these slots or on so many.

    Args:
        spec: the model. None: sizes are held against the number of slots alone.
        num_samples: fewest samples of an optimizer step. None: not known.
        memory: what a slot keeps, and its room. None: not known, and not looked at.
        slots_per_node: None: all slots share a node, or it is not known.
    """
    slots = tuple(range(slots)) if isinstance(slots, int) else tuple(slots)
    if not slots:
        return PlannedLayout(None, errors=(LayoutFinding(("slots",), 0, "are too few: a layout needs at least one"),))
    wrong = list(_below_one(asked))
    tries = (
        []
        if wrong
        else [
            _Try(sized, len(slots), spec, num_samples, memory, slots_per_node)
            for sized in _choices(asked, spec, len(slots), slots_per_node)
        ]
    )
    possible = [each for each in tries if not each.errors]
    if not possible:
        return PlannedLayout(None, errors=tuple(wrong or tries[0].errors))
    best = min(possible, key=lambda each: each.shortfall)
    sized, dims = best.sized, best.dims
    style, why = chosen_style(asked.cp_style, spec, dims.tp, dims.cp)
    blind = "" if memory else "; memory was not looked at, as how much a slot has is not known"
    reasons = {key: f"auto: {text}{blind}" for key, text in _reasons(asked, best, possible)}
    if dims.cp > 1 and asked.cp_style == "auto":
        reasons["cp_style"] = f"auto: {style}, as {why}"
    layout = ParallelLayout(slots, dims)
    if spec is not None and dims.pp > 1:
        layout = replace(layout, stages=balanced_stages(spec, dims.pp, sized.num_runs))
        reasons["stages"] = _layers(spec, layout)
    short = best.shortcoming if best.missing_bytes else ""
    return PlannedLayout(layout, style, reasons, (), tuple(best.warnings()), best.use, short, best.too_little)


class _Try:
    """One choice of all sizes on so many slots."""

    def __init__(
        self,
        sized: AskedLayout,
        num_slots: int,
        spec: ModelSpec | None,
        num_samples: int | None,
        memory: SlotMemory | None,
        slots_per_node: int | None,
    ) -> None:
        self.sized, self._num_slots, self._spec = sized, num_slots, spec
        self._num_samples, self._memory, self._slots_per_node = num_samples, memory, slots_per_node
        self.sizes: dict[str, int] = {axis: int(getattr(sized, axis)) for axis in SIZED}
        self.errors = [*_mesh_errors(num_slots, self.sizes, sized.dp_shard, spec), *_model_errors(sized, spec)]

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(**self.sizes, dp_shard=self._num_slots // prod(self.sizes.values()))

    @property
    def num_ranks(self) -> int:
        return self.dims.num_data_parallel

    @property
    def idle_ranks(self) -> int:
        """Data-parallel ranks for which an optimizer step may have no sample."""
        return max(0, self.num_ranks - self._num_samples) if self._num_samples else 0

    @property
    def pipeline(self) -> PipelineShape:
        return PipelineShape(self.sizes["pp"], self.sized.num_runs)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data-parallel rank that its slots can get at a time: packing makes as many as a full
        message has, where there are samples for that."""
        full = self.pipeline.full_message
        return min(full, -(-self._num_samples // self.num_ranks)) if self._num_samples else full

    @property
    def bubble(self) -> float:
        """Share of the time for which slots wait for other stages; some ranks may have a sample more than others."""
        mean = self._num_samples / self.num_ranks if self._num_samples else self.micro_batches
        return self.pipeline.bubble(min(self.micro_batches, max(1, mean)))

    @property
    def idle(self) -> float:
        """Share of the slots' time that is lost for lack of samples, or to the pipeline's bubble."""
        return round(1 - (1 - self.idle_ranks / self.num_ranks) * (1 - self.bubble), 6)

    @property
    def missing_bytes(self) -> int:
        """Bytes that a slot would need beyond those that it has."""
        return self._memory.missing(self.use.device.total) if self._memory and self.use else 0

    @property
    def use(self) -> SlotUse | None:
        """What a slot takes; None where the model, or the memory of slots, is not known."""
        if self._spec is None or self._memory is None:
            return None
        return self._memory.use(self._spec, self.dims, self.sized)

    @property
    def too_little(self) -> LayoutFinding | None:
        """The warning that a slot probably has too little memory."""
        if not (self._memory and self.use and self.use.device.total > self._memory.room_bytes):
            return None
        words = in_words(self.dims) or "one slot"
        what = f"is with {words} probably too little memory: {self._needs}"
        return LayoutFinding(("tp", "pp", "cp", "dp_replicate"), self.sizes["tp"], what)

    @property
    def shortfall(self) -> tuple[int, float, int, int]:
        """What the choice lacks; then its sizes, the smallest of which are the best."""
        return self.missing_bytes, self.idle, self.sizes["pp"], self.sizes["tp"]

    @property
    def shortcoming(self) -> str:
        """What the choice lacks, in words; "" when it lacks nothing."""
        if self.missing_bytes:
            return self._needs
        if self.idle_ranks:
            return f"there are {self.num_ranks} data-parallel ranks for {self._samples} of an optimizer step"
        if self.micro_batches < self.pipeline.full_message:
            return f"stages are idle for {self.bubble:.0%} of the time, as a data-parallel rank has {self._batches}"
        return ""

    @property
    def _needs(self) -> str:
        assert self._memory is not None, "bytes are missing"
        assert self.use is not None, "bytes are missing"
        needed, room_bytes = self.use.device, self._memory.room_bytes
        return f"a slot would need about {gib(needed.total)} GiB ({needed.in_words()}) and has {gib(room_bytes)} GiB"

    @property
    def _samples(self) -> str:
        return f"{self._num_samples} sample{'' if self._num_samples == 1 else 's'}"

    @property
    def _batches(self) -> str:
        return f"{self.micro_batches} micro-batch{'' if self.micro_batches == 1 else 'es'}"

    def warnings(self) -> Iterator[LayoutFinding]:
        sizes = self.sizes
        if self._spec is not None and sizes["tp"] > 1:
            for note in tp_notes(self._spec, sizes["tp"]):
                yield LayoutFinding(("tp",), sizes["tp"], note)
        yield from self._across_nodes()
        yield from self._filled_up()
        if (too_little := self.too_little) is not None:
            yield too_little
        if self.idle_ranks:
            axis = "dp_replicate" if sizes["dp_replicate"] > 1 else "dp_shard"
            what = (
                f"leaves {self.idle_ranks} of {self.num_ranks} data-parallel ranks without work, as an optimizer step "
                f"has {self._samples}: fewer slots do, or a larger tp or cp"
            )
            yield LayoutFinding((axis,), getattr(self.dims, axis), what)
        elif self.bubble > MUCH_IDLE:
            what = (
                f"leaves stages idle for at least {self.bubble:.0%} of the time: a data-parallel rank has at most "
                f"{self._batches} in an optimizer step, and {sizes['pp']} stages want {self.pipeline.full_message}"
            )
            yield LayoutFinding(("pp",), sizes["pp"], what)

    def _across_nodes(self) -> Iterator[LayoutFinding]:
        """Yield that messages of every layer go over the network."""
        per_node, tp, of_rank = self._slots_per_node, self.sizes["tp"], self.sizes["cp"] * self.sizes["tp"]
        if not is_inside(tp, self._num_slots, per_node):
            what = (
                f"has groups on several nodes, which have {per_node} slots each: tp sends messages twice in every "
                f"layer, and over the network. Write a size that divides {per_node}"
            )
            yield LayoutFinding(("tp",), tp, what)
        elif of_rank > 1 and not is_inside(of_rank, self._num_slots, per_node):
            beside = f" with tp {tp}" if tp > 1 else ""
            what = (
                f"has groups{beside} on several nodes, which have {per_node} slots each: keys and values go over the "
                f"network in every layer"
            )
            yield LayoutFinding(("cp", "tp") if tp > 1 else ("cp",), self.sizes["cp"], what)

    def _filled_up(self) -> Iterator[LayoutFinding]:
        cp, tp, seq_len = self.sizes["cp"], self.sizes["tp"], self.sized.seq_len
        style, _ = chosen_style(self.sized.cp_style, self._spec, tp, cp)
        multiple = token_multiple(style, cp, tp)
        if seq_len % multiple:
            parts = f"cp {cp} · tp {tp}" if cp > 1 and tp > 1 else f"cp {cp}" if cp > 1 else f"tp {tp}"
            full = -(-seq_len // multiple) * multiple
            what = (
                f"is no multiple of {multiple}, as {parts} wants it: a full micro-batch is filled up to {full} tokens"
            )
            yield LayoutFinding(("seq_len", "cp", "tp"), seq_len, what)


def _below_one(asked: AskedLayout) -> Iterator[LayoutFinding]:
    for key in (*SIZED, "dp_shard", "vpp", "seq_len"):
        size = getattr(asked, key)
        if isinstance(size, int) and size < 1:
            yield LayoutFinding((key,), size, "must be at least 1")


def _choices(
    asked: AskedLayout, spec: ModelSpec | None, num_slots: int, slots_per_node: int | None
) -> list[AskedLayout]:
    """Every choice of what is left to the planner; first the smallest. Of tp those that are inside nodes."""
    most = spec.num_layers // asked.num_runs if spec else 1
    pps = range(1, max(1, most) + 1) if asked.pp == "auto" else (asked.pp,)
    tps: Sequence[int] = (asked.tp,) if asked.tp != "auto" else (1,)
    if spec and asked.tp == "auto":
        even = [tp for tp in even_tp_sizes(spec) if tp <= MOST_AUTO_TP]
        tps = [tp for tp in even if is_inside(tp, num_slots, slots_per_node)]
    return [replace(asked, pp=pp, tp=tp) for pp in pps for tp in tps]


def _mesh_errors(
    num_slots: int, sizes: Mapping[str, int], dp_shard: int | None, spec: ModelSpec | None
) -> Iterator[LayoutFinding]:
    product = prod(sizes.values())
    above_one = [axis for axis in SIZED if sizes[axis] > 1]
    named = " · ".join(f"{axis} {sizes[axis]}" for axis in above_one)
    if dp_shard is not None:
        if product * dp_shard != num_slots:
            fits, rest = divmod(num_slots, product)
            instead = f"write {fits}" if fits and not rest else f"give it {product * dp_shard} slots"
            beside = f" with {named}" if named else ""
            what = f"makes {product * dp_shard} slots{beside}, and the trainer has {num_slots}: {instead}"
            yield LayoutFinding(("dp_shard", *above_one), dp_shard, what)
        return
    if num_slots % product == 0:
        return
    for axis in reversed(above_one):
        others = product // sizes[axis]
        if num_slots % others:
            continue
        fitting = [size for size in _factors(num_slots // others) if _is_possible(axis, size, spec)]
        keys = (axis, *(other for other in above_one if other != axis))
        if others == 1:
            what = f"must divide the number of train slots, {num_slots}: write {_listed(fitting)}"
        else:
            beside = " · ".join(f"{other} {sizes[other]}" for other in keys[1:])
            what = (
                f"makes {product} slots with {beside}, of which the number of train slots, {num_slots}, is no "
                f"multiple: write {_listed(fitting)}"
            )
        yield LayoutFinding(keys, sizes[axis], what)
        return
    below, above = num_slots - num_slots % product, num_slots + product - num_slots % product
    beside = " · ".join(f"{axis} {sizes[axis]}" for axis in above_one[:-1])
    what = (
        f"makes {product} slots with {beside}, of which the number of train slots, {num_slots}, is no multiple: train "
        f"on {_listed([size for size in (below, above) if size])} slots, or write smaller sizes"
    )
    yield LayoutFinding(tuple(reversed(above_one)), sizes[above_one[-1]], what)


def _is_possible(axis: str, size: int, spec: ModelSpec | None) -> bool:
    if spec is None:
        return True
    return size in even_tp_sizes(spec) if axis == "tp" else axis != "pp" or size <= spec.num_layers


def _model_errors(sized: AskedLayout, spec: ModelSpec | None) -> Iterator[LayoutFinding]:
    pp, cp, tp = int(sized.pp), sized.cp, int(sized.tp)
    if spec is not None and (reasons := why_not_tp(spec, tp)):
        yield LayoutFinding(("tp",), tp, f"{' and '.join(reasons)}: write {_listed(even_tp_sizes(spec))}")
    elif spec is not None and (violation := _wrong_style(sized, spec, cp, tp)):
        what = f"{violation.what}: {violation.instead}"
        yield LayoutFinding(("cp_style", "cp", "tp"), sized.cp_style, what)
    if pp > 1:
        yield from _stage_errors(sized, pp, spec)


def _wrong_style(sized: AskedLayout, spec: ModelSpec, cp: int, tp: int) -> StyleViolation | None:
    return None if sized.cp_style == "auto" else style_violation(sized.cp_style, spec.num_heads, cp, tp)


def _stage_errors(sized: AskedLayout, pp: int, spec: ModelSpec | None) -> Iterator[LayoutFinding]:
    num_runs, schedule = sized.num_runs, sized.pp_schedule
    if schedule == "interleaved" and num_runs == 1:
        what = 'must be at least 2 with pp_schedule = "interleaved": leave it out, or write pp_schedule = "1f1b"'
        yield LayoutFinding(("vpp", "pp_schedule"), num_runs, what)
    if spec is not None and pp * num_runs > spec.num_layers:
        most = spec.num_layers // num_runs
        each = f", {num_runs} runs of them on each slot of pp" if num_runs > 1 else ""
        instead = f"must be at most {most}" if most > 1 else "cannot be above 1"
        yield LayoutFinding(("pp", "vpp"), pp, f"{instead}: the model has {spec.num_layers} layers{each}")


def _reasons(asked: AskedLayout, best: _Try, possible: Sequence[_Try]) -> Iterator[tuple[str, str]]:
    """Why the sizes that were left to the planner are these."""
    for axis, other in (("pp", None), ("tp", "pp")):
        if getattr(asked, axis) != "auto":
            continue
        size = best.sizes[axis]
        alike = [each for each in possible if other is None or each.sizes[other] == best.sizes[other]]
        smaller = [each for each in alike if each.sizes[axis] < size and each.shortcoming]
        if size == 1:
            yield axis, "data parallelism costs least, and nothing speaks against it"
        elif smaller:
            nearest = min(smaller, key=lambda each: each.shortfall)
            yield axis, f"with {axis} {nearest.sizes[axis]} {nearest.shortcoming}"
        else:
            yield axis, "no smaller size fits the number of slots"


def _layers(spec: ModelSpec, layout: ParallelLayout) -> str:
    """ "19 and 9 layers, where the output embeddings count as 9.9"."""
    sizes = _listed([len(layers) for layers in runs_of_layers(layout, spec.num_layers)], last="and")
    return f"{sizes} layers, where the output embeddings count as {head_layers(spec):.1f}"


def _factors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(numbers: Sequence[int], last: str = "or") -> str:
    """ "4", "4 or 8", "1, 2 or 4"."""
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]
