"""Forward, backward, step. One object a rank; all ranks call the same methods in the same order.

The loss is a weighted sum over tokens, over micro-batches and over ranks, and so is the gradient. Nothing is averaged
on the way; `optim_step` divides once. So it does not matter how many ranks there are, or which of them ran what.
"""

import traceback
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from math import isfinite, nan, sqrt

import torch
from torch import Tensor

from ductile.columns import Floats
from ductile.config.checks.weight_headers import ModelFolderError
from ductile.config.schema.model import excluded_pairs, why_not_selective
from ductile.config.schema.optimizer_state import optimizer_state
from ductile.config.schema.trainer import MuonConfig, TrainerConfig
from ductile.core.layout.geometry.context_parallel import CpStyle, chosen_style, style_violation
from ductile.core.layout.geometry.strategy import block_columns
from ductile.core.layout.model.flops import ForwardWork, training_flops
from ductile.core.layout.model.peak import Arithmetic, arithmetic_of, compute_dtype
from ductile.core.layout.model.spec import ModelSpec
from ductile.error_text import error_with_place
from ductile.kernels import float8
from ductile.kernels.device import peak_of
from ductile.kernels.flash_attention import use_kernel
from ductile.model.checkpoint import first_tensors, read_spec
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel import data, parallelize
from ductile.parallel.activation_offloading import OffloadCounters
from ductile.parallel.compilation import COMPILE, COUNTERS
from ductile.parallel.gathered import full_tensors, gathered_tensors
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parts import SlotParts
from ductile.parallel.pipeline import Pipeline
from ductile.parallel.reduction import GradientReduction
from ductile.parallel.scoring import HeadOptions, as_columns, model_inputs, score
from ductile.records import MicroBatch, Sample, StepReport, TrainProgress
from ductile.trainer.collate import Batch, collate
from ductile.trainer.loss import make_loss, required_fields
from ductile.trainer.lr_schedule import learning_rate
from ductile.trainer.muon import WholeMatrices
from ductile.trainer.optimizer import Optimizer


class LossFailed(Exception):
    """The loss function raised. Weights and moments are as they were, and all ranks are in step."""


SKIPPED = "skipped"
METRIC = "metric/"
"""Prefix of the names of a loss's metrics among the trainer's own sums: a custom one may be called "loss"."""


class Trainer:
    def __init__(
        self,
        config: TrainerConfig,
        context: ParallelContext,
        device: str | torch.device = "cpu",
        buffers: MutableMapping[str, Tensor] | None = None,
    ) -> None:
        """Load this rank's part of `config.model.name`.

        With `buffers` nothing is loaded: they are this rank's parts of parameters and moments, flat, by the names of
        `ductile.trainer.state`, and the trainer works on them. They are taken out of the mapping.

        Raises ModelFolderError, ImportPathError (custom loss) or ValueError (optimizer, schedule, attn, fp8, cp_style)
        for what the config asks for and cannot be had.
        """
        self.config = config
        self.context = context
        self.device = torch.device(device)
        self._options = parallelize.ParallelizeOptions.of(config.model, device)
        self.precision = self._options.precision
        self._arithmetic: Arithmetic = arithmetic_of(
            compute_dtype(config.model.compute_dtype, str(device)), config.matmul_precision, str(device)
        )
        self.step = 0
        """Optimizer steps asked for, those without a gradient too; the schedule follows it."""
        self.num_updates = 0
        """Optimizer steps that changed the weights: not those that were skipped, or had nothing to learn."""
        self._optim = config.optim
        self._lr_at(0)  # raises now for a schedule without an end
        if self.device.type == "cuda":
            # On a CPU it could turn fp32 products into bf16 ones, and fp32 there means fp32.
            torch.set_float32_matmul_precision(config.matmul_precision)

        self.spec = spec_of(config)
        use_kernel(config.model.attn, self.precision.compute, self.spec.head_dim, self.device)
        if config.model.multiplies_8_bits:
            float8.check(self.precision.compute, self.device)
        dims = context.layout.dims
        self._head = HeadOptions.of(config.model)
        self._cp_style: CpStyle = chosen_style(config.model.cp_style, self.spec, dims.tp, dims.cp)[0]
        if violation := style_violation(self._cp_style, self.spec.num_heads, dims.cp, dims.tp):
            raise ValueError(f"trainer.model.{violation.sentence}")
        self.parts = SlotParts.of(self.spec, context.layout, context.slot)
        styled = config.model.model_copy(update={"cp_style": self._cp_style}) if dims.cp > 1 else config.model
        for key, _, why in excluded_pairs(styled, dims.pp > 1):
            raise ValueError(f"trainer.model.{key} {why}")
        self.model = self._load() if buffers is None else self._build_over(buffers)
        self._reduction = GradientReduction(self.model, context, config.model.reduce_every == "step")
        self._pipeline = None
        if dims.pp > 1:
            if why := why_not_selective(config.model):
                raise ValueError(f'trainer.model.ac.mode = "selective" {why}')
            schedule, compute = config.model.pp_schedule, self.precision.compute
            self._pipeline = Pipeline(self.model, context, schedule, compute, self.device)
        named = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        dtype = config.model.optimization_dtype
        blocks, offload = block_columns(self.spec), config.model.optim_cpu_offload
        self.optimizer_state = {
            name: optimizer_state(self._optim, name, dtype, offload, blocks.get(name, 0)) for name in named
        }
        is_muon = isinstance(self._optim, MuonConfig)
        matrices = WholeMatrices(self.spec, context, self.precision.compute) if is_muon else None
        self.optimizer = Optimizer(self._optim, self.optimizer_state, named, buffers, matrices)
        self._loss = make_loss(config.loss)
        self._required = required_fields(config.loss)
        self._sums: dict[str, Tensor] = {}

    @property
    def offload_counters(self) -> OffloadCounters | None:
        """Counts of activations that have been offloaded; None where none are (`trainer.model.ac_offloading`)."""
        return self._options.offload and self._options.offload.counters

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Add to the accumulated gradient; returns this rank's trained tokens.

        Equally many micro-batches on every rank. Raises ValueError for a sample that cannot be trained on, before any
        rank waits for another; LossFailed for a loss function that raises, when no rank waits for this one any more.
        """
        if not micro_batches:
            return 0
        if self._pipeline is not None:
            missing = self._pipeline.num_to_run(len(micro_batches)) - len(micro_batches)
            micro_batches = [*micro_batches, *[MicroBatch(())] * missing]
        batches = [collate(micro_batch, self._required, self.device) for micro_batch in micro_batches]
        failures: list[str] = []
        """How the loss function failed."""
        self._reduction.begin()
        if self._pipeline is None:
            for batch in batches:
                scores = score(self.model, batch.packed, self.context, self._head, self._cp_style)
                self._loss_of(batch, *scores, failures).backward()
        else:
            self._run_stages(self._pipeline, batches, failures)
        self._reduction.end()
        if self._options.cpu_offload:
            data.mark_host_shards(self.model)  # the gradients are new
        if failures:
            raise LossFailed(f"trainer.loss failed: {failures[0]}")
        return sum(batch.num_trained for batch in batches)

    def optim_step(self, loss_denominator: float) -> StepReport:
        """Divide the accumulated gradient, clip it, step. The same report on every rank.

        A gradient that is not finite is thrown away instead: the report says `skipped` 1, weights and moments stay.
        With a denominator of 0 there must be none: a batch without any advantage counts as a step of the schedule all
        the same, or a run with many of these would never come to its end.
        """
        if not (isfinite(loss_denominator) and loss_denominator >= 0):
            raise ValueError(
                f"the loss denominator of an optimizer step is {loss_denominator}; it must be a number of at least 0"
            )
        self.reduce_gradients()
        gradients = data.named_gradients(self.model)
        if loss_denominator == 0:
            if gradients:
                raise ValueError("the loss denominator of an optimizer step is 0, and there is a gradient")
            self.step += 1
            return StepReport(self.step, 0.0, 0.0, self._lr_at(self.step - 1), 0)
        if not gradients:
            raise ValueError("an optimizer step without a forward_backward before it: there is no gradient")
        totals = self._totals(gradients)
        grad_norm = sqrt(totals.pop("grad_square")) / loss_denominator
        lr = self._lr_at(self.step)
        applied = isfinite(grad_norm)
        if applied:
            limit = self._optim.max_norm
            clip = 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))
            for gradient in gradients.values():
                data.local_shard(gradient).mul_(clip / loss_denominator)
            self.optimizer.step(lr)
            self.num_updates += 1
        self.forget_gradient()
        self.step += 1
        loss, num_tokens = totals.pop("loss") / loss_denominator, totals.pop("num_tokens")
        flops, peak = totals.pop("flops"), totals.pop("peak_flops_per_s")
        compiled = {name: totals.pop(name) for name in [*totals] if name.startswith(COMPILE)}
        metrics = {name.removeprefix(METRIC): total / max(1.0, num_tokens) for name, total in totals.items()}
        if SKIPPED in metrics:
            metrics[f"loss/{SKIPPED}"] = metrics[SKIPPED]  # a custom loss has a metric of the name of ours
        metrics[SKIPPED] = float(not applied)
        metrics |= compiled
        return StepReport(
            self.step, loss, grad_norm, lr, int(num_tokens), metrics, flops, peak if isfinite(peak) else None
        )

    def reduce_gradients(self) -> None:
        """Add up what ranks have accumulated apart (`trainer.model.reduce_every`); collective. The gradient can be read
        then, and moved."""
        self._reduction.reduce()

    def forget_gradient(self) -> None:
        """Drop what `forward_backward` has accumulated since the last step; collective."""
        self.reduce_gradients()
        self.optimizer.zero_grad()
        self._sums = {}

    def accumulated(self) -> Iterator[Tensor]:
        """Yield what has been accumulated since the last step besides the parameters' gradients; not copies."""
        yield from self._sums.values()
        yield from self._reduction.pending()

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probs of a few samples, one column each, as long as its tokens; 0 where the mask is false. The same on
        every rank. Collective. Raises ValueError for stages of a pipeline."""
        if self._pipeline is not None:
            raise ValueError("stages of a pipeline cannot score without a loss")
        packed = PackedSamples.of(samples, self.device)
        try:
            logprobs, _ = score(self.model, packed, self.context, self._head, self._cp_style)
        finally:
            data.reshard(self.model)
        return as_columns(samples, logprobs)

    def publish_weights(self, with_frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, as the forward pass computes with it: what generators and scorers get, for a first
        slot whose memory another one cannot open (`ductile.trainer.joint_publisher`). Collective; a tensor is there
        until the next one (`parallel.gathered.gathered_tensors`). with_frozen: those that are not trained, too."""
        return gathered_tensors(self.model, self.context, self.precision.compute, with_frozen)

    def export_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, in `dtype`, as the optimizer has it: what a model folder is written from. Collective
        (`parallel.gathered.full_tensors`)."""
        return full_tensors(self.model, self.context, dtype)

    def go_on_at(self, step: int, num_updates: int) -> None:
        """Take up a loaded state: its counts are the trainer's, and there is no gradient."""
        self.forget_gradient()
        self.step, self.num_updates = step, num_updates
        self.optimizer.set_num_updates(num_updates)

    def progress(self) -> TrainProgress:
        """What there is besides tensors, with this rank's sums."""
        sums = {name: value.item() for name, value in self._sums.items()}
        return TrainProgress(self.step, self.num_updates, bool(data.named_gradients(self.model)), sums)

    def go_on_from(self, progress: TrainProgress) -> None:
        """Take over what there is besides tensors. `progress.sums` are of all ranks: the first one keeps them."""
        self.step, self.num_updates = progress.step, progress.num_updates
        self.optimizer.set_num_updates(progress.num_updates)
        share = 1.0 if self.context.is_first else 0.0
        self._sums = {
            name: torch.tensor(total * share, dtype=torch.float64, device=self.device)
            for name, total in progress.sums.items()
        }

    def _load(self) -> Transformer:
        weights = first_tensors(_folder(self.config), self.spec, self.config.model.debug.random_init, self.config.seed)
        return parallelize.build(self.spec, weights, self.context, self.parts, self.device, self._options)

    def _build_over(self, buffers: MutableMapping[str, Tensor]) -> Transformer:
        prefix = "model/"  # `trainer.state.MODEL`: that module imports this one
        ours = [name for name in buffers if name.startswith(prefix)]
        shards = {name.removeprefix(prefix): buffers.pop(name) for name in ours}
        return parallelize.build_over(self.spec, shards, self.context, self._options)

    def _lr_at(self, step: int) -> float:
        return learning_rate(self.config.scheduler, self._optim.lr, step, self.config.max_steps)

    def _run_stages(self, pipeline: Pipeline, batches: Sequence[Batch], failures: list[str]) -> None:
        def loss(number: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
            return self._loss_of(batches[number], logprobs, entropies, failures)

        inputs = [model_inputs(self.spec, batch.packed, self.context, self._head, self._cp_style) for batch in batches]
        pipeline.run(inputs, loss)
        if not pipeline.has_loss:
            # Sums are added up by their names, of which a loss that nobody here has computed may have some.
            nothing = collate(MicroBatch(()), self._required, self.device)
            logprobs, entropies = torch.zeros(2, 1, device=self.device)
            self._loss_of(nothing, logprobs, entropies, failures)

    def _loss_of(self, batch: Batch, logprobs: Tensor, entropies: Tensor, failures: list[str]) -> Tensor:
        """A batch's loss, to be minimised, which is added to the sums. Zero for a loss function that raises: the other
        ranks wait for this one's part of the gradient all the same."""
        try:
            outputs = self._loss(batch.loss_inputs(logprobs, entropies))
            # Without trained tokens: zeros for every parameter, whatever a custom loss made of the made-up token.
            weighted = batch.weights * outputs.loss if batch.num_trained else 0.0 * logprobs
            loss = weighted.sum()
        except Exception as error:  # a custom loss may raise anything
            traceback.print_exc()
            failures.append(error_with_place(error))
            return (0.0 * logprobs).sum()
        sums = {"loss": loss.detach(), "num_tokens": torch.tensor(batch.num_trained)}
        work = batch.packed.work if batch.num_trained else ForwardWork()
        sums["flops"] = torch.tensor(float(training_flops(self.spec, work)), dtype=torch.float64)
        for name, values in outputs.metrics.items():
            sums[METRIC + name] = values.detach().sum() if batch.num_trained else torch.zeros(())
        for name, value in sums.items():
            value = value.to(self.device, torch.float64)
            if not self.context.counts_samples:
                value = torch.zeros_like(value)  # a product would keep what is not finite
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        return loss

    def _totals(self, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        """The sums since the last step, and the square of the gradient, over all ranks: one reduction."""
        self._sums["grad_square"] = self.context.share_of_square(gradients, self.parts).to(self.device)
        peak = peak_of(self.device, self._arithmetic)
        share = peak.flops_per_s / self.context.num_on_device if peak else nan
        self._sums["peak_flops_per_s"] = torch.tensor(share, dtype=torch.float64, device=self.device)
        if self._options.compile is not None:
            for name, count in COUNTERS.take().items():
                self._sums[name] = torch.tensor(count, dtype=torch.float64, device=self.device)
        names = sorted(self._sums)
        totals = self.context.sum(torch.stack([self._sums[name] for name in names]))
        return dict(zip(names, totals.tolist(), strict=True))


def spec_of(config: TrainerConfig) -> ModelSpec:
    """The spec of the model that the config trains. Raises ModelFolderError."""
    return read_spec(_folder(config), config.model.debug.num_layers, config.model.adapters)


def _folder(config: TrainerConfig) -> str:
    if config.model.name is None:
        raise ModelFolderError("trainer.model.name is not set; it must be a model folder")
    return config.model.name
