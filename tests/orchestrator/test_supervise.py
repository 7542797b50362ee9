"""How commands end: exit codes and last sentences."""

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from ductile.cluster.cluster import StartFailed
from ductile.config.checks.written import output_findings
from ductile.config.schema.run import RLConfig, TrainerRunConfig
from ductile.config.schema.trainer import CheckpointConfig
from ductile.events.checkpoints import RunResumed
from ductile.events.steps import BatchesReady
from ductile.observe import Listener, read_jsonl
from ductile.orchestrator.ending.meaning import Beginning
from ductile.orchestrator.ending.old_run import set_aside
from ductile.orchestrator.ending.progress import Checkpoints, Progress
from ductile.orchestrator.ending.run_until import SlotDied, Stopped
from ductile.orchestrator.ending.saving import where_to_begin
from ductile.orchestrator.ending.supervise import Session, supervise
from ductile.orchestrator.loop.evaluate import RewardsFailed
from ductile.roles import CustomCodeFailed, Late, Refused, SlotLost
from ductile.tasks.task import TaskError


def end(tmp_path: Path, run, config=RLConfig, prepare=lambda config: None) -> int:
    return supervise("rl", config(output_dir=str(tmp_path)), prepare, lambda prepared: 3, run)


def at_step_3(prepared: None) -> Beginning:
    return Beginning(Progress(3))


def save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "state")
    checkpoints.commit(checkpoints.begin(3), Progress(3))


def test_a_resume_without_a_whole_checkpoint_changes_nothing_and_says_what_is_missing(tmp_path, capsys):
    """As a backup without dot files leaves them."""
    for step in (2, 4):
        checkpoints = Checkpoints(tmp_path / "state")
        partial = checkpoints.begin(step)
        (partial / "trainer").mkdir()
        (partial / "trainer/.metadata").write_text("")
        checkpoints.commit(partial, Progress(step))
        (tmp_path / f"state/step_{step}/trainer/.metadata").unlink()
    (tmp_path / "model").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    before = sorted(tmp_path.rglob("*"))

    def prepare(config):
        return where_to_begin(Checkpoints(tmp_path / "state"), -1, tmp_path / "model")

    assert end(tmp_path, raising(AssertionError("it was started")), prepare=prepare) == 2
    assert "step_4 is not whole: trainer/.metadata is missing" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def raising(error: Exception):
    async def run(config, prepared, session: Session):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (CustomCodeFailed("orchestrator.advantage failed"), 1, "orchestrator.advantage failed."),
        (SlotDied("slot 1 (train, pid 7) was killed by SIGKILL while idle"), 1, "Slot 1 (train, pid 7) was killed"),
        (SlotLost("slot 1 is gone"), 1, "Slot 1 is gone."),
        (Late("slot 1 did not reply to Score within 5 s"), 1, "Slot 1 did not reply"),
        (Refused("slot 1: OptimStep failed: ValueError: nan"), 1, "OptimStep failed: ValueError: nan."),
        (Stopped(), 130, "Stopped at once, as asked."),
        (StartFailed("slot 9 has no device"), 2, "Slot 9 has no device."),
        (OSError(28, "No space left on device"), 2, "cannot be written: No space left on device ("),
        (TaskError("nofn/reward.py: does it lack its `return`?"), 2, "nofn/reward.py: does it lack its `return`?\n"),
        (SlotLost("http://127.0.0.1:1/v1 cannot be reached"), 1, "http://127.0.0.1:1/v1 cannot be reached."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_end_has_its_code_and_its_sentence(tmp_path: Path, capsys, error: Exception, code: int, sentence: str):
    save(tmp_path)
    assert end(tmp_path, raising(error)) == code
    said = capsys.readouterr().err
    assert said.startswith("ductile rl: ")
    assert sentence in said
    goes_on = f"Logs: {tmp_path / 'logs'}. Go on with: ductile rl @ {tmp_path / 'config.toml'} --resume"
    assert (goes_on in said) == (code != 2)


@pytest.mark.parametrize("error", [None, Stopped(), RewardsFailed("all"), TaskError("no file"), ZeroDivisionError()])
def test_listeners_are_told_with_which_code_the_command_ends(tmp_path: Path, error: Exception | None):
    told = list[int]()

    class Told(Listener):
        def close(self, code: int) -> None:
            told.append(code)

    async def run(config, prepared, session: Session):
        session.record.listeners.append(Told())
        if error:
            raise error
        return ""

    with suppress(ZeroDivisionError):
        end(tmp_path, run)
    assert told == [0 if error is None else 130 if isinstance(error, Stopped) else 1]


def test_what_fails_in_the_middle_of_a_run_is_no_failure_to_start(tmp_path: Path, capsys):
    async def run(config, prepared, session: Session):
        session.record.metrics(1, {})
        raise OSError(28, "No space left on device")

    assert end(tmp_path, run) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} cannot be written: No space left on device (" in said
    assert " free). Logs:" in said


def test_a_command_that_cannot_be_resumed_does_not_offer_it(tmp_path: Path, capsys):
    assert end(tmp_path, raising(Refused("no")), config=TrainerRunConfig) == 1
    said = capsys.readouterr().err
    assert "Logs:" in said
    assert "--resume" not in said


def test_nothing_is_offered_where_there_is_nothing_to_go_on_from(tmp_path: Path, capsys):
    assert end(tmp_path, raising(SlotLost("slot 1 is gone"))) == 1
    assert capsys.readouterr().err == f"ductile rl: Slot 1 is gone. Logs: {tmp_path / 'logs'}.\n"


def test_a_run_whose_folder_was_removed_has_failed_and_says_so(tmp_path: Path, capsys):
    async def run(config, prepared, session: Session):
        session.record.metrics(1, {})
        shutil.rmtree(session.folder)
        session.record.metrics(2, {})
        save(session.folder)
        session.record.summary({"steps": 2})
        return "Done: 2 steps."

    folder = tmp_path / "run"
    assert end(folder, run) == 1
    out = capsys.readouterr()
    assert out.out.splitlines()[-1] == "Done: 2 steps."
    said = "was removed or moved while the run was at work: only what was saved after that is there."
    assert out.err == f"ductile rl: The folder {folder} {said}\n"
    assert [path.name for path in folder.iterdir()] == ["state"]


@pytest.mark.parametrize(
    ("saved", "trained", "said"),
    [
        (False, 7, "Nothing was saved yet: steps 1-7 are lost."),
        (False, 1, "Nothing was saved yet: step 1 is lost."),
        (True, 7, "Steps 4-7 are lost. Go on with: ductile rl @"),
        (True, 4, "Step 4 is lost. Go on with: ductile rl @"),
        (True, 3, "logs. Go on with: ductile rl @"),
    ],
)
def test_steps_that_are_lost_are_said(tmp_path: Path, capsys, saved: bool, trained: int, said: str):
    async def run(config, prepared, session: Session):
        session.record.metrics(trained, {})
        raise SlotDied("slot 1 (train, pid 7) was killed by SIGKILL while idle")

    if saved:
        save(tmp_path)
    assert end(tmp_path, run) == 1
    assert said in capsys.readouterr().err


def test_a_programming_error_is_not_dressed_up(tmp_path: Path):
    async def run(config, prepared, session: Session):
        session.record.metrics(1, {})
        raise ZeroDivisionError("float division by zero")

    save(tmp_path)
    with pytest.raises(ZeroDivisionError) as raised:
        end(tmp_path, run)
    [note] = raised.value.__notes__
    assert note.endswith(f"Go on with: ductile rl @ {tmp_path / 'config.toml'} --resume")
    [event] = read_jsonl(tmp_path / "events.jsonl")
    assert event["kind"] == "failed"
    assert event["sentence"].startswith("ZeroDivisionError: float division by zero (test_supervise.py:")
    assert "Traceback" in event["traceback"]


def test_logs_are_named_only_where_there_are_any(tmp_path: Path):
    def prepare(config):
        raise ZeroDivisionError("float division by zero")

    with pytest.raises(ZeroDivisionError) as raised:
        end(tmp_path / "run", raising(Stopped()), prepare=prepare)
    assert raised.value.__notes__ == ["ductile rl failed."]


def test_nothing_is_deleted_when_the_preparation_fails(tmp_path: Path, capsys):
    def prepare(config):
        raise TaskError("data.jsonl:3: no prompt")

    (tmp_path / "metrics.jsonl").write_text("{}\n")
    config = RLConfig(output_dir=str(tmp_path), clean=True)
    assert supervise("rl", config, prepare, lambda prepared: 1, raising(Stopped())) == 2
    assert "data.jsonl:3: no prompt" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").exists()


def finished(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 4}\n')
    (folder / "model").mkdir()
    (folder / "model/weights").write_text("precious")
    save(folder)


@pytest.mark.parametrize(
    ("error", "code"),
    [(TaskError("'my.py': my has no 'py'"), 2), (SlotLost("slot 0 is gone"), 1), (Stopped(), 130), (KeyError(3), None)],
)
def test_clean_deletes_nothing_when_the_run_never_begins(tmp_path: Path, capsys, error: Exception, code: int | None):
    finished(tmp_path)
    config = RLConfig(output_dir=str(tmp_path), clean=True)
    if code is None:
        with pytest.raises(KeyError):
            supervise("rl", config, lambda config: None, lambda prepared: 3, raising(error))
    else:
        assert supervise("rl", config, lambda config: None, lambda prepared: 3, raising(error)) == code
        said = capsys.readouterr().err
        assert f"The run that was in {tmp_path} has not been deleted. Logs of this start: {tmp_path / 'logs'}" in said
        assert "--resume" not in said
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 4}\n'
    assert (tmp_path / "model/weights").read_text() == "precious"
    assert Checkpoints(tmp_path / "state").steps() == [3]


def test_clean_deletes_when_the_first_step_is_told_of(tmp_path: Path, capsys):
    async def run(config, prepared, session: Session):
        session.record.metrics(0, {})
        raise SlotLost("slot 0 is gone")

    finished(tmp_path)
    config = RLConfig(output_dir=str(tmp_path), clean=True)
    assert supervise("rl", config, lambda config: None, lambda prepared: 3, run) == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        "logs",
        "config.toml",
        "events.jsonl",
        "metrics.jsonl",
    }
    assert f"The run that is in {tmp_path} is deleted as soon as" in capsys.readouterr().out


@pytest.mark.parametrize(("max_steps", "has_ended"), [(2, True), (3, True), (2, False)])
def test_a_run_that_has_done_all_is_resumed_and_stays_as_it_is(tmp_path: Path, capsys, max_steps: int, has_ended: bool):
    """Also one that was killed, in a later step."""
    finished(tmp_path)
    if has_ended:
        (tmp_path / "summary.json").write_text('{"num_switches": 3}')
    (tmp_path / "config.toml").write_text("as it was run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config, started = RLConfig(output_dir=str(tmp_path), resume=True), raising(AssertionError("it was started"))
    assert supervise("rl", config, lambda config: None, lambda prepared: max_steps, started, at_step_3) == 0
    said = capsys.readouterr().out
    assert f"has done 3 steps, and max_steps is {max_steps}: there is nothing to do, and nothing was changed" in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("exported", [None, 2, 3])
def test_a_finished_run_whose_model_is_missing_is_resumed(tmp_path: Path, exported: int | None):
    """Or is that of an earlier step: the last export failed."""
    finished(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    if exported is None:
        shutil.rmtree(tmp_path / "model")
    else:
        (tmp_path / "events.jsonl").write_text(f'{{"kind": "exported", "step": {exported}}}\n')
    config, started = RLConfig(output_dir=str(tmp_path), resume=True), []

    async def run(config, prepared, session: Session):
        started.append(session)
        return ""

    assert supervise("rl", config, lambda config: None, lambda prepared: 3, run, at_step_3) == 0
    assert bool(started) == (exported != 3)


@pytest.mark.parametrize("has_summary", [True, False])
def test_what_is_left_of_a_resumed_run_is_done(tmp_path: Path, has_summary: bool):
    """More steps, or the end of a run that was killed after its last save."""
    finished(tmp_path)
    if has_summary:
        (tmp_path / "summary.json").write_text("{}")
    run, config = raising(SlotLost("it was started")), RLConfig(output_dir=str(tmp_path), resume=True)
    max_steps = 4 if has_summary else 3
    assert supervise("rl", config, lambda config: None, lambda prepared: max_steps, run, at_step_3) == 1


@pytest.mark.parametrize("missing", ["evaluation", "summary", "nothing"])
def test_what_a_finished_run_owes_is_done(tmp_path: Path, missing: str):
    """The evaluation that was due after the last step, or the summary of it: there may be one of an earlier end."""
    finished(tmp_path)
    (tmp_path / "summary.json").write_text(f'{{"steps": {2 if missing == "summary" else 3}}}')
    config, started = RLConfig(output_dir=str(tmp_path), resume=True), []

    async def run(config, prepared, session: Session):
        started.append(session)
        return ""

    def began(prepared: None) -> Beginning:
        return Beginning(Progress(3), owes_evaluation=missing == "evaluation")

    assert supervise("rl", config, lambda config: None, lambda prepared: 3, run, began) == 0
    assert bool(started) == (missing != "nothing")


@pytest.mark.parametrize("fits", [True, False])
def test_a_resume_replaces_the_config_once_the_checkpoint_is_loaded_with_it(tmp_path: Path, capsys, fits: bool):
    finished(tmp_path)
    (tmp_path / "config.toml").write_text("as it was run")
    config = RLConfig(output_dir=str(tmp_path), max_steps=5, ckpt=CheckpointConfig(resume_step=-1))

    async def run(config, prepared, session: Session):
        assert (tmp_path / "config.toml").read_text() == "as it was run"
        if fits:
            session.record.event(RunResumed(3))
            assert "max_steps = 5" in (tmp_path / "config.toml").read_text()
        raise Refused("slot 0: LoadState failed: the checkpoint does not fit this model")

    assert supervise("rl", config, lambda config: None, lambda prepared: 5, run, at_step_3) == 1
    assert ((tmp_path / "config.toml").read_text() == "as it was run") == (not fits)


def test_what_a_killed_start_has_set_aside_is_there_for_a_resume(tmp_path: Path):
    finished(tmp_path)
    set_aside(tmp_path)
    config = RLConfig(output_dir=str(tmp_path), resume=True)

    def prepare(config):
        return Checkpoints(tmp_path / "state").steps()

    async def run(config, prepared, session: Session):
        assert prepared == [3]
        return "resumed"

    assert supervise("rl", config, prepare, lambda prepared: 3, run) == 0


def test_a_start_that_never_began_is_started_again_without_clean(tmp_path: Path):
    """Its empty files are no run."""
    assert end(tmp_path, raising(RewardsFailed("in the evaluation after step 0, 4 of 4 rewards failed"))) == 1
    assert (tmp_path / "metrics.jsonl").exists()
    assert list(output_findings(RLConfig(output_dir=str(tmp_path)))) == []


def test_done_prints_the_closing_and_keeps_the_config(tmp_path: Path, capsys):
    async def run(config, prepared, session: Session):
        session.record.event(BatchesReady(samples=2, sentence="Two samples."))
        session.record.metrics(1, {"loss": 0.5})
        return "[model] is in there"

    assert end(tmp_path, run) == 0
    out = capsys.readouterr()
    assert out.out.splitlines() == ["Two samples.", "step 1/3  loss 0.5000", "[model] is in there"]
    assert out.err == ""
    assert (tmp_path / "config.toml").exists()
    assert [row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")] == ["data"]


def test_a_run_that_is_stopped_in_its_first_step_has_done_none(tmp_path: Path, capsys):
    async def run(config, prepared, session: Session):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(session.interrupt.graceful.wait(), 60)
        return ""

    assert end(tmp_path, run) == 130
    assert "Stopped before a step was done, as asked." in capsys.readouterr().err


def test_the_first_ctrl_c_lets_the_step_end(tmp_path: Path, capsys):
    async def run(config, prepared, session: Session):
        session.record.metrics(1, {})
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(session.interrupt.graceful.wait(), 60)
        return "saved"

    assert end(tmp_path, run) == 130
    out = capsys.readouterr()
    assert "Stopping after this step; press again to stop at once." in out.out.splitlines()
    assert "Stopped after a whole step, as asked." in out.err
    assert "saved" in out.out
