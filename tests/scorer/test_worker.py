"""The score role says what the trainer's own forward pass says, for the policy and for the reference."""

import shutil
from itertools import count
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ductile.config.schema.trainer import TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.messages.workers import Done, EndOffer, OfferWeights, Receive, Score
from ductile.model.attention import PackedAttention
from ductile.model.checkpoint import load_model, save_model
from ductile.model.logprobs import LogprobHead
from ductile.model.packed import PackedSamples
from ductile.model.transformer import Transformer
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import Sample
from ductile.roles import Refused, RoleAssignment
from ductile.scorer.score_role import ScoreRole
from ductile.trainer.trainer import Trainer
from ductile.weights.shared_memory import SharedMemory, WeightsUnavailable
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

SAMPLES = tuple(make_samples((12, 30, 3, 7, 7), temperatures=(1.0, 0.5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "llama")


_numbers = count()


def place(joining: bool = False) -> RoleAssignment:
    """That of a scorer on slot 0, with an id of its own."""
    instance = f"scorer-0.{next(_numbers)}"
    return RoleAssignment(0, ParallelLayout.of((0,)), 0, "cpu", joining=joining, instance=instance)


def make_role(folder: Path, **model: object) -> ScoreRole:
    config = TrainerConfig.model_validate({"model": {"name": str(folder), "seq_len": 32, **model}})
    return ScoreRole(config.model_dump(), place())


@torch.no_grad()
def naive_scores(model: Transformer, sample: Sample) -> list[float]:
    tokens = torch.tensor(sample.token_ids)
    logits = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])) / sample.temperature
    chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
    return [value if trained else 0.0 for value, trained in zip([0.0, *chosen], sample.loss_mask, strict=True)]


def assert_scores(got: tuple[tuple[float, ...], ...], model: Transformer) -> None:
    for scores, sample in zip(got, SAMPLES, strict=True):
        assert list(scores) == pytest.approx(naive_scores(model, sample), abs=1e-5)


def test_policy_and_reference_start_equal_and_part_with_the_first_version(folder: Path) -> None:
    role = make_role(folder)
    initial = load_model(folder)
    assert_scores(role.handle(Score(SAMPLES, "policy")).logprobs, initial)

    trained = load_model(folder, random_init=True, seed=9)
    publisher = SharedMemory()
    manifest = publisher.publish(1, ((name, p.detach()) for name, p in trained.named_parameters()))
    assert role.handle(Receive("score", manifest)) == Done()
    assert_scores(role.handle(Score(SAMPLES, "policy")).logprobs, trained)
    assert_scores(role.handle(Score(SAMPLES, "reference")).logprobs, initial)
    publisher.close()
    assert_scores(role.handle(Score(SAMPLES, "policy")).logprobs, trained)  # it holds a copy
    role.close()


def test_the_reference_is_what_lay_at_model_name_when_the_role_began(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    sections = {"model": {"name": str(model), "seq_len": 32}, "loss": {"type": "grpo", "kl_coef": 0.1}}
    role = ScoreRole(TrainerConfig.model_validate(sections).model_dump(), place())
    trained = load_model(folder, random_init=True, seed=9)
    save_model(model, trained.spec, dict(trained.named_parameters()), folder)
    assert_scores(role.handle(Score(SAMPLES, "reference")).logprobs, load_model(folder))


def test_another_models_version_is_refused_and_changes_nothing(folder: Path) -> None:
    role = make_role(folder)
    publisher = SharedMemory()
    with pytest.raises(ValueError, match="version 3 is of another model"):
        role.handle(Receive("score", publisher.publish(3, [("embed.weight", torch.zeros(2, 2))])))
    assert_scores(role.handle(Score(SAMPLES, "policy")).logprobs, load_model(folder))
    publisher.close()


@pytest.mark.parametrize(
    ("compute_dtype", "fp32_lm_head"), [("float32", False), ("bfloat16", False), ("bfloat16", True)]
)
def test_it_says_what_the_trainers_forward_pass_says(folder: Path, compute_dtype: str, fp32_lm_head: bool) -> None:
    model = {"name": str(folder), "seq_len": 64, "compute_dtype": compute_dtype, "fp32_lm_head": fp32_lm_head}
    config = TrainerConfig.model_validate({"model": model})
    groups = Groups(0, 2000, "cpu", HashStore(), 20.0)
    trainer = Trainer(config, ParallelContext(groups, ParallelLayout.of((0,))))
    (micro_batches,) = pack(SAMPLES, 1, 64)
    for micro_batch in micro_batches:
        packed = PackedSamples.of(micro_batch.samples)
        head = LogprobHead(packed.rows, packed.targets, packed.temperatures, fp32=fp32_lm_head)
        attend = PackedAttention(packed.stems, packed.branches)
        expected, _ = trainer.model(packed.token_ids, packed.positions, attend, head)
        scores = ScoreRole(config.model_dump(), place()).handle(Score(micro_batch.samples, "policy")).logprobs
        got = [
            score
            for scored, sample in zip(scores, micro_batch.samples, strict=True)
            for score, trained in zip(scored, sample.loss_mask, strict=True)
            if trained
        ]
        assert got == pytest.approx(expected.tolist(), abs=1e-6)
    groups.destroy()


def test_nothing_to_score(folder: Path) -> None:
    assert make_role(folder).handle(Score((), "policy")).logprobs == ()
    untrained = Sample((1, 2, 3), (False, False, False))
    assert make_role(folder).handle(Score((untrained,), "policy")).logprobs == ((0.0, 0.0, 0.0),)


def test_a_joiner_has_no_policy_before_it_receives_one_and_then_its_sources(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = TrainerConfig.model_validate({"model": {"name": str(tmp_path / "model"), "seq_len": 32}})
    joiner = ScoreRole(config.model_dump(), place(joining=True))
    for command in (Score(SAMPLES, "policy"), OfferWeights("score")):
        with pytest.raises(
            Refused, match=r"slot 0 joins .* cannot execute (Score|OfferWeights) before the first Receive"
        ):
            joiner.handle(command)

    trained = load_model(folder, random_init=True, seed=9)
    publisher, source = SharedMemory(), make_role(folder)
    source.handle(Receive("score", publisher.publish(4, trained.named_parameters())))
    publisher.close()
    manifest = source.handle(OfferWeights("score")).manifest
    assert manifest.version == 4
    assert joiner.handle(Receive("score", manifest)) == Done()
    assert source.handle(EndOffer("score")) == Done()
    with pytest.raises(WeightsUnavailable, match="version 4 is gone"):
        SharedMemory().receive(manifest)
    assert_scores(joiner.handle(Score(SAMPLES, "policy")).logprobs, trained)
    again = joiner.handle(OfferWeights("score")).manifest
    assert (again.version, again.fingerprint) == (4, manifest.fingerprint)
    shutil.copyfile(folder / "model.safetensors", tmp_path / "model" / "model.safetensors")
    assert_scores(joiner.handle(Score(SAMPLES, "reference")).logprobs, load_model(folder))
    for role in (joiner, source):
        role.close()
    with pytest.raises(WeightsUnavailable, match="version 4 is gone"):
        SharedMemory().receive(again)
