"""A state knows no layout: what two ranks wrote, one and three read, bit for bit, and go on the same."""

import io
import os
import pathlib
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ductile.config.schema.trainer import AdamWConfig, SFTLoss, SGDConfig, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric.groups import Groups
from ductile.parallel.data import like, local_shard
from ductile.parallel.distributed_checkpoint import StateError
from ductile.parallel.gathered import full
from ductile.parallel.metadata import SafeReader, UnsafeMetadata
from ductile.parallel.parallel_context import ParallelContext
from ductile.records import MicroBatch
from ductile.trainer.checkpoint import load_state, save_state
from ductile.trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.naive import make_samples

Named = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that neither two nor three divide."""
    return make_model_folder(
        tmp_path_factory.mktemp("model"), "qwen3", head_dim=2, hidden_size=34, intermediate_size=25
    )


def whole_state(trainer: Trainer) -> Named:
    state: Named = {}
    for name, parameter in trainer.model.named_parameters():
        kept = trainer.optimizer.state[name]
        moments = {kind: kept[kind] for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer") if kind in kept}
        for kind, tensor in {"model": parameter.detach(), **moments}.items():
            state[f"{kind}/{name}"] = full(like(parameter, local_shard(tensor))).clone()
    return state


def step(trainer: Trainer, rank: int) -> None:
    trainer.forward_backward([MicroBatch(tuple(make_samples((9, 14), seed=rank)) if rank == 0 else ())])
    trainer.optim_step(10.0)


def train_and_save(groups: Groups, members: tuple[int, ...], settings: dict, path: str) -> tuple[int, Named, Named]:
    context = ParallelContext(groups, ParallelLayout.of(members))
    trainer = Trainer(TrainerConfig.model_validate(settings), context)
    for _ in range(3):
        step(trainer, context.data_parallel_rank)
    save_state(trainer, path)
    saved = whole_state(trainer)
    step(trainer, context.data_parallel_rank)
    return trainer.step, saved, whole_state(trainer)


def load_and_train(groups: Groups, members: tuple[int, ...], settings: dict, path: str) -> tuple[int, Named, Named]:
    context = ParallelContext(groups, ParallelLayout.of(members))
    trainer = Trainer(TrainerConfig.model_validate(settings), context)
    load_state(trainer, path)
    loaded = whole_state(trainer)
    step(trainer, context.data_parallel_rank)
    return trainer.step, loaded, whole_state(trainer)


@pytest.mark.parametrize(
    ("optim", "compute_dtype"),
    [(AdamWConfig(lr=1e-2), "bfloat16"), (AdamWConfig(lr=1e-2), "float32"), (SGDConfig(lr=1e-2), "float32")],
    ids=["adamw, bfloat16", "adamw", "sgd"],
)
def test_saved_on_two_ranks_loaded_on_three_and_one(
    folder: Path, tmp_path: Path, optim: AdamWConfig | SGDConfig, compute_dtype: str
) -> None:
    model = {"name": str(folder), "compute_dtype": compute_dtype}
    settings = TrainerConfig.model_validate({"model": model, "optim": optim, "loss": SFTLoss()})
    arguments = (settings.model_dump(), str(tmp_path / "state"))
    num_steps, saved, after = run_ranks(2, train_and_save, *arguments)[0]
    for num_ranks in (3, 1):
        for loaded_steps, loaded, gone_on in run_ranks(num_ranks, load_and_train, *arguments):
            assert loaded_steps == num_steps == 4
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)
            for name in after:
                torch.testing.assert_close(gone_on[name], after[name], rtol=1e-5, atol=1e-7)


def load_wrongly(groups: Groups, members: tuple[int, ...], settings: dict, path: str) -> str:
    trainer = Trainer(TrainerConfig.model_validate(settings), ParallelContext(groups, ParallelLayout.of(members)))
    with pytest.raises(StateError) as caught:
        load_state(trainer, path)
    return str(caught.value)


def test_half_a_state_and_a_strangers_state_are_refused(folder: Path, tmp_path: Path) -> None:
    settings = TrainerConfig.model_validate({"model": {"name": str(folder)}, "loss": SFTLoss()})
    path = tmp_path / "state"
    path.mkdir()
    (said,) = run_ranks(1, load_wrongly, settings.model_dump(), str(path))
    assert said == f"{path} has no complete trainer state (.metadata is missing)"

    run_ranks(1, train_and_save, settings.model_dump(), str(path))
    other = make_model_folder(tmp_path / "other", "qwen3", num_hidden_layers=3)
    theirs = settings.model_copy(update={"model": settings.model.model_copy(update={"name": str(other)})})
    (said,) = run_ranks(1, load_wrongly, theirs.model_dump(), str(path))
    assert f"{path} does not fit this model and optimizer" in said


def save_on_a_full_disk(groups: Groups, members: tuple[int, ...], settings: dict, path: str) -> tuple[str, int]:
    trainer = Trainer(TrainerConfig.model_validate(settings), ParallelContext(groups, ParallelLayout.of(members)))
    with pytest.raises(StateError) as caught:
        save_state(trainer, path)
    step(trainer, trainer.context.data_parallel_rank)
    return str(caught.value), trainer.step


def test_a_full_disk_of_one_rank_is_named_on_all_and_they_train_on(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir()
    (path / "__1_0.distcp").symlink_to("/dev/full")  # where the second rank writes
    settings = TrainerConfig.model_validate({"model": {"name": str(folder)}, "loss": SFTLoss()})
    for said, num_steps in run_ranks(2, save_on_a_full_disk, settings.model_dump(), str(path)):
        assert said.startswith(f"{path} cannot be written: No space left on device (")
        assert num_steps == 1


class Stranger:
    """Pickles as a call of a function of our own choice."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("how", ["metadata", "bytes", "elsewhere"])
def test_nothing_that_a_stranger_wrote_into_a_checkpoint_is_called(folder: Path, tmp_path: Path, how: str) -> None:
    path, proof = tmp_path / "state", tmp_path / "proof"
    settings = TrainerConfig.model_validate({"model": {"name": str(folder)}, "loss": SFTLoss()}).model_dump()
    run_ranks(1, train_and_save, settings, str(path))
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 (our own)
    if how == "metadata":
        metadata.planner_data = Stranger(os.mkdir, str(proof))
        reason = ".metadata names posix.mkdir, which no checkpoint needs"
    elif how == "bytes":
        stranger = io.BytesIO()
        torch.save(Stranger(os.mkdir, str(proof)), stranger)
        (index,) = (index for index in metadata.storage_data if index.fqn == "num_updates")
        info = metadata.storage_data[index]
        (path / "__9_0.distcp").write_bytes(stranger.getvalue())
        metadata.storage_data[index] = type(info)("__9_0.distcp", 0, len(stranger.getvalue()))
        metadata.state_dict_metadata["num_updates"] = BytesStorageMetadata()
        reason = "BytesStorageMetadata, which no checkpoint needs"
    else:
        index, info = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = type(info)("../elsewhere", info.offset, info.length)
        reason = ".metadata names the file ../elsewhere, which is not in its folder"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (said,) = run_ranks(1, load_wrongly, settings, str(path))
    assert reason in said
    assert not proof.exists()


def test_metadata_that_changes_what_it_names_is_refused_and_undone(tmp_path):
    """A pickle may set attributes of a class, even of one that it may name."""
    method = pathlib.PosixPath.is_file
    state = b"}X\x07\x00\x00\x00is_filectorch.serialization\n_get_layout\ns"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02cpathlib\nPosixPath\nN" + state + b"\x86b.")
    with pytest.raises(UnsafeMetadata, match=r"changes pathlib\.PosixPath"):
        SafeReader(tmp_path).read_metadata()
    assert pathlib.PosixPath.is_file is method
