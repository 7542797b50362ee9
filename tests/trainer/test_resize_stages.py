"""Stages of pp in a resize, in the middle of a batch: every number arrives, and the losses are those of a run that is
never resized."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ductile.config.schema.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.holdings import Box
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.workers import ForwardBackward
from ductile.records import StepReport
from ductile.trainer.state import named_gradient, named_state, parts_of
from ductile.trainer.train_role import TrainRole
from tests.nightly import mostly_nightly
from tests.tiny import make_model_folder
from tests.trainer.fleet import DEADLINE_S, Fleet, SlotFailed
from tests.trainer.naive import make_samples

NUM_STEPS = 3
TOLERANCE = 1e-5
INTERLEAVED = (0, 1, 0, 1)


@pytest.fixture(scope="module", params=mostly_nightly([True, False], True), ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"head_dim": 2, "hidden_size": 34, "intermediate_size": 25, "num_hidden_layers": 4}
    path = tmp_path_factory.mktemp("model")
    return make_model_folder(path, "qwen3", tie_word_embeddings=request.param, **sizes)


def settings_for(folder: Path, **model: object) -> dict[str, Any]:
    sections = {"model": {"name": str(folder), **model}, "loss": SFTLoss(), "optim": AdamWConfig(lr=1e-3)}
    return TrainerConfig.model_validate(sections).model_dump()


def held(role: TrainRole) -> list[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
    """(name, shape of the whole, box, what is in it) of all that the slot has of the state."""
    trainer = role._instance.trainer
    return [
        (name, trainer.parts.shape(of), box, trainer.parts.view(of, local, box).clone())
        for name, local in parts_of(named_state(trainer) | named_gradient(trainer)).items()
        for of in [name.split("/", 1)[1]]
        for box in trainer.parts.held(of)
    ]


def whole(found: Mapping[int, list[tuple[str, tuple[int, ...], Box, torch.Tensor]]]) -> dict[str, bytes]:
    """The state; what several slots have they have alike."""
    state: dict[str, torch.Tensor] = {}
    missing: dict[str, torch.Tensor] = {}
    for of_slot in found.values():
        for name, shape, box, values in of_slot:
            place = tuple(map(slice, *box))
            into = state.setdefault(name, torch.zeros(shape))[place]
            unseen = missing.setdefault(name, torch.ones(shape, dtype=torch.bool))[place]
            assert torch.equal(into[~unseen], values[~unseen]), f"{name} is not the same on all slots"
            into.copy_(values)
            unseen.fill_(False)
    assert not any(each.any() for each in missing.values())
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def train(settings: dict[str, Any], *layouts: ParallelLayout) -> list[StepReport]:
    """Steps of several micro-steps each; between two of a step the trainer goes to its next layout."""
    reports: list[StepReport] = []
    with Fleet(settings, sorted({slot for layout in layouts for slot in layout.slots})) as fleet:
        first, *others = layouts
        fleet.assign_in(first)
        for step in range(NUM_STEPS):
            samples = make_samples((14, 9, 23, 17, 5, 30, 11, 26, 8), seed=step)
            fleet.forward_backward(samples[:4], seq_len=32)
            if others:
                had = (
                    whole(fleet.call(fleet.layout.slots, held)) if settings["model"]["reduce_every"] != "step" else None
                )
                fleet.resize(others.pop(0), release=False)
                have = whole(fleet.call(fleet.layout.slots, held))
                assert any(name.startswith("gradient/") for name in have)
                assert had is None or had == have
            fleet.forward_backward(samples[4:], seq_len=32)
            reports.append(fleet.optim_step(float(sum(map(len, samples)))))
    return reports


def test_a_slot_that_dies_while_others_wait_for_it_frees_them_all(folder: Path) -> None:
    """Both its neighbours in the pipeline and those that wait for these: long before their collectives give up."""
    settings = settings_for(folder)
    assert settings["dist_timeout_seconds"] > 2 * DEADLINE_S
    with Fleet(settings, range(4)) as fleet:
        fleet.assign_in(ParallelLayout.of((0, 1, 2, 3), pp=2))
        fleet.forward_backward(make_samples((14, 9, 23, 17)), seq_len=32)
        (part,) = pack(make_samples((20, 21)), 1, 32)
        for slot in (0, 1, 2):
            fleet.post(slot, "handle", ForwardBackward(tuple(part)))
        fleet.processes[3].kill()
        for slot in (0, 1, 2):
            with pytest.raises(SlotFailed):
                fleet.answer(slot)


DP2 = ParallelLayout.of((0, 1))
PP2 = ParallelLayout.of((1, 0), pp=2)
ROUNDS = [
    (PP2, DP2, ParallelLayout.of((1, 2), INTERLEAVED, pp=2)),
    (DP2, ParallelLayout.of((3, 0, 1, 2), pp=2), ParallelLayout.of((0, 1, 2, 3), pp=4)),
    (
        ParallelLayout.of((0, 1, 2), (0, 1, 1, 2), pp=3),
        ParallelLayout.of((2,)),
        ParallelLayout.of((3, 2), (0, 0, 0, 1), pp=2),
    ),
]


@pytest.mark.parametrize(
    ("layouts", "options"),
    mostly_nightly(
        itertools.product(ROUNDS, [{}, {"reduce_every": "step"}]),
        (ROUNDS[0], {"reduce_every": "step"}),
        (ROUNDS[1], {}),
        (ROUNDS[2], {}),
    ),
)
def test_nobody_can_tell(folder: Path, layouts: tuple[ParallelLayout, ...], options: dict[str, str]) -> None:
    settings = settings_for(folder, **options)
    for ours, theirs in zip(train(settings, *layouts), train(settings, DP2), strict=True):
        assert (ours.step, ours.num_tokens, ours.lr) == (theirs.step, theirs.num_tokens, theirs.lr)
        assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
