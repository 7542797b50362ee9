"""Stages of pp compute what one plain module computes: losses, log-probs, the norm, every gradient, and three steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from ductile.config.schema.trainer import AdamWConfig, CustomLoss, GRPOLoss, TrainerConfig
from ductile.core.batch.loss_aggregation import loss_denominator
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.layout.geometry.pipeline_schedule import PipelineSchedule, num_to_run
from ductile.fabric.groups import Groups
from ductile.parallel import data, pipeline
from ductile.parallel.fsdp_collectives import DirectAllGather, DirectReduceScatter
from ductile.parallel.gathered import full
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.torch_pipelining import HAS_ZERO_BUBBLE
from ductile.records import MicroBatch, Sample
from ductile.roles import RoleAssignment
from ductile.trainer.loss import LossInputs, LossOutputs, ppo_clip
from ductile.trainer.train_role import TrainRole
from ductile.trainer.trainer import LossFailed, Trainer
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import NaiveTrainer, make_samples

TOLERANCE = 1e-4
LENGTHS = (20, 3, 9, 31, 8, 17, 5, 2, 26, 30, 30, 12)
INTERLEAVED, UNEVEN = (0, 1, 0, 1), (0, 1, 1, 1)
SEQ_LEN = 34

seen: dict[float, tuple[float, float]] = {}
"""Log-prob and entropy of each trained token of this process, by the log-prob at which it was sampled."""


def recording_loss(inputs: LossInputs) -> LossOutputs:
    columns = (inputs.rollout_logprobs, inputs.logprobs, inputs.entropies)
    seen.update({token: scores for token, *scores in zip(*(column.tolist() for column in columns), strict=True)})
    return ppo_clip(inputs, GRPOLoss(kl_coef=0.1, clip_high=0.3))


class Found(NamedTuple):
    """What a slot finds of one batch."""

    loss: float
    grad_norm: float
    num_tokens: int
    seen: dict[float, tuple[float, float]]
    gradients: dict[str, list]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": make_model_folder(root / "tied", "qwen3", head_dim=2, hidden_size=30, num_hidden_layers=4),
        "untied": make_model_folder(root / "untied", "llama", tie_word_embeddings=False, num_hidden_layers=4),
    }


def settings_for(folder: Path, loss: str = "recording_loss", **model: object) -> dict[str, Any]:
    loss_config = CustomLoss(import_path=f"{__name__}.{loss}", needs_reference=True)
    config = {"model": {"name": str(folder), **model}, "loss": loss_config, "optim": AdamWConfig(lr=1e-3)}
    return TrainerConfig.model_validate(config).model_dump()


def trainer_on(groups: Groups, layout: ParallelLayout, settings: dict[str, Any]) -> Trainer:
    return Trainer(TrainerConfig.model_validate(settings), ParallelContext(groups, layout))


def one_batch(
    groups: Groups, members: tuple[int, ...], layout: ParallelLayout, settings: dict, samples: list[Sample]
) -> Found:
    trainer = trainer_on(groups, layout, settings)
    mine = pack(samples, layout.num_data_parallel, SEQ_LEN)[trainer.context.data_parallel_rank]
    trainer.forward_backward(mine[:1])  # fewer than there are stages, and accumulated over several commands
    trainer.forward_backward([*mine[1:], MicroBatch(())])
    trainer.reduce_gradients()
    count = loss_denominator(samples)
    gradients = {name: (full(grad) / count).tolist() for name, grad in data.named_gradients(trainer.model).items()}
    report = trainer.optim_step(count)
    return Found(report.loss, report.grad_norm, report.num_tokens, seen, gradients)


LAYOUTS = {
    "two stages": ParallelLayout.of(range(2), pp=2),
    "four stages": ParallelLayout.of((2, 0, 3, 1), pp=4),
    "uneven": ParallelLayout.of(range(2), UNEVEN, pp=2),
    "interleaved": ParallelLayout.of(range(2), INTERLEAVED, pp=2),
    "shards": ParallelLayout.of((3, 1, 0, 2), pp=2),
    "interleaved, shards": ParallelLayout.of(range(4), INTERLEAVED, pp=2),
    "three stages, copies": ParallelLayout.of(range(6), (0, 1, 1, 2), pp=3, dp_replicate=2),
}
ZERO_BUBBLE = pytest.param(
    {"pp_schedule": "zero_bubble"},
    marks=pytest.mark.skipif(not HAS_ZERO_BUBBLE, reason="needs torch 2.13"),
    id="zero bubble",
)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"reduce_every": "step"}, marks=pytest.mark.nightly), ZERO_BUBBLE]
)
@pytest.mark.parametrize(
    "layout",
    mostly_nightly(LAYOUTS.values(), *(LAYOUTS[name] for name in ("uneven", "interleaved, shards"))),
    ids=LAYOUTS,
)
@pytest.mark.parametrize("model", mostly_nightly(["tied", "untied"], "tied"))
def test_parity_with_one_device(
    folders: dict[str, Path], model: str, layout: ParallelLayout, options: dict[str, str]
) -> None:
    samples = make_samples(LENGTHS, temperatures=(1.0, 0.6))
    settings = settings_for(folders[model], **options)
    seen.clear()
    naive = NaiveTrainer(folders[model], TrainerConfig.model_validate(settings).loss, torch.optim.SGD)
    loss, grad_norm = naive.gradients(samples)
    expected = {name: parameter.grad for name, parameter in naive.model.named_parameters()}
    found: list[Found] = run_ranks(len(layout.slots), one_batch, layout, settings, samples)
    for of_slot in found:
        assert of_slot.loss == pytest.approx(loss, abs=TOLERANCE)
        assert of_slot.grad_norm == pytest.approx(grad_norm, rel=TOLERANCE)
        assert of_slot.num_tokens == sum(sum(sample.loss_mask) for sample in samples)
        errors = {name: relative(torch.tensor(grad), expected[name]) for name, grad in of_slot.gradients.items()}
        assert max(errors.values()) < TOLERANCE, errors
    assert {name for of_slot in found for name in of_slot.gradients} == expected.keys()
    scored = {token: scores for of_slot in found for token, scores in of_slot.seen.items() if token}  # 0 is made up
    assert scored.keys() == seen.keys()
    assert all(scored[token] == pytest.approx(seen[token], abs=TOLERANCE) for token in seen)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def three_steps(
    groups: Groups, members: tuple[int, ...], layout: ParallelLayout, settings: dict
) -> tuple[list[float], dict[str, list]]:
    trainer = trainer_on(groups, layout, settings)
    losses: list[float] = []
    for step in range(3):
        samples = make_samples(LENGTHS[4 * step : 4 * step + 4], seed=step)
        trainer.forward_backward(pack(samples, layout.num_data_parallel, SEQ_LEN)[trainer.context.data_parallel_rank])
        losses.append(trainer.optim_step(loss_denominator(samples)).loss)
    return losses, {name: tensor.tolist() for name, tensor in trainer.export_weights(torch.float32)}


@pytest.mark.parametrize("name", ["interleaved, shards", "four stages"])
@pytest.mark.parametrize("model", mostly_nightly(["tied", "untied"], "untied"))
def test_three_steps(folders: dict[str, Path], model: str, name: str) -> None:
    settings = settings_for(folders[model])
    before = dict(NaiveTrainer(folders[model], GRPOLoss(), torch.optim.SGD).model.named_parameters())
    ((losses, weights),) = run_ranks(1, three_steps, ParallelLayout.of((0,)), settings)
    for ours in run_ranks(4, three_steps, LAYOUTS[name], settings):
        assert ours[0] == pytest.approx(losses, abs=TOLERANCE)
        for parameter, values in weights.items():
            expected, found = torch.tensor(values), torch.tensor(ours[1][parameter])
            assert (found - expected).norm() < 1e-3 * (expected - before[parameter]).norm(), parameter


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.nightly), ZERO_BUBBLE])
def test_hidden_states_travel_in_the_dtype_of_the_arithmetic(folders, options):
    """The arithmetic is that of one device in bfloat16 as well: only its gradients are added up in another order."""
    samples, settings = make_samples(LENGTHS), settings_for(folders["tied"], compute_dtype="bfloat16", **options)
    (alone,) = run_ranks(1, one_batch, ParallelLayout.of((0,)), settings, samples)
    for of_slot in run_ranks(4, one_batch, LAYOUTS["interleaved, shards"], settings, samples):
        assert of_slot.loss == pytest.approx(alone.loss, abs=TOLERANCE)
        for name, grad in of_slot.gradients.items():
            assert relative(torch.tensor(grad), torch.tensor(alone.gradients[name])) < 0.02, name


def count_collectives(
    groups: Groups, members: tuple[int, ...], layout: ParallelLayout, settings: dict, samples: list[Sample]
) -> list[tuple[int, int]]:
    """(gathers, reductions) of two runs of micro-batches and of the optimizer step after them."""
    trainer, counts = trainer_on(groups, layout, settings), {DirectAllGather: 0, DirectReduceScatter: 0}
    for kind in counts:
        kind.__call__ = counted(kind.__call__, counts, kind)
    mine = pack(samples, layout.num_data_parallel, SEQ_LEN)[trainer.context.data_parallel_rank]
    found = []
    for work in (
        lambda: trainer.forward_backward(mine[:2]),
        lambda: trainer.forward_backward(mine[2:]),
        lambda: trainer.optim_step(1.0),
    ):
        counts.update(dict.fromkeys(counts, 0))
        work()
        found.append((counts[DirectAllGather], counts[DirectReduceScatter]))
    return found


def counted(function: Any, counts: dict[type, int], kind: type) -> Any:
    def call(*arguments: Any, **named: Any) -> None:
        counts[kind] += 1
        function(*arguments, **named)

    return call


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [(3, 3), (3, 3), (0, 0)]), ({"reduce_every": "step"}, [(3, 0), (3, 0), (0, 3)])],
    ids=["", "once a step"],
)
def test_a_run_gathers_weights_once_and_sums_gradients_once(folders, options, expected):
    """A slot has two layers and the embeddings, three units of FSDP2."""
    samples, settings = make_samples(LENGTHS), settings_for(folders["tied"], **options)
    assert run_ranks(4, count_collectives, LAYOUTS["interleaved, shards"], settings, samples) == [expected] * 4


failing: list[bool] = []


def failing_loss(inputs: LossInputs) -> LossOutputs:
    if failing and len(inputs.logprobs) > 20:
        raise ZeroDivisionError("a custom loss may raise anything")
    return recording_loss(inputs)


def fail_and_go_on(
    groups: Groups, members: tuple[int, ...], layout: ParallelLayout, settings: dict, samples: list[Sample]
) -> tuple[bool, Found]:
    trainer, raised = trainer_on(groups, layout, settings), False
    failing.append(True)
    try:
        trainer.forward_backward(pack(samples, layout.num_data_parallel, SEQ_LEN)[trainer.context.data_parallel_rank])
    except LossFailed:
        raised = True
    failing.clear()
    trainer.forget_gradient()
    assert not data.named_gradients(trainer.model)
    before = trainer.num_updates
    trainer.forward_backward([MicroBatch(tuple(samples[:2]))])
    report = trainer.optim_step(3.0)
    assert trainer.num_updates == before + 1
    return raised, Found(report.loss, report.grad_norm, report.num_tokens, {}, {})


def test_a_loss_that_raises_leaves_all_slots_in_step(folders: dict[str, Path]) -> None:
    samples, settings = make_samples(LENGTHS), settings_for(folders["tied"], loss="failing_loss")
    ((_, alone),) = run_ranks(1, fail_and_go_on, ParallelLayout.of((0,)), settings, samples)
    found = run_ranks(2, fail_and_go_on, LAYOUTS["interleaved"], settings, samples)
    assert [raised for raised, _ in found] == [False, True], "the last stage has the loss"
    for _, after in found:
        assert after[:3] == pytest.approx(alone[:3], rel=TOLERANCE)


def test_a_torch_that_lacks_zero_bubble_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "HAS_ZERO_BUBBLE", False)
    settings = settings_for(Path("a model"), pp_schedule="zero_bubble")
    with pytest.raises(
        ValueError, match=r'trainer\.model\.pp_schedule = "zero_bubble" needs torch 2\.13 \(this is 2\.'
    ):
        TrainRole(settings, RoleAssignment(0, ParallelLayout.of((0,)), 0, "cpu"))


@pytest.mark.parametrize("pp", range(2, 6))
@pytest.mark.parametrize("num_runs", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "kind"), [("1f1b", ScheduleInterleaved1F1B), ("zero_bubble", ScheduleInterleavedZeroBubble)]
)
def test_torch_takes_that_many_micro_batches(schedule: PipelineSchedule, kind: type, num_runs: int, pp: int) -> None:
    if schedule == "1f1b" and num_runs == 1:
        num_runs = 4  # a slot with one run has another schedule, which takes any number
    stages: list[Any] = [
        SimpleNamespace(num_stages=pp * num_runs, group_size=pp, group_rank=0, stage_index=run * pp, submod=None)
        for run in range(num_runs)
    ]
    for number in range(1, 3 * pp):
        kind(stages, num_to_run(number, pp, num_runs, schedule), lambda: None)
