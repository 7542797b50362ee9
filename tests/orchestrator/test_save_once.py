import asyncio

import pytest

from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.ending.save_once import SaveOncePerStep
from ductile.orchestrator.ending.saving import ExportFailed


def test_a_step_is_saved_once_also_when_that_has_failed(tmp_path):
    tried = []

    async def save(step):
        tried.append(step)
        if step == 4:
            raise OSError("full")

    async def story():
        once = SaveOncePerStep(save, 2, Recorder(tmp_path))
        await once(2)
        await once(3)
        await once(3)
        with pytest.raises(OSError, match="full"):
            await once(4)
        await once(4)
        await once(5)

    asyncio.run(story())
    assert tried == [3, 4, 5]
    assert [row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")] == ["not_saved"]


def test_weights_do_not_change_while_they_are_saved_and_who_asks_does_not_wait_for_the_step(tmp_path):
    order = []

    async def save(step):
        order.append(f"saving {step}")
        await asyncio.sleep(0.05)
        order.append(f"saved {step}")

    async def story():
        once, stop = SaveOncePerStep(save, 0, Recorder(tmp_path)), asyncio.Event()
        once.step_ends(1)
        early = asyncio.create_task(once.when(stop))
        stop.set()
        await asyncio.sleep(0.01)
        await once.update_begins()
        order.append("update")
        await early
        later = asyncio.create_task(once.when(stop))
        await later  # these weights belong to no step

    asyncio.run(asyncio.wait_for(story(), 60))
    assert order == ["saving 1", "saved 1", "update"]


@pytest.mark.parametrize(
    ("saved", "error", "kind", "sentence"),
    [
        (0, OSError("full"), "not_saved", "Nothing of this run is saved: full."),
        (2, OSError("full"), "not_saved", "What was trained since the last checkpoint cannot be saved: full."),
        (2, ExportFailed("The model is missing"), "not_exported", "The model is missing."),
    ],
)
def test_what_is_not_saved_is_said(tmp_path, saved, error, kind, sentence):
    async def save(step):
        raise error

    record = Recorder(tmp_path)
    with pytest.raises(type(error)):
        asyncio.run(SaveOncePerStep(save, saved, record)(3))
    record.close()
    [event] = read_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event["sentence"]) == (kind, sentence)
