import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from ductile.loop.progress import CheckpointError, Checkpoints, Progress
from ductile.loop.saving import Saver
from ductile.observe import Recorder, read_jsonl
from ductile.tasks.prompts import PromptPosition
from tests.loop.doubles import read, write


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
    checkpoints.begin(5)
    checkpoints.sweep(last_step=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_9_copy"]


def test_sweep_forgets_the_future(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=None)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.sweep(last_step=2)
    assert checkpoints.steps() == [1, 2]


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
        from tests.loop.test_progress import save
        from ductile.loop.progress import Checkpoints
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

    num_ranks = 1

    def __init__(self):
        self.weights, self.calls = "new", []

    async def save(self, path):
        write(path, self.weights)

    async def load(self, path):
        self.weights = read(path)

    async def export(self, path):
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
    assert sentences[-1] == "Resumed after step 2; the metrics of 3 later steps are written anew."


def test_a_failing_save_leaves_the_one_before(tmp_path):
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
    assert Checkpoints(tmp_path / "state").find(-1) == 1
    assert json.loads((tmp_path / "state/step_1/complete.json").read_text())["step"] == 1
