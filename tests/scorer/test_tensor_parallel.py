"""Slots that have a scorer together say what one slot says, of every version, and give the version away whole."""

import os
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ductile.columns import Floats
from ductile.config.schema.trainer import TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.messages.workers import Done, EndOffer, OfferWeights, Receive, Score
from ductile.model.checkpoint import load_model
from ductile.records import Manifest, Sample
from ductile.roles import RoleAssignment
from ductile.scorer.score_role import ScoreRole
from ductile.weights.shared_memory import SharedMemory
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

SAMPLES = tuple(make_samples((12, 30, 3, 7, 7), temperatures=(1.0, 0.5)))
UNTRAINED = Sample((1, 2, 3), (False, False, False))


def settings_of(folder: Path, **loss: Any) -> dict[str, Any]:
    sections = {"model": {"name": str(folder), "seq_len": 32}, "loss": {"type": "grpo", **loss}}
    return TrainerConfig.model_validate(sections).model_dump()


def place_of(groups: Groups, members: tuple[int, ...], instance: str) -> RoleAssignment:
    address = f"{groups._store.host}:{groups._store.port}"
    layout = ParallelLayout.of(members, tp=len(members))
    return RoleAssignment(groups.slot, layout, 0, "cpu", address, instance=instance)


def scores(
    groups: Groups, members: tuple[int, ...], settings: dict[str, Any], manifest: Manifest
) -> tuple[list[Any], int]:
    """What the slot replies, and how many numbers of the policy it has."""
    place = place_of(groups, members, "scorer-0")
    role = ScoreRole(settings, place)
    replies = [role.handle(Score(SAMPLES, "policy"))]
    assert role.handle(Receive("score", manifest)) == Done()
    replies += [role.handle(Score(SAMPLES, "policy")), role.handle(Score(SAMPLES, "reference"))]
    replies += [role.handle(Score((), "policy")), role.handle(Score((UNTRAINED,), "policy"))]
    offered = role.handle(OfferWeights("score")).manifest
    if groups.slot == members[0]:
        groups._store.set("offered", pickle.dumps(offered))
    else:
        assert offered is None
    joiner = ScoreRole(settings, replace(place, joining=True, instance="scorer-0.1"))
    assert joiner.handle(Receive("score", pickle.loads(groups._store.get("offered")))) == Done()  # noqa: S301
    replies.append(joiner.handle(Score(SAMPLES, "policy")))
    assert role.handle(EndOffer("score")) == Done()
    num_held = sum(parameter.numel() for parameter in joiner._live.policy.parameters())
    for each in (role, joiner):
        each.close()
    return replies, num_held


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 1, "num_attention_heads": 3},
    "llama": {"attention_bias": True, "mlp_bias": True, "intermediate_size": 50, "tie_word_embeddings": False},
}


@pytest.mark.parametrize(
    ("family", "num_slots"), [("qwen3", 2), ("llama", 4)], ids=["3 heads on 2 slots", "2 key heads on 4 slots"]
)
def test_scores_of_several_slots_are_those_of_one(tmp_path: Path, family: str, num_slots: int) -> None:
    folder = make_model_folder(tmp_path / "model", family, **FAMILIES[family])
    trained = load_model(folder, random_init=True, seed=9)
    publisher = SharedMemory()
    manifest = publisher.publish(4, ((name, p.detach()) for name, p in trained.named_parameters()))
    settings = settings_of(folder, kl_coef=0.1 if family == "qwen3" else 0.0)
    ((expected, num_all),) = run_ranks(1, scores, settings, manifest)
    (said, num_held), *others = run_ranks(num_slots, scores, settings, manifest)
    publisher.close()
    for ours, theirs in zip(said, expected, strict=True):
        assert_alike(ours.logprobs, theirs.logprobs)
    before, after, reference, *_, joined = said
    assert_alike(before.logprobs, reference.logprobs)
    assert_alike(after.logprobs, joined.logprobs)
    assert max(abs(a - b) for a, b in zip(before.logprobs[1], after.logprobs[1], strict=True)) > 0.01
    assert all(replies == [Done()] * len(said) for replies, _ in others), "one of them replies for all"
    assert max(num_held, *(held for _, held in others)) < num_all * 0.7


def assert_alike(ours: tuple[Floats, ...], theirs: tuple[Floats, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == pytest.approx(list(other), abs=1e-5)


def loses_a_slot(groups: Groups, members: tuple[int, ...], settings: dict[str, Any]) -> tuple[str, str, Any]:
    """What the survivor says to two commands, and what it scores alone afterwards."""
    place = place_of(groups, members, "scorer-0-1")
    role = ScoreRole(settings, place)
    role.handle(Score(SAMPLES, "policy"))
    if groups.slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failures: list[str] = []
    for _ in range(2):
        try:
            role.handle(Score(SAMPLES, "policy"))
        except RuntimeError as error:
            failures.append(str(error))
    role.close()
    alone = ScoreRole(settings, replace(place, layout=ParallelLayout.of((0,)), instance="scorer-0+1"))
    scored = alone.handle(Score(SAMPLES, "policy"))
    alone.close()
    return failures[0], failures[1], scored


def test_the_survivor_of_a_death_says_so_at_once_and_may_begin_anew(tmp_path: Path) -> None:
    settings = settings_of(make_model_folder(tmp_path / "model"))
    survivor, _ = run_ranks(2, loses_a_slot, settings, mourned=(1,))
    assert "gloo" in survivor[0], "its peer is gone, and it need not wait for the timeout"
    assert "the score role was lost in an earlier failure; release it and assign it anew" in survivor[1]
    assert len(survivor[2].logprobs) == len(SAMPLES)
