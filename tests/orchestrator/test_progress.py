import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ductile.config.schema.trainer import CheckpointConfig
from ductile.disk import DiskError
from ductile.events.checkpoints import ModelExported
from ductile.observe import Recorder, read_jsonl
from ductile.orchestrator.ending.progress import CheckpointError, Checkpoints, Progress
from ductile.orchestrator.ending.saving import ExportFailed, Saver, is_time, lacks_model, where_to_begin
from ductile.roles import Refused
from ductile.tasks.prompts import PromptPosition
from tests.orchestrator.doubles import read, write


def save(checkpoints, step, text="weights"):
    partial = checkpoints.begin(step)
    (partial / "trainer").mkdir()
    (partial / "trainer" / "shard").write_text(text)
    return checkpoints.commit(partial, Progress(step, PromptPosition(10 * step, (3, 7))))


def test_what_was_saved_comes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path / "state")
    save(checkpoints, 4)
    assert checkpoints.find(-1) == 4
    assert checkpoints.load(4) == Progress(4, PromptPosition(40, (3, 7)))
    assert (checkpoints.path(4) / "trainer" / "shard").read_text() == "weights"


def test_only_the_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (2, 4, 10):
        save(checkpoints, step)
    assert checkpoints.steps() == [4, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_4"]
    everything = Checkpoints(tmp_path / "all", keep_last=None)
    for step in range(1, 6):
        save(everything, step)
    assert everything.steps() == [1, 2, 3, 4, 5]


def test_what_is_not_complete_is_not_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=None)
    for step in (1, 2, 3, 4):
        save(checkpoints, step)
    (checkpoints.path(2) / "complete.json").unlink()
    (checkpoints.path(3) / "trainer" / "shard").write_text("cut")
    (checkpoints.path(4) / "trainer" / "shard").unlink()
    (tmp_path / "step_9_copy").mkdir()
    assert checkpoints.steps() == [1]
    assert checkpoints.find(-1) == 1
    assert checkpoints.damaged() == {
        2: "complete.json is missing",
        3: "trainer/shard has 3 bytes of 7",
        4: "trainer/shard is missing",
    }


def test_what_is_damaged_is_set_aside_and_never_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        save(Checkpoints(tmp_path, keep_last=None), step)
    for step in (2, 3):
        (checkpoints.path(step) / "trainer" / "shard").unlink()
    (tmp_path / "damaged_step_3").mkdir()
    checkpoints.begin(5)
    said = checkpoints.tidy(last_step=1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "damaged_step_2", "damaged_step_3", "damaged_step_3.2", "step_1",
    ]  # fmt: skip
    assert said[0] == (
        f"The checkpoint of step 2 is not whole (trainer/shard is missing): it is {tmp_path / 'damaged_step_2'} now."
    )
    save(checkpoints, 6)
    assert (tmp_path / "damaged_step_2" / "progress.json").exists()
    assert checkpoints.steps() == [6]


def test_later_checkpoints_go_when_the_first_new_one_is_there(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=None)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.tidy(last_step=2)
    assert checkpoints.steps() == [1, 2]
    assert (tmp_path / "superseded_step_3" / "complete.json").exists()
    save(checkpoints, 3, "anew")
    assert checkpoints.steps() == [1, 2, 3]
    assert not (tmp_path / "superseded_step_3").exists()


def test_when_no_checkpoint_is_whole_the_run_does_not_start_anew(tmp_path):
    """A backup without dot files leaves such checkpoints."""
    checkpoints = Checkpoints(tmp_path / "state", keep_last=None)
    for step in (2, 4):
        save(checkpoints, step)
        (checkpoints.path(step) / "trainer" / "shard").unlink()
    for asked in (-1, 4):
        with pytest.raises(CheckpointError, match="step_2 is not whole: trainer/shard is missing; step_4 is not whole"):
            where_to_begin(checkpoints, asked, tmp_path / "model")
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step_2", "step_4"]


def test_a_model_whose_checkpoints_are_gone_is_not_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path / "state")
    assert where_to_begin(checkpoints, -1, tmp_path / "model") == Progress()
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from, but"):
        where_to_begin(checkpoints, -1, tmp_path / "model")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_disk_that_does_not_respond_is_no_missing_file(tmp_path, monkeypatch, number):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 2)

    def fail(path, **kwargs):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        checkpoints.find(-1)


@pytest.mark.parametrize(
    ("step", "message"),
    [(7, "has no complete checkpoint of step 7; there are 1, 2"), (0, "has no complete checkpoint of step 0")],
)
def test_a_step_that_is_not_there(tmp_path, step, message):
    checkpoints = Checkpoints(tmp_path, keep_last=None)
    save(checkpoints, 1)
    save(checkpoints, 2)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.find(step)


def test_the_latest_of_none_is_none(tmp_path):
    assert Checkpoints(tmp_path / "state").find(-1) is None
    with pytest.raises(CheckpointError, match="of step 3; there is none"):
        Checkpoints(tmp_path / "state").find(3)


def test_a_broken_progress_file_says_which(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    (checkpoints.path(1) / "progress.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step_1/progress.json cannot be read"):
        checkpoints.load(1)


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    """A process saves as fast as it can and is killed; whatever is found afterwards is whole."""
    code = textwrap.dedent(f"""
        import itertools, pathlib, sys
        from tests.orchestrator.test_progress import save
        from ductile.orchestrator.ending.progress import Checkpoints
        checkpoints = Checkpoints(pathlib.Path({str(tmp_path)!r}), keep_last=1)
        for step in itertools.count(1):
            save(checkpoints, step, text=f"{{step}}" * 10000)
            print(step, flush=True)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 5:
                process.send_signal(signal.SIGKILL)
                break
        process.wait(10)
    checkpoints = Checkpoints(tmp_path)
    step = checkpoints.find(-1)
    assert step is not None
    assert step >= 4
    assert checkpoints.load(step).step == step
    assert (checkpoints.path(step) / "trainer" / "shard").read_text() == f"{step}" * 10000


class Keeper:
    """A trainer that writes its step."""

    num_ranks = micro_batches_per_rank = 1

    def __init__(self):
        self.weights, self.calls = "new", []

    async def save(self, path):
        write(path, self.weights)

    async def load(self, path):
        self.weights = read(path)

    async def export(self, path, dtype):
        self.calls.append(path)


def test_saver_and_resume(tmp_path):
    record = Recorder(tmp_path)
    trainer = Keeper()
    saver = Saver(trainer, Checkpoints(tmp_path / "state"), record, tmp_path / "model")
    for step in (1, 2, 3, 4):
        trainer.weights = f"step {step}"
        record.metrics(step, {"loss": step})
        if step % 2 == 0:
            asyncio.run(saver.save(Progress(step, PromptPosition(step))))
    assert trainer.calls == [str(tmp_path / "model")] * 2
    record.metrics(5, {"loss": 5})
    asyncio.run(saver.resume(Progress(2, PromptPosition(2)), asked=True))
    record.close()
    assert trainer.weights == "step 2"
    assert Checkpoints(tmp_path / "state").steps() == [2]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    sentences = [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl")]
    assert sentences[-2:] == [
        "Resumed after step 2; the metrics of 3 later steps are written anew.",
        f"The model of step 2 is in {tmp_path / 'model'}.",
    ]


def test_a_beginning_without_a_checkpoint_says_what_it_drops(tmp_path):
    record = Recorder(tmp_path)
    saver = Saver(Keeper(), Checkpoints(tmp_path / "state"), record, None)
    asyncio.run(saver.resume(Progress(), asked=True))
    record.metrics(1, {"loss": 1})
    asyncio.run(saver.resume(Progress(), asked=True))
    record.close()
    says = f"There is no checkpoint in {tmp_path / 'state'} yet: started from the beginning"
    sentences = [row["sentence"] for row in read_jsonl(tmp_path / "events.jsonl")]
    assert sentences == [f"{says}.", f"{says}, and the metrics of its steps are written anew."]
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_what_cannot_be_loaded_costs_nothing(tmp_path):
    class Other(Keeper):
        async def load(self, path):
            raise Refused("step_2 does not fit this model")

    record, checkpoints = Recorder(tmp_path), Checkpoints(tmp_path / "state", keep_last=None)
    for step in (2, 4):
        record.metrics(step, {"loss": step})
        save(checkpoints, step)
    with pytest.raises(Refused):
        asyncio.run(Saver(Other(), checkpoints, record, None).resume(Progress(2), asked=True))
    record.close()
    assert checkpoints.steps() == [2, 4]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2


def test_a_failing_save_leaves_the_one_before_and_no_rubbish(tmp_path):
    class Full(Keeper):
        async def save(self, path):
            await super().save(path)
            if self.weights == "broken":
                raise OSError(28, "No space left on device")

    record, trainer = Recorder(tmp_path), Full()
    saver = Saver(trainer, Checkpoints(tmp_path / "state"), record, None)
    asyncio.run(saver.save(Progress(1)))
    trainer.weights = "broken"
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(saver.save(Progress(2)))
    record.close()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step_1"]
    assert json.loads((tmp_path / "state/step_1/complete.json").read_text())["step"] == 1


def test_room_is_asked_for_before_anything_is_written(tmp_path, monkeypatch):
    record, trainer = Recorder(tmp_path), Keeper()
    checkpoints = Checkpoints(tmp_path / "state")
    saver = Saver(trainer, checkpoints, record, tmp_path / "model")
    asyncio.run(saver.save(Progress(1)))
    monkeypatch.setattr("ductile.disk.free_bytes", lambda path: 100)
    with pytest.raises(DiskError, match=r"No space left on device: the checkpoint of step 2 needs \d+ B, .* has 100 B"):
        asyncio.run(saver.save(Progress(2)))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_1"]
    trainer.calls.clear()
    asyncio.run(saver.save(Progress(1)))  # saved already: it is exported only
    assert trainer.calls == [str(tmp_path / "model")]
    record.close()


def test_a_model_that_could_not_be_written_is_written_by_a_resume(tmp_path):
    class NoRoom(Keeper):
        room = False

        async def export(self, path, dtype):
            if not self.room:
                raise Refused("slot 0: ExportModel failed: No space left on device")
            await super().export(path, dtype)
            write(path, self.weights)

    record, trainer, checkpoints = Recorder(tmp_path), NoRoom(), Checkpoints(tmp_path / "state")
    saver = Saver(trainer, checkpoints, record, tmp_path / "model")
    said = r"The model of step 2 cannot be written: .*: No space left on device\. The checkpoint of step 2 has all"
    with pytest.raises(ExportFailed, match=said):
        asyncio.run(saver.save(Progress(2)))
    assert checkpoints.steps() == [2]
    trainer.room = True
    for _ in range(2):  # the second time it is there
        asyncio.run(saver.resume(Progress(2), asked=True))
    record.close()
    assert trainer.calls == [str(tmp_path / "model")]


def test_a_model_is_missing_when_it_is_of_another_step(tmp_path):
    model, record = tmp_path / "model", Recorder(tmp_path)
    assert lacks_model(model, 4)
    model.mkdir()
    assert not lacks_model(model, 4), "nobody knows of which step it is"
    for step in (2, 4):
        record.event(ModelExported(step))
        assert lacks_model(model, 4) == (step != 4)
    record.close()


@pytest.mark.parametrize(
    ("since_s", "took_s", "due"),
    [(599, 0, False), (600, 0, True), (600, 30, True), (600, 31, False), (619, 31, False), (621, 31, True)],
)
def test_by_itself_a_run_saves_every_ten_minutes_or_for_a_twentieth_of_its_time(since_s, took_s, due):
    assert is_time(since_s, took_s) is due


def test_when_a_save_is_due(tmp_path):
    now = [0.0]

    class Slow(Keeper):
        async def save(self, path):
            now[0] += 60.0
            await super().save(path)

    def saver(interval):
        config = CheckpointConfig(interval=interval)
        return Saver(Slow(), Checkpoints(tmp_path / "state"), record, None, config, clock=lambda: now[0])

    record = Recorder(tmp_path)
    auto, steps, never = saver("auto"), saver(4), saver(None)
    now[0] = 599.0
    assert [[s.is_due(step) for step in (3, 4)] for s in (auto, steps, never)] == [
        [False] * 2,
        [False, True],
        [False] * 2,
    ]
    now[0] = 600.0
    assert auto.is_due(3)
    asyncio.run(auto.save(Progress(3)))
    now[0] += 1199.0
    assert not auto.is_due(4)
    now[0] += 1.0
    assert auto.is_due(4)
    record.close()


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files, the folders that name them, and then the name itself: else a power cut may leave an empty folder."""
    synced = []
    for user in ("ductile.disk", "ductile.orchestrator.ending.progress"):
        monkeypatch.setattr(f"{user}.sync", lambda path: synced.append(str(path.relative_to(tmp_path))))
    save(Checkpoints(tmp_path / "state"), 2)
    partial = "state/partial_step_2"
    assert synced[-1] == "state"
    assert {f"{partial}/trainer/shard", f"{partial}/trainer", f"{partial}/complete.json", partial} <= {*synced[:-1]}
