"""A live trainer changes its layout: what it has afterwards is, bit for bit, what it had."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ductile.config.schema.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.transfer.planning import Planner
from ductile.fabric.groups import Groups
from ductile.messages.resizes import Commit, Freeze, Prepare, StateTransferred
from ductile.messages.workers import ForwardBackward, Publish, Withdraw
from ductile.parallel.data import like, local_shard
from ductile.parallel.gathered import full
from ductile.trainer import prepare
from ductile.trainer.state import named_gradient, named_state
from ductile.trainer.train_role import TrainRole
from tests.nightly import mostly_nightly
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet, SlotFailed
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
    trainer = role._instance.trainer
    named = named_state(trainer) | named_gradient(trainer)
    parameters = dict(trainer.model.named_parameters())
    parts = {name: like(parameters[name.partition("/")[2]], local_shard(tensor)) for name, tensor in named.items()}
    return {name: full(part).cpu().numpy().tobytes() for name, part in parts.items()}


CHANGES = [
    (ParallelLayout.of((0, 1)), ParallelLayout.of((0, 1, 2))),
    (ParallelLayout.of((0, 1, 2)), ParallelLayout.of((1,))),
    (ParallelLayout.of((0, 1)), ParallelLayout.of((2, 3, 4))),
    (ParallelLayout.of((0, 1, 2)), ParallelLayout.of((4, 2, 3, 0))),
    (ParallelLayout.of((0, 1, 2, 3)), ParallelLayout.of((0, 1, 2, 3), dp_replicate=2)),
    (ParallelLayout.of((0, 1)), ParallelLayout.of((0, 1, 2, 3), dp_replicate=2)),
    (ParallelLayout.of((3, 1, 0, 2, 5, 4), dp_replicate=3), ParallelLayout.of((5, 0, 1))),
    (ParallelLayout.of((0, 1)), ParallelLayout.of((1, 0))),
]


WAYS = {
    "mid-batch": (True, {"verify": "all"}, CHANGES),
    "between batches": (False, {}, CHANGES[::3]),
    "messages": (True, {"carrier": "p2p"}, CHANGES[::3]),
    "streaming": (True, {"memory": "streaming"}, CHANGES[::3]),
    "bfloat16": (True, {"compute_dtype": "bfloat16"}, CHANGES[::3]),
}
"""(whether with a gradient, terms, changes). All changes one way; the other ways those that grow, that share ranks of
another order, and that go from three copies to one: which bytes go where does not depend on the way (which
`tests/fabric/test_transfer.py` moves by each), and these have joiners, leavers, empty parts and copies."""
OF_A_COMMIT = {
    "mid-batch": CHANGES[3:6],
    "between batches": CHANGES[:1],
    "messages": CHANGES[6:7],
    "streaming": CHANGES[3:4],
    "bfloat16": CHANGES[:1],
}


@pytest.mark.parametrize(
    ("before", "after", "with_gradient", "terms"),
    [
        pytest.param(
            *change,
            *how,
            id=f"{way}-" + "-".join(f"{'.'.join(map(str, f.slots))}x{f.dims.dp_replicate}" for f in change),
            marks=[] if change in OF_A_COMMIT[way] else pytest.mark.nightly,
        )
        for way, (*how, changes) in WAYS.items()
        for change in changes
    ],
)
def test_everything_arrives(
    settings: dict[str, Any], before: ParallelLayout, after: ParallelLayout, with_gradient: bool, terms: dict[str, str]
) -> None:
    with Fleet(with_terms(settings, terms), sorted({*before.slots, *after.slots})) as fleet:
        resize_and_compare(fleet, before, after, with_gradient)


def with_terms(settings: dict[str, Any], terms: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with terms of a resize, and with a dtype of the arithmetic where it is among them."""
    model = {key: value for key, value in terms.items() if key in settings["model"]}
    resize = {key: value for key, value in terms.items() if key not in model}
    return settings | {"resize": settings["resize"] | resize, "model": settings["model"] | model}


def resize_and_compare(
    fleet: Fleet, before: ParallelLayout, after: ParallelLayout, with_gradient: bool
) -> dict[int, StateTransferred]:
    fleet.assign(before.slots)
    if before.dims.dp_replicate > 1:
        fleet.resize(before)
    fleet.forward_backward(make_samples((9, 14, 5)))
    fleet.optim_step(20.0)
    if with_gradient:
        fleet.forward_backward(make_samples((7, 12)))
    had = fleet.call(before.slots, whole)
    moved = fleet.resize(after)
    assert all(moved[slot].carrier == moved[0].carrier for slot in moved if 0 in moved)
    have = fleet.call(after.slots, whole)
    expected = had[before.slots[0]]
    assert with_gradient == any(name.startswith("gradient/") for name in expected)
    for slot in after.slots:
        assert have[slot].keys() == expected.keys()
        assert [name for name in expected if have[slot][name] != expected[name]] == []
    fleet.forward_backward(make_samples((4, 15)))
    assert fleet.optim_step(20.0).step == 2
    return moved


GROUPS_MADE_BY: list[str] = []
"""The thread that made each group, in a slot that watches."""


def leave_groups_to_the_pause(role: TrainRole | None) -> None:
    """As where groups are NCCL's, which are destroyed together: a slot that would wait for others fails. And watch."""
    prepare.why_not_beside = lambda device_type, devices: "this test says so"
    make = Groups._create

    def watched(groups: Groups, members: tuple[int, ...]) -> Any:
        GROUPS_MADE_BY.append(threading.current_thread().name)
        return make(groups, members)

    def together(groups: Groups) -> None:
        raise AssertionError("a member that is dead or stuck would be waited for")

    Groups._create = watched
    Groups.destroy = together


def groups_made_by(role: TrainRole | None) -> list[str]:
    return GROUPS_MADE_BY


@pytest.mark.parametrize(
    "terms",
    mostly_nightly([{}, {"carrier": "p2p"}, {"memory": "streaming"}], {"carrier": "p2p"}),
    ids=["reads", "messages", "streaming"],
)
@pytest.mark.parametrize(("before", "after"), [CHANGES[3], CHANGES[5]], ids=["some of both", "copies"])
def test_groups_may_be_made_in_the_pause(
    settings: dict[str, Any], before: ParallelLayout, after: ParallelLayout, terms: dict[str, str]
) -> None:
    slots = sorted({*before.slots, *after.slots})
    with Fleet(with_terms(settings, terms), slots) as fleet:
        fleet.call(slots, leave_groups_to_the_pause)
        moved = resize_and_compare(fleet, before, after, with_gradient=True)
        made_by = fleet.call(slots, groups_made_by)
    assert {name for names in made_by.values() for name in names} == {"MainThread"}
    assert all("groups were made in the pause, as this test says so" in reply.carrier for reply in moved.values())
    for reply in moved.values():
        assert reply.beside == ("carrier", "plan")
        assert "groups" in reply.seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("before", "after"), CHANGES[::3], ids=["grows", "some of both", "from copies"])
def test_everything_arrives_on_one_gpu(
    settings: dict[str, Any], before: ParallelLayout, after: ParallelLayout, way: str
) -> None:
    with_gradient, terms, _ = WAYS[way]
    slots = sorted({*before.slots, *after.slots})
    with Fleet(with_terms(settings, terms), slots, device="cuda:0") as fleet:
        resize_and_compare(fleet, before, after, with_gradient)


def test_the_first_of_the_new_layout_publishes(settings: dict[str, Any]) -> None:
    with Fleet(settings, range(3)) as fleet:
        fleet.assign((0, 1))
        published = fleet.ask(dict.fromkeys((0, 1), Publish(1)))
        assert (published[0].manifest is None, published[1].manifest is None) == (False, True)
        fleet.resize(ParallelLayout.of((2, 1)), release=False)
        again = fleet.ask(dict.fromkeys((2, 1), Publish(2)))
        assert (again[2].manifest is None, again[1].manifest is None) == (False, True)
        # The same weights; and what the former first slot published is there until it is withdrawn.
        assert again[2].manifest.fingerprint == published[0].manifest.fingerprint
        assert Path(published[0].manifest.location).stat().st_size == published[0].manifest.num_bytes
        fleet.ask({0: Withdraw(1), 2: Withdraw(2)})
        assert not Path(published[0].manifest.location).exists()


def test_commands_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with Fleet(settings, range(3)) as fleet:
        fleet.assign((0, 1))
        with pytest.raises(SlotFailed, match="has not prepared change 7"):
            fleet.ask({0: Freeze(7, False)})
        change = fleet.prepare_change(ParallelLayout.of((0, 2)))
        fleet.assign_joining((2,))
        fleet.step("prepare", change)
        with pytest.raises(SlotFailed, match="neither finalized nor rolled back"):
            fleet.ask({0: Prepare(fleet.prepare_change(ParallelLayout.of((1,))))})
        with pytest.raises(SlotFailed, match="has not moved its part"):
            fleet.ask({2: Commit(change.epoch)})
        with pytest.raises(SlotFailed, match="it is joining, or has left"):
            fleet.ask({2: ForwardBackward(())})
        with pytest.raises(SlotFailed, match="has not accumulated a gradient, contrary to what it was told"):
            fleet.ask({0: Freeze(change.epoch, True)})
        fleet.roll_back(change)
        fleet.roll_back(change)
        fleet.resize(ParallelLayout.of((1,)))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watch_memory(role: TrainRole) -> None:
    """From now on, remember the most that this process has when memory is taken for a buffer."""
    peaks = role.__dict__.setdefault("peaks", [resident_bytes()])
    original = torch.zeros

    def zeros(*arguments: Any, **options: Any) -> torch.Tensor:
        made = original(*arguments, **options)
        peaks.append(resident_bytes())
        return made

    torch.zeros = zeros


def growth_bytes(role: TrainRole) -> int:
    return max(role.__dict__["peaks"]) - role.__dict__["peaks"][0]


def num_parameters_of(role: TrainRole) -> int:
    return role._instance.trainer.spec.num_parameters


@pytest.mark.nightly
def test_streaming_needs_room_for_little_more_than_one_state(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "head_dim": 32}
    folder = make_model_folder(tmp_path / "model", "qwen3", **sizes)
    growth: dict[str, int] = {}
    for memory in ("shadow", "streaming"):
        sections = {"model": {"name": str(folder)}, "loss": SFTLoss(), "resize": {"memory": memory}}
        with Fleet(TrainerConfig.model_validate(sections).model_dump(), range(2)) as fleet:
            fleet.assign((0, 1))
            fleet.forward_backward(make_samples((9, 14)))
            fleet.call((0, 1), watch_memory)
            fleet.resize(ParallelLayout.of((1, 0)))
            growth[memory] = max(fleet.call((0, 1), growth_bytes).values())
            num_parameters = fleet.call((0,), num_parameters_of)[0]
    state_bytes = 4 * 4 * num_parameters // 2  # parameters, two moments and a gradient, on two slots
    assert growth["shadow"] > 0.9 * state_bytes
    staging_bytes = 4 * Planner().round_bytes
    assert growth["streaming"] < staging_bytes + 0.25 * state_bytes < growth["shadow"]
