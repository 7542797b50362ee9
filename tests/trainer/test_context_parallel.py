"""A trainer whose slots run micro-batches together takes the steps of one that is alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ductile.config.schema.trainer import AdamWConfig, CustomLoss, GRPOLoss, LossConfig, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator, weigh
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.context_parallel import CpStyle
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import Sample, StepReport
from ductile.trainer.loss import LossInputs, LossOutputs
from ductile.trainer.trainer import Trainer
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

GRPO = GRPOLoss(kl_coef=0.1, clip_high=0.3)
OF_SEQUENCES = CustomLoss(import_path="tests.trainer.test_context_parallel.sequence_ratio")
SEQ_LEN = 50
STEPS = ((20, 3, 9, 31, 2), (12,), (31, 8, 17, 5))
"""Lengths of the samples of each optimizer step. In the second one a data-parallel rank has none."""


def sequence_ratio(inputs: LossInputs) -> LossOutputs:
    """A ratio of whole sequences (as in GSPO): each token's weight depends on all of its sample, wherever they ran."""
    num_sequences = int(inputs.sequences.max()) + 1
    log_ratio = inputs.logprobs - inputs.rollout_logprobs

    def mean(values: Tensor) -> Tensor:
        total = torch.zeros(num_sequences).index_add(0, inputs.sequences, values)
        return (total / torch.bincount(inputs.sequences, minlength=num_sequences))[inputs.sequences]

    ratio = mean(log_ratio).clamp(-3.0, 3.0).exp()
    return LossOutputs(-inputs.advantages * ratio - 0.01 * inputs.entropies, {"ratio": ratio.detach()})


def samples_of(step: int) -> list[Sample]:
    """The first prompt of several has a second completion, a shorter one."""
    samples = make_samples(STEPS[step], seed=step, temperatures=(1.0, 0.6))
    if len(samples) == 1:
        return samples
    shared = samples[0]
    first = shared.loss_mask.index(True)
    cut = first + max(1, (len(shared) - first) // 2)
    fields = ("token_ids", "loss_mask", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs")
    return [*samples, Sample(**{name: tuple(getattr(shared, name))[:cut] for name in fields})]


def trains(
    groups: Groups, members: tuple[int, ...], settings: dict, sizes: dict[str, int]
) -> tuple[list[StepReport], dict[str, list]]:
    context = ParallelContext(groups, ParallelLayout.of(members, **sizes))
    trainer = Trainer(TrainerConfig.model_validate(settings), context)
    reports: list[StepReport] = []
    for step in range(len(STEPS)):
        samples = samples_of(step)
        parts = pack(weigh(samples, "token_mean"), context.layout.num_data_parallel, SEQ_LEN)
        trainer.forward_backward(parts[context.data_parallel_rank])
        reports.append(trainer.optim_step(loss_denominator(samples, "token_mean")))
    return reports, {name: tensor.tolist() for name, tensor in trainer.export_weights(torch.float32)}


@pytest.mark.parametrize("style", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("num_slots", "sizes", "loss"),
    mostly_nightly(
        [
            (2, {"cp": 2}, GRPO),
            (2, {"cp": 2}, OF_SEQUENCES),
            (4, {"cp": 2}, OF_SEQUENCES),
            (4, {"cp": 2, "dp_replicate": 2}, GRPO),
            (4, {"cp": 2, "tp": 2}, OF_SEQUENCES),
            (4, {"pp": 2, "cp": 2}, OF_SEQUENCES),
        ],
        (4, {"cp": 2}, OF_SEQUENCES),
    ),
)
def test_three_steps_are_those_of_one_slot(
    tmp_path: Path, num_slots: int, sizes: dict[str, int], loss: LossConfig, style: CpStyle
) -> None:
    model = {"name": str(make_model_folder(tmp_path / "model", "qwen3")), "cp_style": style, "seq_len": SEQ_LEN}
    optim = AdamWConfig(lr=1e-3)
    settings = TrainerConfig.model_validate({"model": model, "loss": loss, "optim": optim}).model_dump()
    ((alone, weights),) = run_ranks(1, trains, settings, {})
    is_one_rank = ParallelLayout.of(range(num_slots), **sizes).num_data_parallel == 1
    for reports, found in run_ranks(num_slots, trains, settings, sizes):
        for ours, theirs in zip(reports, alone, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, abs=1e-4)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
            assert ours.num_tokens == theirs.num_tokens
            if is_one_rank:  # otherwise completions of one prompt may go to different ranks
                assert ours.flops == theirs.flops
            assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-4)
        for name, values in weights.items():
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_reduced_precision_stays_near(tmp_path: Path, style: CpStyle) -> None:
    model = {"name": str(make_model_folder(tmp_path / "model", "qwen3")), "cp_style": style, "seq_len": SEQ_LEN}
    sections = {"model": model, "loss": GRPOLoss(kl_coef=0.1)}
    exact = TrainerConfig.model_validate(sections).model_dump()
    reduced = TrainerConfig.model_validate(sections | {"model": model | {"compute_dtype": "bfloat16"}}).model_dump()
    ((alone, _),) = run_ranks(1, trains, exact, {})
    for reports, _ in run_ranks(2, trains, reduced, {"cp": 2}):
        assert reports[0].loss == pytest.approx(alone[0].loss, rel=0.02)
        assert reports[0].grad_norm == pytest.approx(alone[0].grad_norm, rel=0.05)
        assert reports[0].grad_norm != alone[0].grad_norm


def test_auto_is_the_style_that_the_model_can_have_in_each_layout(tmp_path: Path) -> None:
    """Four heads cannot be dealt to three slots, and no slot says so: it runs the ring."""
    model = {"name": str(make_model_folder(tmp_path / "model", "qwen3")), "seq_len": SEQ_LEN}
    settings = TrainerConfig.model_validate({"model": model, "loss": GRPO}).model_dump()
    assert settings["model"]["cp_style"] == "auto"
    ((alone, _),) = run_ranks(1, trains, settings, {})
    for size in (2, 3):
        for reports, _ in run_ranks(size, trains, settings, {"cp": size}):
            assert reports[0].loss == pytest.approx(alone[0].loss, abs=1e-4)


def refused(groups: Groups, members: tuple[int, ...], settings: dict) -> str:
    context = ParallelContext(groups, ParallelLayout.of(members, cp=len(members)))
    with pytest.raises(ValueError, match="cp_style") as wrong:
        Trainer(TrainerConfig.model_validate(settings), context)
    return str(wrong.value)


def test_a_style_that_the_model_cannot_have_is_refused(tmp_path: Path) -> None:
    model = {"name": str(make_model_folder(tmp_path / "model", "qwen3")), "cp_style": "ulysses"}
    sentence = (
        'trainer.model.cp_style "ulysses" deals the model\'s 4 query heads out to the slots along cp, and cp is 3: '
        'write cp_style = "ring", or a cp of 1, 2 or 4'
    )
    assert run_ranks(3, refused, TrainerConfig.model_validate({"model": model}).model_dump()) == [sentence] * 3
