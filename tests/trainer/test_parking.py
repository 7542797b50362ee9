"""The trainer of one slot or several waits in host memory, and nobody can tell afterwards."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ductile.config.schema.trainer import AdamWConfig, SFTLoss, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.messages.resizes import Prepare
from ductile.messages.workers import ExportModel, Park, Publish, SaveState, Unpark, Withdraw
from ductile.parallel.host_memory import is_host, plain_tensors
from ductile.trainer import parking
from ductile.trainer.state import named_gradient, named_state, parts_of
from ductile.trainer.train_role import TrainRole
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet, SlotFailed
from tests.trainer.naive import make_samples

FIRST, SECOND = (20, 3, 9, 14), (31, 8, 5)
SCALARS_BYTES = 4096
"""What a process may have of tensors that are no part of the trainer: constants of torch and of modules."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), "qwen3")


def settings(folder: Path, **model: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {"model": {"name": str(folder), **model}, "loss": SFTLoss(), "optim": AdamWConfig()}
    return TrainerConfig.model_validate(sections).model_dump()


def live_bytes(role: TrainRole) -> int:
    """Of all tensors of the process that are not in host memory: what the device of a slot on a CPU holds."""
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            for part in plain_tensors(each):
                if part.device.type == "cpu" and not is_host(part):
                    storages[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(storages.values())


def state(role: TrainRole) -> dict[str, bytes]:
    """Copies, as numpy would keep hold of the memory itself."""
    trainer = role._live
    named = parts_of(named_state(trainer) | named_gradient(trainer))
    sums = {f"sums/{name}": value for name, value in trainer._sums.items()}
    return {name: part.clone().numpy().tobytes() for name, part in (named | sums).items()}


CASES = [((0,), {}), ((0, 1), {}), ((2, 0, 1), {"reduce_every": "step"}), ((0, 1), {"fsdp_cpu_offload": True})]


@pytest.mark.parametrize(("slots", "model"), CASES)
def test_in_the_middle_of_a_batch_not_a_byte_stays_and_every_bit_comes_back(
    folder: Path, slots: tuple[int, ...], model: dict[str, Any]
) -> None:
    reports = []
    for parks in (False, True):
        with Fleet(settings(folder, **model), range(3)) as fleet:
            fleet.assign(slots)
            fleet.forward_backward(make_samples(FIRST))
            fleet.optim_step(20.0)
            fleet.forward_backward(make_samples(SECOND))
            if parks:
                before = fleet.call(slots, state)
                for _ in range(2):
                    parked = fleet.ask(dict.fromkeys(slots, Park()))
                    assert all(each.device_bytes == 0 and each.num_bytes > 0 for each in parked.values())
                    assert max(fleet.call(slots, live_bytes).values()) < SCALARS_BYTES
                    taken = fleet.ask(dict.fromkeys(slots, Unpark()))
                    assert {slot: each.num_bytes for slot, each in taken.items()} == {
                        slot: each.num_bytes for slot, each in parked.items()
                    }
                    assert fleet.call(slots, state) == before
            fleet.forward_backward(make_samples(FIRST))
            reports.append((fleet.optim_step(20.0), fleet.call(slots, state)))
    assert reports[0] == reports[1]


@pytest.mark.parametrize("slots", [(0,), (0, 1)])
def test_what_needs_the_state_takes_it_back_first_and_what_frees_versions_does_not(
    folder: Path, tmp_path: Path, slots: tuple[int, ...]
) -> None:
    with Fleet(settings(folder), slots) as fleet:
        fleet.assign(slots)
        for command in (Publish(3), SaveState(str(tmp_path / "state")), ExportModel(str(tmp_path / "hf"), "float32")):
            fleet.ask(dict.fromkeys(slots, command))
        fleet.ask(dict.fromkeys(slots, Park()))
        fleet.ask(dict.fromkeys(slots, Withdraw(3)))
        assert max(fleet.call(slots, live_bytes).values()) < SCALARS_BYTES
        fleet.forward_backward(make_samples(FIRST))
        assert fleet.optim_step(20.0).step == 1
        assert all(each.num_bytes == 0 for each in fleet.ask(dict.fromkeys(slots, Unpark())).values()), "it is there"


def test_a_resize_does_not_begin_before_the_state_is_back_and_its_new_memory_can_be_parked(folder: Path) -> None:
    with Fleet(settings(folder), range(3)) as fleet:
        fleet.assign((0, 1))
        fleet.forward_backward(make_samples(FIRST))
        fleet.ask(dict.fromkeys((0, 1), Park()))
        for slot in (0, 1):
            with pytest.raises(SlotFailed, match="taken back before a change begins"):
                fleet.ask({slot: Prepare(fleet.prepare_change(ParallelLayout.of((2, 1))))})
        fleet.ask(dict.fromkeys((0, 1), Unpark()))
        fleet.resize(ParallelLayout.of((2, 1)))
        before = fleet.call((2, 1), state)
        parked = fleet.ask(dict.fromkeys((2, 1), Park()))
        assert all(each.device_bytes == 0 for each in parked.values())
        fleet.ask(dict.fromkeys((2, 1), Unpark()))
        assert fleet.call((2, 1), state) == before
        assert fleet.optim_step(20.0).step == 1


def comes_back_at_the_second_attempt(role: TrainRole) -> tuple[bool, bool]:
    """Return whether all was in host memory after the first attempt, and there again after the second."""

    class NoCopies:
        def start(self, source: torch.Tensor, target: torch.Tensor) -> None:
            raise RuntimeError("CUDA error: out of memory")

    before, parked = state(role), parking.park(role._live)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parking, "host_copies", lambda device: NoCopies())
        with pytest.raises(RuntimeError, match="out of memory"):
            parked.restore()
    is_parked = parked.is_whole and parked.device_bytes == 0
    parked.restore()
    return is_parked, state(role) == before


def test_where_the_first_copy_fails_all_is_in_host_memory_as_before(folder: Path) -> None:
    with Fleet(settings(folder), range(1)) as fleet:
        fleet.assign((0,))
        assert fleet.call((0,), comes_back_at_the_second_attempt) == {0: (True, True)}
