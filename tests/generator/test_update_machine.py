"""Whatever comes, in whatever order and how often: what is committed was whole, verified and not of the past."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ductile.generator.server.update_machine import Fenced, Unusable, UpdateMachine
from ductile.messages.updates import Bucket, EndUpdate, Offer, PrepareUpdate, WeightUpdate

BUCKETS = tuple(Bucket(index, 8, ()) for index in range(3))


def prepare_of(update_id: str, epoch: int, version: int = 1) -> PrepareUpdate:
    update = WeightUpdate(update_id, epoch, version, ())
    return PrepareUpdate(update, "http", (Offer("slot-0", (), BUCKETS),))


def step(machine: UpdateMachine, what: str, update_id: str, epoch: int) -> None:
    """One message, as `WeightReceiver` takes it. Raises `Fenced`."""
    end = EndUpdate(update_id, epoch, digest="d")
    match what.split():
        case ["prepare"]:
            machine.prepare(prepare_of(update_id, epoch))
        case ["bucket", index]:
            if machine.expects(update_id, epoch, "slot-0", int(index)):
                assert machine.last is not None
                machine.loaded(machine.last, "slot-0", int(index))
        case ["verify", found]:
            update = machine.check_end(end)
            if update.phase == "staged":
                machine.verified(update, found, "d")
        case ["commit"]:
            if machine.may_commit(end):
                machine.end("committed")
        case ["abort"]:
            machine.abort(end)
        case ["see"]:
            machine.see(epoch)


def story(*steps: str) -> UpdateMachine:
    """Steps of update "u" at epoch 2: each but a refused one ("! commit") is taken."""
    machine = UpdateMachine()
    for said in steps:
        refused, what = said.startswith("! "), said.removeprefix("! ")
        words, epoch = (what[:-2], int(what[-1])) if what[-2:-1] == "@" else (what, 2)
        if refused:
            with pytest.raises((Fenced, Unusable)):
                step(machine, words.strip(), "u", epoch)
        else:
            step(machine, words.strip(), "u", epoch)
    return machine


ALL = ("prepare", "bucket 0", "bucket 2", "bucket 1")


@pytest.mark.parametrize(
    ("steps", "phase", "num_loaded"),
    [
        (("prepare",), "prepared", 0),
        (("! bucket 0", "! verify d", "! commit", "prepare", "! commit"), "prepared", 0),
        (("prepare", "bucket 1", "bucket 1", "! bucket 3", "! commit"), "receiving", 1),
        ((*ALL, "! commit"), "staged", 3),
        ((*ALL, "verify d", "verify d", "prepare"), "verified", 3),
        ((*ALL, "verify d", "commit", "commit", "abort", "verify d", "bucket 0", "prepare"), "committed", 3),
        ((*ALL, "verify wrong", "commit", "verify d"), "failed", 3),
        (("prepare", "bucket 0", "abort", "abort", "! bucket 1", "prepare", "commit"), "aborted", 1),
        (("prepare", "see @3", "! bucket 0", "! verify d", "abort"), "aborted", 0),
        ((*ALL, "verify d", "see @3", "! commit", "! commit @3", "! prepare @3", "abort"), "aborted", 3),
        (("see @3", "! prepare", "prepare @3", "! see @2"), "prepared", 0),
    ],
)
def test_an_update_goes_its_way(steps: tuple[str, ...], phase: str, num_loaded: int) -> None:
    progress = story(*steps).progress("u")
    assert progress is not None
    assert (progress.phase, progress.num_buckets, bool(progress.reason)) == (
        phase,
        num_loaded,
        phase in ("aborted", "failed"),
    )


def test_what_was_aborted_before_it_began_does_not_begin() -> None:
    machine = UpdateMachine()
    step(machine, "abort", "u", 1)
    assert machine.prepare(prepare_of("u", 1)) is None
    assert machine.last is None
    with pytest.raises(Fenced, match="update u was aborted"):
        step(machine, "bucket 0", "u", 1)


def test_a_newer_epoch_takes_the_place_of_an_update_and_an_equal_one_waits() -> None:
    machine = UpdateMachine()
    machine.prepare(prepare_of("u", 1))
    with pytest.raises(Fenced, match="update u of epoch 1 is under way"):
        machine.prepare(prepare_of("v", 1))
    assert machine.prepare(prepare_of("v", 2)) is machine.last
    progress = machine.progress("u")
    assert progress is not None
    assert (progress.phase, progress.reason) == ("aborted", "update v of epoch 2 came in its place")


MESSAGES = ["prepare", *(f"bucket {index}" for index in range(4)), "verify d", "verify wrong", "commit", "abort", "see"]


@given(st.lists(st.tuples(st.sampled_from(MESSAGES), st.sampled_from("uvw"), st.integers(1, 3))))
def test_no_order_of_messages_commits_what_is_not_whole_and_verified(messages: list[tuple[str, str, int]]) -> None:
    machine, epoch, over = UpdateMachine(), 0, dict[str, str]()
    for what, update_id, at in messages:
        try:
            step(machine, what, update_id, at)
        except (Fenced, Unusable):
            pass
        else:
            before = {id: machine.progress(id) for id in "uvw"}
            if what not in ("see", "abort"):  # said again it changes nothing
                step(machine, what, update_id, at)
                assert {id: machine.progress(id) for id in "uvw"} == before
        assert machine.epoch >= epoch
        epoch = machine.epoch
        for id in "uvw":
            if progress := machine.progress(id):
                assert id not in over or over[id] == progress.phase
                if progress.phase in ("committed", "aborted", "failed"):
                    over[id] = progress.phase
                if progress.phase == "committed":
                    assert (progress.num_buckets, progress.digest) == (3, "d")
