"""The moments of a training step at which a slot's memory may be most taken, and what is live at each.

1. Resident the whole time: parameters, the optimizer's state, gradients from the second micro-batch on.
2. A forward pass adds what each layer keeps, until the head has scored the tokens.
3. A backward pass takes that away again, layer by layer, and makes gradients meanwhile: each layer's weights are
   gathered, the next one's are on their way, and the gradients of the layer before are being summed (FSDP2 does it so:
   `torch.distributed.fsdp`, `FSDPParamGroup`).
4. What is summed once a step, or once for a whole schedule of pp, is whole until then.
5. The optimizer's step has parameters, gradients and state, and what its rule works with (`optimizer_memory.py`); an
   offloaded state comes bucket by bucket.

Between these a slot has less. Loading, resizes and publishing are not counted: they have no activations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ductile.core.layout.geometry.parallel_layout import ParallelDims
from ductile.core.layout.geometry.pipeline_schedule import PipelineShape
from ductile.core.layout.geometry.stages import Stages, balanced_stages
from ductile.core.layout.memory.head_memory import HeadMemory, head_memory
from ductile.core.layout.memory.layer_memory import LayerMemory, layer_memory
from ductile.core.layout.memory.offloaded import host_bytes, last_saved
from ductile.core.layout.memory.optimizer_memory import Trained, step_extra, trained_parameters
from ductile.core.layout.memory.options import MemoryOptions
from ductile.core.layout.memory.parts import MemoryParts, SlotUse, sums_of
from ductile.core.layout.memory.slot_shapes import Rows, SlotShapes, num_elements, num_of_shard, slot_shapes
from ductile.core.layout.model.spec import ModelSpec

FP32 = 4
INT64 = 8
Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Moment:
    name: str
    device: Sizes
    """Bytes by part."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Parameters that FSDP2 gathers at once."""

    whole: int
    """Numbers of all its parameters on the slot."""
    shard: int
    """Numbers of the slot's shard."""


def slot_use(spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, stage: int) -> SlotUse:
    """Return what a slot of this stage takes at its worst moment."""
    first = _StageStep(spec, dims, options, stage, is_first=dims.pp > 1)
    steps = [first, _StageStep(spec, dims, options, stage)] if dims.pp > 1 else [first]
    moments = (moment for step in steps for moment in step.moments())
    worst = max(moments, key=lambda moment: sum(moment.device.values()))
    return SlotUse(MemoryParts(**worst.device), first.host(), worst.name, stage)


class _StageStep:
    """A step on a slot of one stage."""

    def __init__(
        self, spec: ModelSpec, dims: ParallelDims, options: MemoryOptions, stage: int, is_first: bool = False
    ) -> None:
        """is_first: up to the first backward pass of the step, when a pipeline may have most micro-batches in flight
        and has no gradient yet."""
        self._is_first = is_first
        self._spec, self._dims, self._options, self._stage = spec, dims, options, stage
        self._num_micro_batches = options.micro_batches(dims)
        self._shapes: SlotShapes = slot_shapes(spec, dims, options)
        self._layers = [self._layer(number) for number in _layers_of(spec, dims, options.num_runs, stage)]
        self._has_head = stage == dims.pp - 1
        self._has_embed = stage == 0 or (self._has_head and spec.tie_embeddings)
        self._head: HeadMemory | None = head_memory(self._shapes, options) if self._has_head else None
        self._num_shards = dims.dp_shard * dims.cp
        num_ranks = self._num_shards * dims.dp_replicate
        is_plain = num_ranks == 1 and options.parameter_bytes == options.compute_bytes == options.reduce_bytes
        self._is_wrapped = not is_plain or options.fsdp_cpu_offload
        self._unit, self._root = self._as_unit(self._shapes.layer_rows), self._as_unit(self._root_rows())
        self._trained_unit, self._trained_root = self._unit, self._root
        if spec.lora is not None:
            self._trained_unit, self._trained_root = self._as_unit(self._shapes.adapter_rows), _Unit(0, 0)
        self._sums_at_end = options.reduce_every_step or dims.pp > 1
        self._keeps_gathered = not options.reshard_after_forward or dims.pp > 1

    # What there is all the time.

    def _resident(self) -> Sizes:
        on_device = not self._options.fsdp_cpu_offload
        moments = on_device and not self._options.optim_cpu_offload
        return {
            "parameters": self._num_shard * self._options.parameter_bytes * on_device,
            "gradients": self._gradients() if self._has_gradient else 0,
            "optimizer": self._state_bytes * moments,
            "activations": self._inputs_bytes,
            "generator": self._options.generator_bytes,
            "scorer": self._options.scorer_bytes,
            "context": self._options.context_bytes,
        }

    @property
    def _num_shard(self) -> int:
        """Numbers of the slot's shards of all parameters."""
        return self._unit.shard * len(self._layers) + self._root.shard

    @property
    def _num_trained_shard(self) -> int:
        """Numbers of the slot's shards of the parameters that are trained: those with gradients and moments."""
        return self._trained_unit.shard * len(self._layers) + self._trained_root.shard

    @property
    def _num_trained_whole(self) -> int:
        return self._trained_unit.whole * len(self._layers) + self._trained_root.whole

    @property
    def _has_gradient(self) -> bool:
        """Return whether there is a gradient from an earlier micro-batch."""
        return not self._is_first and self._is_accumulated

    @property
    def _is_accumulated(self) -> bool:
        """True where gradients of several micro-batches are added up."""
        return self._num_micro_batches is None or self._num_micro_batches > 1

    def _gradients(self) -> int:
        """Bytes of what has been accumulated, on the device."""
        if not self._is_wrapped:
            return self._num_trained_whole * self._options.parameter_bytes
        sharded = self._num_trained_shard * self._options.parameter_bytes * (not self._options.fsdp_cpu_offload)
        if not self._sums_at_end:
            return sharded
        has_sum = not self._options.reduce_every_step and self._num_messages > 1
        return self._num_trained_whole * self._options.reduce_bytes + sharded * has_sum

    @property
    def _num_messages(self) -> int:
        """Schedules of pp in an optimizer step."""
        number = self._num_micro_batches
        pipeline = PipelineShape(self._dims.pp, self._options.num_runs)
        return 2 if number is None else len(pipeline.messages(number))

    @property
    def _inputs_bytes(self) -> int:
        """Bytes of ids, places and angles of a micro-batch's tokens, and of what the loss keeps of each."""
        shapes = self._shapes
        angles = 2 * shapes.tokens * shapes.head_dim * FP32
        return angles + shapes.tokens * (3 * INT64 + (2 * INT64 + 16 * FP32) * self._has_head)

    def host(self) -> MemoryParts:
        """Parts that wait in host memory."""
        options = self._options
        state, moments = options.fsdp_cpu_offload, options.fsdp_cpu_offload or options.optim_cpu_offload
        sums = state and not options.reduce_every_step
        # A unit's gradient comes as a whole, and is added to the one that is there.
        coming = max(self._trained_unit.shard, self._trained_root.shard) if self._is_accumulated else 0
        kept = 0
        if options.offloaded_in_flight is not None:
            is_pinned = options.device == "cuda"
            kept = int(sum(host_bytes(layer, is_pinned) for layer in self._layers) * self._in_flight)
        return MemoryParts(
            parameters=self._num_shard * options.parameter_bytes * state,
            gradients=(self._num_trained_shard + coming) * options.parameter_bytes * sums,
            optimizer=self._state_bytes * moments,
            activations=kept,
        )

    # Moments.

    def moments(self) -> Iterator[Moment]:
        yield from self._forward()
        if self._head is not None:
            yield from self._head_moments(self._head)
        yield from self._backward()
        yield from self._reduction()
        yield self._optimizer_step()

    def _at(self, name: str, *several: Sizes) -> Moment:
        return Moment(name, sums_of(self._resident(), *several))

    def _forward(self) -> Iterator[Moment]:
        """Weights are gathered once with pp, while the slot keeps nothing for other micro-batches yet."""
        for place in self._looked_at:
            now = {"activations": self._beside(place) + self._layers[place].forward}
            flat = {"communication": self._flat(self._unit) * (self._in_flight == 1)}
            yield self._at(f"forward pass of layer {place}", now, self._gathered_until(place, forward=True), flat)
        if self._has_embed and self._is_wrapped:
            yield self._at("gathering of the embeddings", self._being_gathered(self._root))

    def _head_moments(self, head: HeadMemory) -> Iterator[Moment]:
        last = len(self._layers)
        kept = {"activations": self._kept(last) + head.kept, "logits": head.kept_logits}
        around = [kept, self._gathered_until(last - 1, forward=True), {"communication": self._flat(self._unit)}]
        scores = head.forward_logits - head.kept_logits
        yield self._at("scoring", *around, {"activations": head.forward_activations, "logits": scores})
        flat = 0 if self._keeps_gathered else self._flat(self._unit)
        around = [kept, self._gathered_until(last - 1, backward=False), {"communication": flat}]
        for logits, product in ((head.backward_logits, 0), (head.product_logits, head.product_gradients)):
            made = {
                "activations": head.backward_activations,
                "logits": logits - head.kept_logits,
                "gradients": head.sum_gradients + product,
            }
            yield self._at("backward pass of the head", *around, made)

    def _backward(self) -> Iterator[Moment]:
        options, last = self._options, len(self._layers) - 1
        for place in self._looked_at:
            layer = self._layers[place]
            summing = options.reduce_bytes * self._trained_unit.whole if self._sums(place < last) else 0
            ahead = self._flat(self._unit) if place and not self._keeps_gathered else 0
            around = [
                {"activations": self._beside(place) + self._for_weights},
                {"communication": summing + ahead},
                {"gradients": self._waiting_gradient + self._sums_of_later(place)},
            ]
            peak, made = self._backward_of(layer)
            yield self._at(
                f"backward pass of layer {place}",
                *around,
                self._gathered_until(place),
                {"activations": peak, "gradients": made},
            )
            if self._sums(True):
                gathered = self._gathered_until(place, less=1)
                hidden = {"activations": self._shapes.hidden_bytes}
                for sums in self._summing(self._trained_unit, ahead - summing):
                    yield self._at(f"sum of the gradients of layer {place}", *around, gathered, hidden, sums)
        if self._has_embed and self._spec.lora is None:
            yield self._embeddings_backward()

    def _embeddings_backward(self) -> Moment:
        shapes = self._shapes
        gradient = shapes.vocab_rows * shapes.hidden_size * shapes.compute_bytes
        hidden = shapes.hidden_bytes + (shapes.summed_bytes if shapes.tp > 1 else 0)
        return self._at(
            "backward pass of the embeddings",
            {"activations": self._kept(0) + hidden, "gradients": self._waiting_gradient + gradient},
            {"gradients": self._sums_of_later(-1)},
            {"communication": self._options.reduce_bytes * self._trained_unit.whole if self._sums(True) else 0},
            {"gathered": self._gathered(self._root)},
        )

    def _reduction(self) -> Iterator[Moment]:
        """Gradients that are summed behind a backward pass: the root's, or all of them."""
        if not self._is_wrapped:
            return
        others: Sizes = {}
        if not self._sums_at_end:
            others = {"gradients": self._sums_of_later(-1)}
        elif not self._has_gradient:
            others = {"gradients": self._num_trained_whole * self._options.reduce_bytes}
        if self._dims.pp > 1:
            others = {**others, "gathered": self._gathered(self._unit) * len(self._layers)}
        for sums in self._summing(self._trained_root, 0):
            yield self._at("sum of the embeddings' gradients", others, sums)

    def _optimizer_step(self) -> Moment:
        options = self._options
        made = {} if self._has_gradient else {"gradients": self._gradients()}
        if options.fsdp_cpu_offload or not (options.optim_cpu_offload or options.rule != "torch"):
            return self._at("optimizer step", made)
        extra = step_extra(self._trained, options, self._dims)
        return self._at("optimizer step", made, {"optimizer": extra.coming + extra.working})

    @cached_property
    def _trained(self) -> tuple[Trained, ...]:
        """The parameters that are trained on the slot."""
        root, layers = self._root_rows(), len(self._layers)
        return tuple(trained_parameters(self._spec, self._shapes, self._options, layers, root, self._num_shards))

    @property
    def _state_bytes(self) -> int:
        """Bytes of the optimizer's state on the slot."""
        if self._options.rule == "muon":  # which keeps more of embeddings than of matrices
            return int(sum(each.kept_bytes for each in self._trained))
        return int(self._num_trained_shard * self._options.optimizer_bytes)

    # Layers.

    def _layer(self, number: int) -> LayerMemory:
        checkpointing = self._options.checkpointing
        does = checkpointing is not None and number % checkpointing.freq == 0
        return layer_memory(self._shapes, checkpointing if does else None, self._options.offloaded_in_flight)

    @property
    def _looked_at(self) -> list[int]:
        """Places of the layers that may be the worst: both ends of the stage, of each kind that it has."""
        checkpointing = self._options.checkpointing
        near = 1 if checkpointing is None else checkpointing.freq
        places = range(len(self._layers))
        return sorted({*places[: near + 1], *places[-near - 1 :]})

    @property
    def _in_flight(self) -> float:
        """Micro-batches whose activations the slot keeps, the one that runs among them; a part of one where it keeps
        those of some of its runs of layers."""
        pp, runs, stage = self._dims.pp, self._options.num_runs, self._stage
        if pp == 1:
            return 1
        most = self._num_micro_batches or PipelineShape(pp, runs).full_message
        if not self._is_first:
            most = max(1, most - 1)  # one of them has had its backward pass
        if self._runs_all_first:
            return most
        if self._options.pp_schedule != "zero_bubble" and runs == 1:
            return min(pp - stage, most)
        # Warm-up of interleaved 1F1B, in runs of layers: Narayanan et al. 2021, section 2.2.
        return min(most, max(1, ((runs - 1) * pp + 2 * (pp - 1 - stage) + 1) / runs))

    @property
    def _runs_all_first(self) -> bool:
        """True where every stage runs all forward passes before a backward pass, as with fewer micro-batches than
        stages 1F1B is not for them (`parallel/pipeline.py`)."""
        number, is_plain = self._num_micro_batches, self._options.pp_schedule == "1f1b"
        return number is not None and number < self._dims.pp and is_plain and self._options.num_runs == 1

    @property
    def _for_weights(self) -> int:
        """Bytes that wait for gradients of weights, which `zero_bubble` makes after those of inputs: as many runs of
        layers later as there are stages before this one."""
        if self._dims.pp == 1 or self._options.pp_schedule != "zero_bubble":
            return 0
        of_run = sum(layer.for_weights for layer in self._layers) / self._options.num_runs
        return int(of_run * max(1, self._stage))

    def _kept(self, until: int) -> int:
        """Bytes that the layers before this place keep, and all layers for other micro-batches of pp."""
        own = self._kept_of(self._layers[:until])
        # Of each run of layers what has come and what has gone on.
        boundary = 2 * self._shapes.hidden_bytes * self._options.num_runs if self._dims.pp > 1 else 0
        others = self._kept_of(self._layers) + boundary
        if self._head is not None and self._runs_all_first:
            others += self._head.kept + self._head.kept_logits
        return own + boundary + int((self._in_flight - 1) * others)

    def _kept_of(self, layers: Sequence[LayerMemory]) -> int:
        in_flight, cached = self._options.offloaded_in_flight, sum(layer.cached for layer in layers)
        if in_flight is None:
            return sum(layer.kept_bytes for layer in layers)
        return cached + last_saved(layers, in_flight)

    def _beside(self, place: int) -> int:
        """Bytes that layers keep on the device beside the one at this place, while it runs: of offloaded ones those in
        flight that are not its own."""
        in_flight, layers = self._options.offloaded_in_flight, self._layers
        if in_flight is None:
            return self._kept(place)
        others = max(0, in_flight - 1 - len(layers[place].kept))
        return self._kept(place) - last_saved(layers[:place], in_flight) + last_saved(layers[:place], others)

    def _backward_of(self, layer: LayerMemory) -> tuple[int, int]:
        """Bytes of activations and of weights' gradients, while they are most."""
        if self._is_wrapped or not self._has_gradient:
            return layer.backward - layer.weight_gradients, layer.weight_gradients
        return layer.backward_with_one_weight, 0

    # Gathered parameters, and sums of gradients.

    def _root_rows(self) -> list[Rows]:
        shapes = self._shapes
        embeddings, norm = (shapes.vocab_rows, shapes.hidden_size), (shapes.hidden_size, 1)
        head = [norm] + ([] if self._spec.tie_embeddings else [embeddings])
        return [embeddings] * self._has_embed + head * self._has_head

    def _as_unit(self, rows: list[Rows]) -> _Unit:
        return _Unit(num_elements(rows), num_of_shard(rows, self._dims.dp_shard * self._dims.cp))

    def _gathered(self, unit: _Unit) -> int:
        return unit.whole * self._options.compute_bytes * self._is_wrapped

    def _flat(self, unit: _Unit) -> int:
        """Bytes that one collective gathers, before they are copied to their parameters."""
        return self._gathered(unit) * (self._num_shards > 1)

    def _being_gathered(self, unit: _Unit) -> Sizes:
        own = unit.shard * self._options.compute_bytes
        moved = own * (self._options.compute_bytes != self._options.parameter_bytes or self._options.fsdp_cpu_offload)
        return {"gathered": self._gathered(unit), "communication": max(self._flat(unit), moved)}

    def _gathered_until(self, place: int, forward: bool = False, backward: bool = True, less: int = 0) -> Sizes:
        """Whole parameters that are there while a layer runs. backward: it is in its backward pass, or before it."""
        layers = 1 if forward or backward else 0
        if self._keeps_gathered:
            layers = len(self._layers) if self._dims.pp > 1 else place + 1
        layers = max(0, layers - less)
        return {"gathered": self._gathered(self._root) + layers * self._gathered(self._unit)}

    def _sums(self, is_one: bool) -> bool:
        """Return whether FSDP2 sums a layer's gradients in the backward pass."""
        return is_one and self._is_wrapped and not self._sums_at_end

    def _summing(self, unit: _Unit, others: int) -> Iterator[Sizes]:
        """A unit's gradients while they are summed: copied to one buffer, then added up. On a CPU each other slot's
        addend has memory of its own; a slot that is alone divides a copy."""
        options = self._options
        made, buffer = unit.whole * options.compute_bytes, unit.shard * self._num_shards * options.reduce_bytes
        part = unit.shard * options.reduce_bytes
        addends = (self._num_shards - 1) * part if options.device == "cpu" else 0
        if self._num_shards == 1:
            addends = buffer
        yield {"gradients": 0 if self._sums_at_end else made, "communication": buffer + others}
        yield {"communication": buffer + part + addends + others}

    @property
    def _waiting_gradient(self) -> int:
        """Bytes of the head's weight gradient, while it waits for that of the embeddings, or for the sum of both."""
        shapes = self._shapes
        if self._spec.lora is not None:
            return 0
        waits = self._has_head and (self._is_wrapped or (self._spec.tie_embeddings and self._stage == 0))
        embeddings = shapes.vocab_rows * shapes.hidden_size
        if self._has_head and not self._is_wrapped and not self._has_gradient:
            waits = True
        return embeddings * shapes.compute_bytes * waits

    def _sums_of_later(self, place: int) -> int:
        """Bytes of gradients that the first micro-batch of a step has by the time that it comes to this layer."""
        options, later = self._options, len(self._layers) - 1 - place
        if options.fsdp_cpu_offload:  # of a slot that is alone a gradient is the host's once its micro-batch is over
            waits = options.device == "cpu" and self._num_shards == 1 and not self._sums_at_end
            return later * self._trained_unit.shard * options.parameter_bytes * waits
        if self._has_gradient:
            return 0
        if not self._is_wrapped:
            return later * self._trained_unit.whole * options.parameter_bytes
        if self._sums_at_end:
            return later * self._trained_unit.whole * options.reduce_bytes
        return later * self._trained_unit.shard * options.parameter_bytes


def _layers_of(spec: ModelSpec, dims: ParallelDims, num_runs: int, stage: int) -> list[int]:
    """Numbers of a stage's layers, as the planner deals them out."""
    if dims.pp == 1:
        return list(range(spec.num_layers))
    stages: Stages = balanced_stages(spec, dims.pp, num_runs)
    return [layer for layer, owner in enumerate(stages) if owner == stage]
