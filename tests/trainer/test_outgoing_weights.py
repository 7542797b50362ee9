"""What the ranks of a trainer send, between them: whole versions, which no optimizer step tears."""

import os
import queue
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ductile.config.schema.trainer import SFTLoss, SGDConfig, TrainerConfig
from ductile.core.layout.geometry.parallel_layout import ParallelLayout
from ductile.core.transfer import owners
from ductile.fabric import rendezvous
from ductile.fleet.updates.update_parties import summed_by_name
from ductile.messages.outgoing_updates import BeginUpdate, FinishUpdate
from ductile.messages.updates import Bucket, Offer, PrepareUpdate, Receiver, WeightCarrier, WeightUpdate, total_of
from ductile.messages.workers import ForwardBackward, OptimStep, Publish
from ductile.model.checkpoint import load_model
from ductile.records import MicroBatch
from ductile.roles import RoleAssignment, StateKept
from ductile.trainer import outgoing_weights
from ductile.trainer.outgoing_weights import OutgoingWeights
from ductile.trainer.train_role import TrainRole
from ductile.weights.carriers import receive
from ductile.weights.carriers.channel import Coming
from ductile.weights.carriers.source import connect
from ductile.weights.digest import box_digest, total, whole_digest
from ductile.weights.sender import WeightSender
from ductile.weights.shared_memory import SharedMemory
from tests.ranks import result_of, start, stop
from tests.tiny import make_model_folder
from tests.trainer.fleet import Fleet
from tests.trainer.naive import make_samples
from tests.weights.memory_sender import MemorySender, assemble, box_of

SAMPLES = tuple(make_samples((9, 14, 5)))
RECEIVERS = (Receiver("http-1", "shared_memory"),)
Sent = tuple[Offer, dict[int, Tensor], Any]
"""A rank's offer, the content of its buckets, its report."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model_folder(tmp_path_factory.mktemp("model"), "qwen3"))


def settings_of(folder: str, **model: Any) -> dict[str, Any]:
    sections = {"model": {"name": folder, **model}, "loss": SFTLoss(), "optim": SGDConfig(lr=0.1)}
    return TrainerConfig.model_validate(sections).model_dump()


def update(version: int, bucket_bytes: int = 3000, **more: Any) -> WeightUpdate:
    return WeightUpdate(f"u{version}", version, version, RECEIVERS, bucket_bytes, **more)


def on_ranks(layout: ParallelLayout, function: Any, *arguments: Any) -> list[Any]:
    store = rendezvous.host_store()
    address = f"127.0.0.1:{store.port}"
    started = [
        start(_with_role, function, RoleAssignment(slot, layout, 0, "cpu", address), *arguments)
        for slot in layout.slots
    ]
    try:
        return [result_of(connection, f"slot {layout.slots[at]}") for at, (_, connection) in enumerate(started)]
    finally:
        stop(*(process for process, _ in started))


def _with_role(function: Any, place: RoleAssignment, settings: dict[str, Any], *arguments: Any) -> Any:
    with patch.object(outgoing_weights, "WeightSender", MemorySender), patch.object(owners, "LEAST_SHARED", 8):
        told: queue.Queue[Any] = queue.Queue()
        role = TrainRole(settings, RoleAssignment(place.slot, place.layout, 0, "cpu", place.rendezvous, tell=told.put))
        try:
            return function(role, told, place, *arguments)
        finally:
            role.close()


def batch_of(place: RoleAssignment) -> ForwardBackward:
    is_first = place.layout.data_parallel_rank(place.slot) == 0
    return ForwardBackward((MicroBatch(SAMPLES if is_first else ()),))


def published(role: TrainRole, version: int) -> dict[str, Tensor]:
    manifest = role.handle(Publish(version)).manifest
    return {} if manifest is None else {name: t.clone() for name, t in SharedMemory().receive(manifest).items()}


def sent(role: TrainRole, told: "queue.Queue[Any]", order: WeightUpdate) -> Sent:
    offer = role.handle(BeginUpdate(order)).offer
    report = told.get(timeout=60).report
    role.handle(FinishUpdate(order.update_id, False))
    return offer, MemorySender.made[-1].content, report


def train_and_send(
    role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment
) -> list[tuple[Sent, dict[str, Tensor]]]:
    """The weights of the folder; those after a step; those of which only one tensor has changed since then."""
    found = [(sent(role, told, update(1)), published(role, 1))]
    role.handle(batch_of(place))
    role.handle(OptimStep(20.0))
    found.append((sent(role, told, update(2, base_version=1)), published(role, 2)))
    assert role._instance is not None
    if "model/layers.1.mlp.down_proj.weight" in role._instance.state:
        role._instance.state["model/layers.1.mlp.down_proj.weight"].add_(1.0)
    found.append((sent(role, told, update(3, base_version=2)), published(role, 3)))
    again = sent(role, told, update(4, base_version=3))
    assert not again[0].buckets
    assert again[2].digest == found[-1][0][2].digest
    return found


LAYOUTS = {
    "dp_replicate 2": ParallelLayout.of((0, 1), dp_replicate=2),
    "dp_shard 3": ParallelLayout.of((0, 1, 2)),
    "tp 2": ParallelLayout.of((1, 0), tp=2),
    "pp 2": ParallelLayout.of((0, 1), (0, 1), pp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_send_each_version_between_them(name: str, folder: str) -> None:
    half = name == "dp_shard 3"  # there the optimizer has more digits than are published
    settings = settings_of(folder, compute_dtype="bfloat16") if half else settings_of(folder)
    ranks = on_ranks(LAYOUTS[name], train_and_send, settings)
    tensors: dict[str, Tensor] = {}
    sizes: list[list[int]] = []
    for number, versions in enumerate(zip(*ranks, strict=True)):
        reference = next(whole for _, whole in versions if whole)
        if not number:
            loaded = {n: p.detach().to(reference[n].dtype) for n, p in load_model(folder).named_parameters()}
            assert_equal(reference, loaded)
        for (offer, content, report), _ in versions:
            assemble(tensors, offer, content)
            assert (offer.location, report.failed) == ("memory", {})
        assert_equal(tensors, reference)
        assert total_of(report.digest for (_, _, report), _ in versions) == whole_digest(reference.items())
        parts = summed_by_name(report.tensors for (_, _, report), _ in versions)
        assert parts == {each: whole_digest([(each, tensor)]) for each, tensor in reference.items()}
        sizes.append([report.num_bytes for (_, _, report), _ in versions])
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(sizes[0]) >= whole
    if "pp" not in name:
        assert max(sizes[0]) < 1.15 * min(sizes[0]), "each has as much to send as the others"
    changed = tensors["layers.1.mlp.down_proj.weight"].nbytes
    third = [report for (_, _, report), _ in list(zip(*ranks, strict=True))[2]]
    assert changed <= sum(report.num_bytes for report in third) < 2 * changed
    assert sum(report.num_bytes_unchanged for report in third) == whole - changed
    assert sum(report.num_bytes_equal for report in third) == whole - changed


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    assert not wrong


def held_and_stepped(
    role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment, hold: Path
) -> tuple[bool, bool, bool]:
    """Whether the step waited for the sender, and what was sent, and is now, is the version of before."""
    before = whole_digest(published(role, 1).items())
    MemorySender.hold = hold
    role.handle(BeginUpdate(update(1)))
    role.handle(batch_of(place))  # goes on meanwhile
    step = threading.Thread(target=role.handle, args=(OptimStep(20.0),))
    step.start()
    step.join(0.3)
    waited = step.is_alive()
    hold.unlink()
    step.join(60)
    digest = told.get(timeout=60).report.digest
    return waited, digest == before, whole_digest(published(role, 2).items()) == before


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_reader_is_safe_from_the_next_step_and_would_not_be_without_the_fence(
    is_fenced: bool, folder: str, tmp_path: Path
) -> None:
    (hold := tmp_path / "hold").touch()
    with patch.object(OutgoingWeights, "fence", OutgoingWeights.fence if is_fenced else lambda *_: None):
        place = RoleAssignment(0, ParallelLayout.of((0,)), 0, "cpu")
        waited, is_sent, is_still = _with_role(held_and_stepped, place, settings_of(folder), hold)
    MemorySender.hold = None
    assert (waited, is_sent) == (is_fenced, is_fenced)
    assert not is_still, "the step did change the weights"


def test_an_update_that_is_aborted_frees_the_step_that_waits(folder: str, tmp_path: Path) -> None:
    (hold := tmp_path / "hold").touch()

    def story(role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment) -> None:
        MemorySender.hold = hold
        role.handle(BeginUpdate(update(1)))
        role.handle(batch_of(place))
        step = threading.Thread(target=role.handle, args=(OptimStep(20.0),))
        step.start()
        role.handle(FinishUpdate("u1", True))  # as the thread beside does it
        step.join(60)
        assert not step.is_alive()
        assert told.get(timeout=60).report.failed == {"everybody": "the update was aborted"}

    _with_role(story, RoleAssignment(0, ParallelLayout.of((0,)), 0, "cpu"), settings_of(folder))
    MemorySender.hold = None


def stuck(role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment, hold: Path) -> tuple[Any, Any]:
    MemorySender.hold = hold
    role.handle(BeginUpdate(update(1, total_timeout_s=0.2)))
    role.handle(batch_of(place))
    stepped = role.handle(OptimStep(20.0))
    role.handle(FinishUpdate("u1", True))
    return stepped.report, told.get(timeout=60).report


def test_a_sender_that_is_stuck_holds_no_rank_longer_than_its_update_may_take(folder: str, tmp_path: Path) -> None:
    (hold := tmp_path / "hold").touch()
    ranks = on_ranks(ParallelLayout.of((0, 1)), stuck, settings_of(folder), hold)
    assert ranks[0][0] == ranks[1][0]
    for slot, (_, report) in enumerate(ranks):
        assert report.failed == {
            "everybody": f"OptimStep waited for slot-{slot} to send its weights until the update's deadline"
        }


def fail_to_begin(
    role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment
) -> tuple[list[str], list[str], Any, Any]:
    """What the slot said of two updates, of which slot 1 could not begin the first; its collectives; its report."""
    log: list[str] = []
    said: list[str] = []

    def logged(name: str, function: Any) -> Any:
        return lambda *arguments, **named: (log.append(name), function(*arguments, **named))[1]

    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")
    with patch.multiple(dist, **{name: logged(name, getattr(dist, name)) for name in names}):
        for version in (1, 2):
            fails = OSError("no space left") if (place.slot, version) == (1, 1) else None
            try:
                with patch.object(MemorySender, "start", side_effect=fails) if fails else nullcontext():
                    role.handle(BeginUpdate(update(version)))
                said.append("begun")
            except StateKept as error:
                said.append(str(error))
            role.handle(batch_of(place))
            role.handle(FinishUpdate(f"u{version}", version == 1))
            report = role.handle(OptimStep(20.0)).report
    return said, log, report, told.qsize()


def test_a_rank_that_cannot_begin_leaves_all_in_step(folder: str) -> None:
    first, second = on_ranks(ParallelLayout.of((0, 1)), fail_to_begin, settings_of(folder))
    assert first[0] == ["begun", "begun"]
    assert second[0] == ["OSError: no space left", "begun"]
    assert first[1] == second[1], "the same collectives in the same order"
    assert first[1]
    assert first[2] == second[2]


def close_beside_a_stuck_sender(role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment) -> None:
    instance, memory = role._instance, role._outgoing._memory
    assert instance is not None
    role.handle(Publish(1))
    role.handle(BeginUpdate(update(1)))
    told.get(timeout=60)
    memory.keep(memory.take(2, 10_000))
    assert segments() == {"ductile-buckets", "ductile-weights-1"}
    stuck = patch.object(MemorySender, "finish", side_effect=TimeoutError("the sender is still at work"))
    with (
        stuck,
        patch.object(instance.groups, "destroy", wraps=instance.groups.destroy) as destroyed,
        pytest.raises(TimeoutError, match="the sender is still at work"),
    ):
        role.close()
    assert segments() == set()
    assert (role._instance, instance.trainer, destroyed.call_count) == (None, None, 1)


def test_a_sender_that_is_stuck_keeps_nothing_else_of_the_role_from_being_freed(folder: str) -> None:
    on_ranks(ParallelLayout.of((0,)), close_beside_a_stuck_sender, settings_of(folder))


def test_a_receiver_that_takes_nothing_keeps_no_rank_from_finishing(folder: str) -> None:
    order = msgspec.structs.replace(update(1, bucket_timeout_s=60.0), receivers=(Receiver("a", "point_to_point"),))

    def story(role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment) -> None:
        with patch.object(outgoing_weights, "WeightSender", WeightSender):
            offer = role.handle(BeginUpdate(order)).offer
            never = threading.Event()
            source = connect(offer.location, offer.sender, "a", "point_to_point", order.secret, 20.0, never)
            assert isinstance(source.next(), Coming)
            role.handle(FinishUpdate("u1", True))
            source.close()
        assert told.get(timeout=60).report.failed == {"a": "a was left out: the update was aborted"}

    _with_role(story, RoleAssignment(0, ParallelLayout.of((0,)), 0, "cpu"), settings_of(folder))


def segments() -> set[str]:
    """Names of the memory of weights that this process has open, without what makes them unlike any other."""
    links: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return {match[1] for link in links if (match := re.match(r"/memfd:(ductile-(?:buckets|weights)(-[0-9]+)?)", link))}


def in_memory(role: TrainRole, hold: str) -> None:
    outgoing_weights.WeightSender = MemorySender  # pyright: ignore[reportAttributeAccessIssue]
    MemorySender.hold = Path(hold)


def test_a_rank_that_is_killed_in_an_update_frees_the_others(folder: str, tmp_path: Path) -> None:
    (hold := tmp_path / "hold").touch()
    with Fleet(settings_of(folder), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        fleet.call((0, 1), in_memory, str(hold))
        fleet.ask(dict.fromkeys((0, 1), BeginUpdate(update(1))))
        fleet.processes[1].kill()
        fleet.processes[1].join()
        fleet.ask({0: FinishUpdate("u1", True)})
        offer = fleet.ask({0: BeginUpdate(update(2))})[0].offer
        hold.unlink()
        assert offer.location == "memory", "what is left of the trainer can still be sent: its weights are whole"
        fleet.release((0,))


def test_what_was_finished_cannot_begin(folder: str) -> None:
    def story(role: TrainRole, told: "queue.Queue[Any]", place: RoleAssignment) -> None:
        role.handle(FinishUpdate("u1", True))
        with pytest.raises(StateKept, match="update u1 was finished before this slot had begun it"):
            role.handle(BeginUpdate(update(1)))
        begun = role.handle(BeginUpdate(update(2)))
        assert role.handle(BeginUpdate(update(2))) == begun
        role.handle(BeginUpdate(update(3)))  # the second is aborted: nobody finished it
        told.get(timeout=60)

    _with_role(story, RoleAssignment(0, ParallelLayout.of((0,)), 0, "cpu"), settings_of(folder))


@pytest.mark.parametrize("carrier", ["shared_memory", "point_to_point"])
def test_a_receiver_gets_the_version_from_all_ranks_while_they_train(carrier: WeightCarrier, folder: str) -> None:
    """With the sender of the carriers, and real bytes."""
    order = msgspec.structs.replace(update(1), receivers=(Receiver("http-1", carrier),))
    tensors: dict[str, Tensor] = {}
    parts: list[int] = []

    def load(offer: Offer, bucket: Bucket, content: Tensor) -> None:
        assemble(tensors, offer, {bucket.index: content}, bucket)
        parts.extend(box_digest(box.name, box_of(tensors, box), box.start) for box in bucket.boxes)

    with Fleet(settings_of(folder), slots=range(2)) as fleet:
        fleet.assign((0, 1))
        offers = tuple(reply.offer for reply in fleet.ask(dict.fromkeys((0, 1), BeginUpdate(order))).values())
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(receive, PrepareUpdate(order, carrier, offers), load, threading.Event())
            fleet.forward_backward(SAMPLES)
            fleet.optim_step(20.0)  # waits for the receiver
            received.result(timeout=60)
        fleet.ask(dict.fromkeys((0, 1), FinishUpdate("u1", False)))
        fleet.release((0, 1))
    whole = {name: parameter.detach() for name, parameter in load_model(folder).named_parameters()}
    assert_equal(tensors, whole)
    assert total(parts) == whole_digest(whole.items())
