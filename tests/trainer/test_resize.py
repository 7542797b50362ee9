"""A live trainer changes its formation: what it has afterwards is, bit for bit, what it had."""

from typing import Any

import pytest

from ductile.config.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.records import Formation
from ductile.trainer.state import named_gradient, named_state
from ductile.trainer.worker import TrainRole
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet
from tests.trainer.naive import make_samples


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sizes that nothing divides."""
    folder = make_model_folder(
        tmp_path_factory.mktemp("model"), "qwen3", head_dim=2, hidden_size=34, intermediate_size=25
    )
    sections = {"model": {"name": str(folder)}, "loss": SFTLoss(), "optim": AdamWConfig(lr=1e-2)}
    return TrainerConfig.model_validate(sections).model_dump()


def whole(role: TrainRole) -> dict[str, Any]:
    """Every tensor of the state, gathered, as bytes."""
    trainer = role._standing.trainer
    named = named_state(trainer) | named_gradient(trainer)
    return {name: tensor.full_tensor().numpy().tobytes() for name, tensor in named.items()}


CHANGES = [
    (Formation((0, 1)), Formation((0, 1, 2))),
    (Formation((0, 1, 2)), Formation((1,))),
    (Formation((0, 1)), Formation((2, 3, 4))),
    (Formation((0, 1, 2)), Formation((4, 2, 3, 0))),
    (Formation((0, 1, 2, 3)), Formation((0, 1, 2, 3), 2)),
    (Formation((0, 1)), Formation((0, 1, 2, 3), 2)),
    (Formation((3, 1, 0, 2, 5, 4), 3), Formation((5, 0, 1))),
    (Formation((0, 1)), Formation((1, 0))),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=lambda f: f"{'.'.join(map(str, f.members))}x{f.replicas}")
@pytest.mark.parametrize(
    ("with_gradient", "terms"),
    [
        (False, {}),
        (True, {"verify": "all"}),
        (True, {"carrier": "p2p"}),
        (True, {"memory": "streaming"}),
    ],
    ids=["between batches", "mid-batch", "messages", "streaming"],
)
def test_everything_arrives(
    settings: dict[str, Any], before: Formation, after: Formation, with_gradient: bool, terms: dict[str, str]
) -> None:
    settings = settings | {"resize": settings["resize"] | terms}
    with Fleet(settings, range(6)) as fleet:
        fleet.hold(before.members)
        if before.replicas > 1:
            fleet.resize(before)
        fleet.forward_backward(make_samples((9, 14, 5)))
        fleet.optim_step(20.0)
        if with_gradient:
            fleet.forward_backward(make_samples((7, 12)))
        had = fleet.call(before.members, whole)
        moved = fleet.resize(after)
        assert all(moved[slot].carrier == moved[0].carrier for slot in moved if 0 in moved)
        have = fleet.call(after.members, whole)
        expected = had[before.members[0]]
        assert with_gradient == any(name.startswith("gradient/") for name in expected)
        for slot in after.members:
            assert have[slot].keys() == expected.keys()
            assert [name for name in expected if have[slot][name] != expected[name]] == []
        fleet.forward_backward(make_samples((4, 15)))
        assert fleet.optim_step(20.0).step == 2
