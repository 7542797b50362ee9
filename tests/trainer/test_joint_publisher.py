"""What the ranks of a trainer write between them is the version that one of them would gather, or it is none."""

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ductile.config.schema.trainer import SFTLoss, SGDConfig, TrainerConfig
from ductile.core.batch.packing import pack
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.transfer import owners
from ductile.fabric import segment as segment_module
from ductile.fabric.groups import Groups
from ductile.fabric.segment import Segment
from ductile.messages.workers import Publish, Withdraw
from ductile.parallel.parallel_context import ParallelContext
from ductile.parallel.parts import SlotParts
from ductile.records import Manifest
from ductile.roles import StateKept
from ductile.trainer import own_weights
from ductile.trainer.joint_publisher import JointPublisher
from ductile.trainer.own_weights import OwnWeights
from ductile.trainer.state import named_state, parts_of
from ductile.trainer.train_role import TrainRole
from ductile.trainer.trainer import Trainer
from ductile.weights.digest import whole_digest
from ductile.weights.shared_memory import SharedMemory
from tests.nightly import mostly_nightly
from tests.ranks import run_ranks
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet, SlotFailed, SlotGone
from tests.trainer.naive import make_samples

SAMPLES = make_samples((9, 14, 5))
JOINT = ["c10d::broadcast_", "c10d::allreduce_"]
"""The collectives of a version that nobody gathers."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models: tied embeddings, and a vocabulary that two slots cannot cut evenly."""
    root = tmp_path_factory.mktemp("models")
    keys: dict[str, dict[str, Any]] = {
        "qwen3": {},
        "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "vocab_size": 103},
    }
    return {family: str(make_model_folder(root / family, family, **more)) for family, more in keys.items()}


def settings_of(folder: str, **model: Any) -> dict[str, Any]:
    sections = {"model": {"name": folder, **model}, "loss": SFTLoss(), "optim": SGDConfig(lr=0.1)}
    return TrainerConfig.model_validate(sections).model_dump()


class Watched(TorchDispatchMode):
    """The collectives that are called, and the bytes of each tensor that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.allocated: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.collectives.append(func._schema.name)
        known = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        new = [each.untyped_storage() for each in tensors_in(found)]
        self.allocated += [storage.nbytes() for storage in new if storage.data_ptr() not in known]
        return found


def tensors_in(values: Any) -> Iterator[Tensor]:
    if type(values) is Tensor:
        yield values
    elif isinstance(values, list | tuple | dict):
        for each in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(each)


@contextmanager
def no_gathering() -> Iterator[None]:
    with patch.object(Trainer, "publish_weights", side_effect=AssertionError("the weights are gathered")):
        yield


def trainer_after_a_step(groups: Groups, layout: ParallelLayout, settings: dict[str, Any]) -> Trainer:
    trainer = Trainer(TrainerConfig.model_validate(settings), ParallelContext(groups, layout))
    trainer.forward_backward(pack(SAMPLES, layout.num_data_parallel, 64)[trainer.context.data_parallel_rank])
    trainer.optim_step(20.0)
    return trainer


def publish_both(
    groups: Groups, members: tuple[int, ...], settings: dict[str, Any], sizes: dict[str, int]
) -> tuple[list[str], bool | None]:
    """The collectives of the joint version; whether it is the one that is gathered, where it is published."""
    layout = ParallelLayout.of(members, (0, 1) if "pp" in sizes else (), **sizes)
    publisher, memory = JointPublisher(), SharedMemory()
    with patch.object(owners, "LEAST_SHARED", 8), patch.object(own_weights, "PIECE_BYTES", 256):
        trainer = trainer_after_a_step(groups, layout, settings)
        state = parts_of(named_state(trainer))
        with no_gathering(), Watched() as watched:
            joint = publisher.publish(1, trainer, state)
    tensors = trainer.publish_weights()
    gathered = memory.publish(1, tensors) if trainer.context.is_first else None
    for _ in tensors:
        pass
    same = None
    if joint is not None and gathered is not None:
        received = SharedMemory().receive(joint)
        assert whole_digest(received.items()) == joint.digest
        assert all(tensor.dtype == trainer.precision.compute for tensor in received.values())
        same = replace(joint, location="") == replace(gathered, location="")  # each digest, and the bytes' fingerprint
    publisher.close()
    memory.close()
    return watched.collectives, same


LAYOUTS: tuple[tuple[int, dict[str, int]], ...] = (
    (1, {}),
    (3, {}),
    (4, {"dp_replicate": 2}),
    (2, {"tp": 2}),
    (4, {"tp": 4}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    (4, {"pp": 2, "tp": 2}),
    (4, {"tp": 2}),
)


@pytest.mark.parametrize(
    ("family", "compute_dtype", "num_ranks", "sizes"),
    mostly_nightly(
        [
            (family, dtype, *layout)
            for layout in LAYOUTS
            for family in ("qwen3", "llama")
            for dtype in ("float32", "bfloat16")
        ],
        ("qwen3", "float32", 1, {}),
        ("llama", "bfloat16", 3, {}),
        ("qwen3", "bfloat16", 4, {"dp_replicate": 2}),
        ("llama", "float32", 2, {"tp": 2}),
        ("qwen3", "bfloat16", 2, {"cp": 2}),
        ("qwen3", "float32", 2, {"pp": 2}),
        ("llama", "bfloat16", 4, {"pp": 2, "tp": 2}),
        ("llama", "bfloat16", 4, {"tp": 2}),
    ),
    ids=str,
)
def test_ranks_write_the_version_that_one_would_gather(
    folders: dict[str, str], num_ranks: int, sizes: dict[str, int], family: str, compute_dtype: str
) -> None:
    settings = settings_of(folders[family], compute_dtype=compute_dtype)
    slots = range(num_ranks + 2, 2, -1)  # the first slot of a layout is not the least
    results = run_ranks(num_ranks, publish_both, settings, sizes, slots=slots)
    assert [collectives for collectives, _ in results] == [JOINT] * num_ranks
    assert [same for _, same in results] == [True] + [None] * (num_ranks - 1)


def memory_of_publishing(groups: Groups, members: tuple[int, ...], settings: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes that are allocated when a version is published jointly, and gathered; bytes of the version."""
    with patch.object(own_weights, "PIECE_BYTES", 256):
        trainer = trainer_after_a_step(groups, ParallelLayout.of(members), settings)
        publisher = JointPublisher()
        state = parts_of(named_state(trainer))
        with Watched() as jointly:
            manifest = publisher.publish(1, trainer, state)
        with Watched() as gathered:
            num_bytes = sum(tensor.nbytes for _, tensor in trainer.export_weights(trainer.precision.compute))
    assert (manifest is not None) == trainer.context.is_first
    publisher.close()
    return sum(jointly.allocated), sum(gathered.allocated), num_bytes


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_no_rank_needs_memory_beside_the_segment(folders: dict[str, str], compute_dtype: str) -> None:
    settings = settings_of(folders["qwen3"], compute_dtype=compute_dtype)
    for jointly, gathered, num_bytes in run_ranks(2, memory_of_publishing, settings):
        assert jointly < num_bytes // 20
        assert gathered > num_bytes // 2, "what is gathered would show"


Fault = Callable[[], Any]


def copy_fails() -> Any:
    return patch.object(OwnWeights, "copy", side_effect=OSError(errno.EFAULT, "Bad address"))


def cannot_be_mapped() -> Any:
    return patch.object(segment_module.mmap, "mmap", side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))


def cannot_be_sealed(function: str) -> Any:
    """The seal is refused, or what is sealed cannot be read, or there is no memory to read it into."""
    failure = OSError(errno.ENOMEM, "Cannot allocate memory")
    if function == "bytearray":
        return patch.object(Segment, "_read_fingerprint", side_effect=MemoryError("Cannot allocate memory"))
    if function == "fcntl":
        return patch.object(segment_module.fcntl, "fcntl", side_effect=failure)
    return patch.object(segment_module.os, "preadv", side_effect=failure)


@contextmanager
def no_room() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def a_box_is_left_out() -> Any:
    shared = SlotParts.shared
    return patch.object(SlotParts, "shared", lambda parts, name: [] if name == "norm.weight" else shared(parts, name))


def is_elsewhere() -> Any:
    """Slot on another host: the path is another file there."""
    return patch.object(segment_module.os, "readlink", lambda path: "/dev/null")


@dataclass
class Outcome:
    """What came of `Publish` on a slot."""

    manifest: Manifest | None
    error: str
    printed: str
    collectives: list[str]
    num_left: int
    """Files that are open and were not before."""


def publish(role: TrainRole, version: int, faults: dict[int, Fault], slot: int) -> Outcome:
    num_open = len(os.listdir("/proc/self/fd"))
    manifest, failed, printed = None, "", StringIO()
    with patch.object(owners, "LEAST_SHARED", 8), Watched() as watched, redirect_stderr(printed):
        try:
            with faults.get(slot, nullcontext)():
                manifest = role.handle(Publish(version)).manifest
        except StateKept as error:
            failed = str(error)
    num_left = len(os.listdir("/proc/self/fd")) - num_open
    return Outcome(manifest, failed, printed.getvalue(), watched.collectives, num_left)


def publish_on_all(fleet: Fleet, version: int, faults: dict[int, Fault] | None = None) -> list[Outcome]:
    for slot in fleet.layout.slots:
        fleet.post(slot, "call", publish, (version, faults or {}, slot))
    return [fleet.answer(slot) for slot in fleet.layout.slots]


def digest_received(outcome: Outcome) -> str:
    """The digest of what is published, which is the one that was announced."""
    assert outcome.manifest is not None
    found = whole_digest(SharedMemory().receive(outcome.manifest).items())
    assert found == outcome.manifest.digest
    return found


@pytest.mark.parametrize(
    ("failing", "fault", "text"),
    [
        (1, copy_fails, "OSError: [Errno 14] Bad address"),
        (1, cannot_be_mapped, "OSError: [Errno 12] Cannot allocate memory"),
        (0, copy_fails, "OSError: [Errno 14] Bad address"),
        (0, no_room, "OSError: [Errno 27] File too large"),
    ],
)
def test_where_a_rank_fails_nothing_is_published_and_all_go_on(
    folders: dict[str, str], failing: int, fault: Fault, text: str
) -> None:
    with Fleet(settings_of(folders["qwen3"]), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        for slot, outcome in enumerate(publish_on_all(fleet, 1, {failing: fault})):
            why = text if slot == failing else f"slot {failing} could not write a part of the weights"
            assert outcome.error.startswith(f"NotPublished: version 1 is not published: {why}")
            assert (outcome.manifest, outcome.collectives, outcome.num_left) == (None, JOINT, 0)
        fleet.forward_backward(SAMPLES)
        fleet.optim_step(20.0)
        first, second = publish_on_all(fleet, 1)
        assert digest_received(first)
        assert (first.error, first.num_left) == ("", 1)
        assert second == Outcome(None, "", "", JOINT, 0)
        fleet.release((0, 1))


@pytest.mark.parametrize("function", ["fcntl", "preadv", "bytearray"])
def test_where_the_first_rank_cannot_seal_the_version_it_alone_says_so(folders: dict[str, str], function: str) -> None:
    with Fleet(settings_of(folders["qwen3"]), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        first, second = publish_on_all(fleet, 1, {0: partial(cannot_be_sealed, function)})
        cause = "MemoryError: " if function == "bytearray" else "OSError: [Errno 12] "
        assert first.error.startswith(f"NotPublished: version 1 is not published: {cause}Cannot allocate memory")
        assert (first.manifest, first.collectives, first.num_left) == (None, JOINT, 0)
        assert second == Outcome(None, "", "", JOINT, 0)
        assert not any(outcome.error for outcome in publish_on_all(fleet, 1)), "all are asked again"
        fleet.release((0, 1))


def test_a_box_that_nobody_writes_is_missed(folders: dict[str, str]) -> None:
    with Fleet(settings_of(folders["qwen3"]), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        outcomes = publish_on_all(fleet, 1, dict.fromkeys((0, 1), a_box_is_left_out))
        text = "NotPublished: version 1 is not published: the slots' parts and the version differ by 128 bytes"
        assert [outcome.error for outcome in outcomes] == [text, text]
        fleet.release((0, 1))


def test_a_version_that_is_published_again_is_the_weights_of_that_moment(folders: dict[str, str]) -> None:
    """As after a `Publish` whose reply nobody has heard."""
    with Fleet(settings_of(folders["qwen3"]), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        before = digest_received(publish_on_all(fleet, 1)[0])
        fleet.forward_backward(SAMPLES)
        fleet.optim_step(20.0)
        first, second = publish_on_all(fleet, 1)
        assert digest_received(first) != before
        assert (first.error, first.num_left) == ("", 0), "the one before is freed"
        assert second == Outcome(None, "", "", JOINT, 0)
        fleet.ask({0: Withdraw(1)})
        fleet.release((0, 1))


def test_where_a_rank_cannot_open_the_segment_the_weights_are_gathered(folders: dict[str, str]) -> None:
    far: dict[int, Fault] = {2: is_elsewhere}
    with Fleet(settings_of(folders["qwen3"], compute_dtype="bfloat16"), slots=range(3)) as fleet:
        fleet.assign((0, 1, 2))
        first, *others = publish_on_all(fleet, 1, far)
        again, *others_again = publish_on_all(fleet, 2, far)
        for leader, rest in ((first, others), (again, others_again)):
            assert (leader.error, leader.num_left) == ("", 1)
            assert rest == [Outcome(None, "", "", leader.collectives, 0)] * 2
        why = "slot 2 cannot open the memory of the first slot"
        assert first.printed == f"the trainer's weights are gathered where they are published: {why}\n"
        assert not again.printed, "it was said"
        assert first.collectives[:2] == JOINT
        assert again.collectives == ["c10d::broadcast_", *first.collectives[2:]], "nothing is written in vain again"
        gathered = {digest_received(first), digest_received(again)}
        fleet.release((0, 1, 2))

        fleet.assign((0, 1))
        near = publish_on_all(fleet, 3, far)
        assert [outcome.collectives for outcome in near] == [JOINT, JOINT]
        assert {digest_received(near[0])} == gathered
        fleet.release((0, 1))


def no_memory(error: type[Exception]) -> Any:
    """As Python says it, and as torch does."""
    return patch.object(Segment, "append", side_effect=error("can't allocate memory: you tried to allocate 8 bytes"))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (no_room, "OSError: [Errno 27] File too large"),
        (partial(no_memory, MemoryError), "MemoryError: can't allocate memory"),
        (partial(no_memory, RuntimeError), "RuntimeError: can't allocate memory"),
    ],
)
def test_the_gathering_rank_that_fails_leaves_all_in_step(folders: dict[str, str], fault: Fault, text: str) -> None:
    far: dict[int, Fault] = {1: is_elsewhere}
    with Fleet(settings_of(folders["qwen3"]), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        publish_on_all(fleet, 1, far)
        first, second = publish_on_all(fleet, 2, {**far, 0: fault})
        assert f"NotPublished: version 2 is not published: {text}" in first.error
        assert first.num_left == 0
        assert second == Outcome(None, "", "", first.collectives, 0)
        fleet.forward_backward(SAMPLES)
        assert not any(outcome.error for outcome in publish_on_all(fleet, 2, far))
        fleet.release((0, 1))


def fail_in_step(_: Trainer, with_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    raise RuntimeError("a collective has failed")
    yield


def test_a_rank_that_fails_in_the_gathering_itself_has_lost_its_trainer(folders: dict[str, str]) -> None:
    with Fleet(settings_of(folders["qwen3"]), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        publish_on_all(fleet, 1, {1: is_elsewhere})
        faults = {0: partial(patch.object, Trainer, "publish_weights", fail_in_step), 1: is_elsewhere}
        for slot in range(2):
            fleet.post(slot, "call", publish, (2, faults, slot))
        for slot, text in enumerate(("RuntimeError: a collective has failed", "Error")):
            with pytest.raises(SlotFailed, match=text):
                fleet.answer(slot)
        fleet.release((0, 1))


def dies_in_the_middle(role: TrainRole, version: int, slot: int, victim: int) -> tuple[bool, list[str]]:
    """Whether a slot has its trainer then, and memory of the version that is left there. The victim ends with its third
    box, and says nothing."""
    num_copied, copy = 0, OwnWeights.copy

    def copy_and_die(weights: OwnWeights, *arguments: Any) -> int:
        nonlocal num_copied
        num_copied += 1
        if num_copied == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return copy(weights, *arguments)

    with patch.object(OwnWeights, "copy", copy_and_die if slot == victim else copy), pytest.raises(RuntimeError):
        role.handle(Publish(version))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    left = [each for each in (*mapped, *opened) if "ductile-weights" in each]
    return role._instance is not None and role._instance.trainer is not None, left


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_ends_the_version_on_all(folders: dict[str, str], victim: int) -> None:
    with Fleet(settings_of(folders["qwen3"]), slots=range(3)) as fleet:
        fleet.assign((0, 1, 2))
        for slot in range(3):
            fleet.post(slot, "call", dies_in_the_middle, (1, slot, victim))
        with pytest.raises(SlotGone, match=f"slot {victim} ended with -9"):
            fleet.answer(victim)
        others = [slot for slot in range(3) if slot != victim]
        for slot in others:
            assert fleet.answer(slot) == (False, []), "the trainer is lost, and no memory with it"
        fleet.release(others)
        fleet.assign(others)
        first, second = publish_on_all(fleet, 1)
        assert digest_received(first)
        assert second == Outcome(None, "", "", JOINT, 0)
        fleet.release(others)
