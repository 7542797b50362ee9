"""The train role, driven by its messages in real processes."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ductile.config.schema.trainer import SFTLoss, SGDConfig, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.fabric import rendezvous
from ductile.messages.workers import (
    Done,
    ExportModel,
    ForwardBackward,
    LoadState,
    OptimStep,
    Ping,
    Publish,
    SaveState,
    Withdraw,
)
from ductile.model import checkpoint as model_checkpoint
from ductile.model.checkpoint import load_model
from ductile.model.safetensors_writer import write_safetensors
from ductile.records import ChatFormat, MicroBatch, Sample
from ductile.roles import RoleAssignment, StateKept
from ductile.trainer.export import export_model
from ductile.trainer.loss import LossInputs, LossOutputs
from ductile.trainer.train_role import TrainRole
from ductile.trainer.trainer import LossFailed
from ductile.weights.shared_memory import SharedMemory, WeightsUnavailable
from tests.ranks import result_of, start, stop
from tests.tiny import IM_END, PAD, make_model_folder
from tests.trainer.naive import make_samples

SAMPLES = make_samples((9, 14, 5))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a base model: its template ends a turn with a token that its files do not name as an end."""
    folder = make_model_folder(tmp_path_factory.mktemp("model"), "qwen3", eos_token_id=PAD)
    files = {"tokenizer_config.json": {"eos_token": "<|pad|>"}, "generation_config.json": {"eos_token_id": PAD}}
    for name, settings in files.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | settings))
    sections = {"model": {"name": str(folder)}, "loss": SFTLoss(), "optim": SGDConfig(lr=0.1)}
    return TrainerConfig.model_validate(sections).model_dump()


def on_slots(members: tuple[int, ...], function: Any, *arguments: Any, mourned: tuple[int, ...] = ()) -> list[Any]:
    """The results of `function(place, *arguments)` on each slot; None from those that are expected to die."""
    store = rendezvous.host_store()
    places = [RoleAssignment(slot, ParallelLayout.of(members), 0, "cpu", f"127.0.0.1:{store.port}") for slot in members]
    started = [start(function, place, *arguments) for place in places]
    try:
        return [
            None if place.slot in mourned else result_of(connection, f"slot {place.slot}")
            for place, (_, connection) in zip(places, started, strict=True)
        ]
    finally:
        stop(*(process for process, _ in started))


def share(place: RoleAssignment) -> tuple[MicroBatch, ...]:
    """The first member runs all samples; it is uneven, and that is fine."""
    return (MicroBatch(tuple(SAMPLES) if place.slot == place.layout.slots[0] else ()),)


def live(place: RoleAssignment, settings: dict[str, Any], folder: str) -> dict[str, Any]:
    role = TrainRole(settings, place)
    done = role.handle(ForwardBackward(share(place)))
    report = role.handle(OptimStep(20.0)).report
    manifest = role.handle(Publish(1)).manifest
    published = {}
    if manifest is not None:
        published = {name: tensor.clone() for name, tensor in SharedMemory().receive(manifest).items()}
    role.handle(SaveState(f"{folder}/state"))
    role.handle(ExportModel(f"{folder}/hf", "auto", ChatFormat({"default": "{{ messages }}"}, (PAD, IM_END))))
    role.handle(ExportModel(f"{folder}/half", "bfloat16"))
    role.handle(ForwardBackward(share(place)))
    role.handle(OptimStep(1.0))
    role.handle(LoadState(f"{folder}/state"))
    again = role.handle(Publish(2)).manifest
    same = again is None or all(
        torch.equal(tensor, published[name]) for name, tensor in SharedMemory().receive(again).items()
    )
    assert role.handle(Withdraw(2)) == Done()
    gone = manifest is None
    if manifest is not None:
        try:
            SharedMemory().receive(manifest)
        except WeightsUnavailable:
            gone = True
    assert not role.has_work()
    assert role.step() == []
    role.close()
    return {
        "num_tokens": done.num_tokens,
        "busy_s": done.busy_s,
        "report": report,
        "published": published,
        "same_after_load": same,
        "gone": gone,
    }


def test_a_whole_life_on_two_slots(settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = on_slots((5, 2), live, settings, str(tmp_path))
    num_trained = sum(sum(sample.loss_mask) for sample in SAMPLES)
    assert (first["num_tokens"], second["num_tokens"]) == (num_trained, 0)
    assert first["report"] == second["report"]
    assert first["report"].num_tokens == num_trained
    assert first["busy_s"] > 0
    assert first["published"]
    assert second["published"] == {}
    assert first["same_after_load"]
    assert first["gone"]
    exported = dict(load_model(tmp_path / "hf").named_parameters())
    assert exported.keys() == first["published"].keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in first["published"].items())
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("hf", "half")]
    assert sizes[1] < 0.6 * sizes[0], "bfloat16 was asked for"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [PAD, IM_END]
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"


def die_in_the_middle(place: RoleAssignment, settings: dict[str, Any]) -> list[str]:
    role = TrainRole(settings, place)
    role.handle(ForwardBackward(share(place)))
    if place.slot == place.layout.slots[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for command in (ForwardBackward(share(place)), OptimStep(1.0)):
        with pytest.raises(RuntimeError) as caught:
            role.handle(command)
        said.append(str(caught.value))
    role.close()
    return said


def test_when_a_member_dies_the_others_fail_long_before_the_timeout(settings: dict[str, Any]) -> None:
    """`dist_timeout_seconds` is 600; the harness waits 60."""
    *survivors, _ = on_slots((0, 1, 2, 3), die_in_the_middle, settings, mourned=(3,))
    for first, second in survivors:
        assert "Timed out" not in first
        assert second == "the train role was lost in an earlier failure; release it and assign it anew"


def fail_alone(place: RoleAssignment, settings: dict[str, Any]) -> str:
    role = TrainRole(settings, place)
    bad = MicroBatch((Sample((1, 2), (True, True)),))
    work = (bad,) if place.slot == 0 else share(place)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        role.handle(ForwardBackward(work))
    return str(caught.value)


def no_long_answers(inputs: LossInputs) -> LossOutputs:
    """A loss of a user's, which only the first member's samples make fail."""
    if len(inputs.logprobs) > 1:
        raise ZeroDivisionError("float division by zero")
    return LossOutputs(inputs.logprobs)


def survive(place: RoleAssignment, settings: dict[str, Any], folder: str) -> tuple[str, bool]:
    role = TrainRole(settings, place)
    said = ""
    try:
        role.handle(ForwardBackward(share(place)))
    except LossFailed as error:
        said = str(error)
    saved = role.handle(SaveState(f"{folder}/state")) == Done()
    role.close()
    return said, saved


@pytest.mark.parametrize("members", [(0,), (0, 1)])
def test_a_loss_that_raises_leaves_a_trainer_that_can_be_saved(
    settings: dict[str, Any], tmp_path: Path, members: tuple[int, ...]
) -> None:
    loss = {"type": "custom", "import_path": "tests.trainer.test_worker.no_long_answers"}
    (said, _), *others = saved = on_slots(members, survive, settings | {"loss": loss}, str(tmp_path))
    assert re.match(r"trainer\.loss failed: ZeroDivisionError: float division by zero \(test_worker\.py:\d+\)$", said)
    assert all(not what for what, _ in others)
    assert all(is_saved for _, is_saved in saved)


def test_one_members_error_frees_the_others(settings: dict[str, Any]) -> None:
    first, *others = on_slots((0, 1, 2), fail_alone, settings)
    assert first == "sample 0 trains on its first token, which nothing precedes"
    assert all("sample" not in said for said in others)


def fail_to_export(place: RoleAssignment, settings: dict[str, Any], path: str) -> tuple[str, int]:
    role = TrainRole(settings, place)
    said = "exported"
    try:
        role.handle(ExportModel(path, "auto"))
    except StateKept as error:
        said = str(error)
    return said, role.handle(ForwardBackward(share(place))).num_tokens


def test_a_disk_error_of_the_first_member_leaves_all_in_step(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a directory")
    (first, num_tokens), (second, _) = on_slots((0, 1), fail_to_export, settings, str(tmp_path / "file" / "hf"))
    assert first.endswith(("hf cannot be written: Not a directory", "hf cannot be written: File exists"))
    assert second == "exported", "what the other slot was to do has been done"
    assert num_tokens > 0


def export_in_many_files(place: RoleAssignment, settings: dict[str, Any], path: str) -> list[str]:
    role = TrainRole(settings, place)
    written: list[str] = []

    def noted(file: Path, *arguments: Any) -> None:
        written.append(file.name)
        write_safetensors(file, *arguments)

    with patch.object(model_checkpoint, "write_safetensors", noted):
        export_model(role._live, path, "auto", max_shard_bytes=20_000)
    role.close()
    return written


def test_slots_share_the_files_of_an_export(settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = on_slots((0, 1), export_in_many_files, settings, str(tmp_path / "hf"))
    assert abs(len(first) - len(second)) <= 1
    assert sorted(first + second) == sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    saved, source = load_model(tmp_path / "hf"), load_model(settings["model"]["name"])
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), source.parameters(), strict=True))


def ask_for_something_else(place: RoleAssignment, settings: dict[str, Any]) -> str:
    role = TrainRole(settings, RoleAssignment(place.slot, place.layout, 0, "cpu"))  # alone, it needs no rendezvous
    with pytest.raises(ValueError, match="does not know") as caught:
        role.handle(Ping())
    return str(caught.value)


def test_an_unknown_command_is_refused(settings: dict[str, Any]) -> None:
    assert on_slots((3,), ask_for_something_else, settings) == ["a train slot does not know the command Ping"]
