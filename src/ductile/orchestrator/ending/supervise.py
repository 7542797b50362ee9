"""What all commands share: a folder of one's own, records, the view, Ctrl-C, and an end that is told in a sentence.

0     done
1     something died or failed; the last line on stderr says what, and how to go on
2     nothing was started: what the config names is missing, broken or in use
130   stopped by Ctrl-C, in order (the step is saved) or at once
"""

import asyncio
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import structs
from rich.console import Console, RenderableType

from ductile.cluster.cluster import StartFailed
from ductile.cluster.cpu_cap import CapNotPermitted
from ductile.config.checks.written import of_a_run
from ductile.config.reading.command_line import as_sentence, pasteable
from ductile.config.reading.dump import to_table, write_resolved
from ductile.config.reading.imports import ImportPathError
from ductile.config.schema.run import OrchestratorRunConfig, RLConfig, SFTConfig, TrainerRunConfig
from ductile.dashboard.printable import printable
from ductile.dashboard.run_display import RunDisplay, show
from ductile.disk import FULL, named
from ductile.error_text import capitalised, error_with_place, place_in
from ductile.events.checkpoints import OldRunReplaced
from ductile.events.ending import EndedAsAsked, EndedByDeath, EndedByFailure, StopAsked
from ductile.events.run_state import RunState
from ductile.host import shortage
from ductile.observe import Recorder, RunEvent
from ductile.orchestrator.commands.bench import Bench, written
from ductile.orchestrator.commands.sinks import SinkMissing, TensorboardSink, WandbSink
from ductile.orchestrator.commands.tracing import Tracing
from ductile.orchestrator.ending.folder import FolderInUse, bench_folder, run_folder
from ductile.orchestrator.ending.interrupt import Interrupt, interrupts
from ductile.orchestrator.ending.meaning import NEW, Beginning
from ductile.orchestrator.ending.old_run import FAILED_START, ForgetOldRun, is_aside
from ductile.orchestrator.ending.progress import CheckpointError, Checkpoints
from ductile.orchestrator.ending.replace_config import ReplaceConfig
from ductile.orchestrator.ending.run_until import SlotDied, Stopped
from ductile.orchestrator.ending.saving import lacks_model
from ductile.roles import Failure
from ductile.tasks.task import TaskError
from ductile.tasks.tokenizer import TokenizerError

DONE, FAILED, NOT_STARTED, INTERRUPTED = 0, 1, 2, 130
NUM_KEPT = 20
"""Events of a sort that a live run remembers: more than are shown of it."""

UNFIT = (
    TaskError, TokenizerError, ImportPathError, CheckpointError, FolderInUse, SinkMissing, StartFailed,
    CapNotPermitted, OSError,
)  # fmt: skip
"""What is wrong with what the config names, or with this machine; each says so in a sentence."""

Config = RLConfig | SFTConfig | TrainerRunConfig | OrchestratorRunConfig
C = TypeVar("C", bound=Config)
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with. It returns what to print when all is over."""

    command: str
    max_steps: int
    measures: Bench | Tracing | None
    """The benchmark that this run is, or the traces that are asked for, which exclude each other."""
    folder: Path
    record: Recorder
    state: RunState
    """What the run has told since this process began."""
    view: RunDisplay
    interrupt: Interrupt = field(default_factory=Interrupt)
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def bench(self) -> Bench | None:
        return self.measures if isinstance(self.measures, Bench) else None

    @property
    def tracing(self) -> Tracing | None:
        return self.measures if isinstance(self.measures, Tracing) else None

    @property
    def logs(self) -> Path:
        return self.folder / "logs"


@dataclass(frozen=True, slots=True)
class _End:
    code: int
    sentence: str = ""
    summary: RenderableType = ""


def supervise(
    command: str,
    config: C,
    prepare: Callable[[C], P],
    max_steps: Callable[[P], int],
    run: Callable[[C, P, Session], Awaitable[RenderableType]],
    began: Callable[[P], Beginning] = lambda prepared: NEW,
) -> int:
    """Prepare, run, and say how it ended. Returns the exit code.

    began: where the run that is gone on with is. When there is nothing left to do, nothing is started or written.
    """
    session, end = None, _End(FAILED)
    try:
        if is_aside(Path(config.output_dir)):
            with run_folder(config.output_dir, clean=False):
                pass  # to enter it puts back what a start that was killed had set aside
        prepared = prepare(config)
        beginning = began(prepared)
        if nothing := _nothing_to_do(config, beginning, max_steps(prepared)):
            print(f"ductile {command}: {nothing}")
            return DONE
        with ExitStack() as stack:
            bench = Bench(config.bench, to_table(config)) if config.bench else None
            folder = bench_folder() if bench else stack.enter_context(run_folder(config.output_dir, config.clean))
            record = Recorder(folder)
            stack.callback(lambda: record.close(end.code))
            write_config = partial(write_resolved, config, folder, command)
            if _goes_on(config) and (folder / "config.toml").exists():
                record.listeners.append(ReplaceConfig(write_config))
            else:
                write_config()
            record.listeners.append(ForgetOldRun(folder))
            _add_sinks(record, config, beginning)
            if sys.stdout.isatty():  # events pass by in the live view
                for change in beginning.changes:
                    print(f"note: {printable(change.sentence)}", file=sys.stderr)
            state = RunState(num_kept=NUM_KEPT)
            view = stack.enter_context(show(f"ductile {command}: {folder}", max_steps(prepared), state))
            measures = bench or _tracing(config, folder)
            record.listeners.extend([state, view, measures] if measures else [state, view])
            if is_aside(folder):
                when = "as soon as this one has done its first step or evaluation (clean = true)"
                record.event(OldRunReplaced(sentence=f"The run that is in {folder} is deleted {when}."))
            session = Session(command, max_steps(prepared), measures, folder, record, state, view)
            end = asyncio.run(_run(session, run(config, prepared, session), partial(_abandon, config, session)))
            if bench and config.bench and end.summary:
                end = replace(end, summary=written(bench.figures(), bench.table(), config.bench.output_json))
            if bench and end.code != FAILED:
                shutil.rmtree(folder, ignore_errors=True)
    except UNFIT as error:
        # A full disk, say, may come in the middle of a run, too.
        started = session is not None and session.record.last_step is not None
        end = _End(FAILED if started else NOT_STARTED, _words(error, Path(config.output_dir)))
    except Exception as error:  # a mistake of ours: with its traceback, and still with how to go on
        error.add_note(f"ductile {command} failed.{_after(command, config, session)}")
        raise
    _say(end, command, config, session)
    return end.code


async def _run(session: Session, running: Awaitable[RenderableType], abandon: Callable[[float], None]) -> _End:
    def on_asked() -> None:
        after = " after this step" if session.record.last_step is not None else ""
        session.record.event(StopAsked(sentence=f"Stopping{after}; press again to stop at once."))

    with interrupts(session.interrupt, on_asked, abandon):
        try:
            summary = await running
        except Stopped:
            return _record_end(session, EndedAsAsked(), _End(INTERRUPTED, "stopped at once, as asked"))
        except SlotDied as error:
            return _record_end(session, EndedByDeath(error.code), _End(FAILED, str(error)))
        except Failure as error:
            return _record_end(session, EndedByFailure(error.code), _End(FAILED, str(error)))
        except Exception as error:
            if session.record.last_step is not None:
                unfit = isinstance(error, UNFIT)
                sentence = _words(error, session.folder) if unfit else error_with_place(error, ours=True)
                failed = EndedByFailure(traceback=traceback.format_exc(), sentence=as_sentence(capitalised(sentence)))
                session.record.event(failed)
            raise
        if session.record.is_lost():
            said = "was removed or moved while the run was at work: only what was saved after that is there"
            lost = _End(FAILED, f"the folder {session.folder} {said}", summary)
            return _record_end(session, EndedByFailure(), lost)
        if session.interrupt.graceful.is_set():
            when = "before a step was done" if session.record.last_step is None else "after a whole step"
            return _record_end(session, EndedAsAsked(), _End(INTERRUPTED, f"stopped {when}, as asked", summary))
        return _End(DONE, summary=summary)


def _abandon(config: Config, session: Session, waited_s: float) -> None:
    """End the process from a thread beside the event loop, which never gets its turn. All other processes follow."""
    command = session.command
    try:
        busy = f"{_busy()} has kept the event loop busy for {waited_s:g} s, so nothing more was saved"
        said = printable(f"ductile {command}: Stopped at once, as asked: {busy}.{_after(command, config, session)}")
        shows_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live view has hidden it
        os.write(sys.stderr.fileno(), f"{shows_cursor}\n{said}\n".encode(errors="replace"))
    finally:
        os._exit(INTERRUPTED)


def _busy() -> str:
    """What the main thread is at: the innermost line of the user's code that the run has called, or a line of
    ductile."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    began = max(number for number, frame in enumerate(frames) if frame.filename == __file__)
    return f"something{place_in(frames[began + 1 :]) or place_in(frames[-1:], ours=True)}"


def _record_end(session: Session, event: RunEvent, end: _End) -> _End:
    session.record.event(structs.replace(event, sentence=as_sentence(capitalised(end.sentence))))
    return end


def _say(end: _End, command: str, config: Config, session: Session | None) -> None:
    try:
        if end.summary:
            Console(soft_wrap=True, highlight=False, markup=False).print(end.summary)
            sys.stdout.flush()
        if end.sentence:
            after = _put_back(config, session)
            if not after and end.code != NOT_STARTED:
                after = _after(command, config, session)
            sentence = printable(as_sentence(capitalised(end.sentence)), keep="\n")
            print(f"ductile {command}: {sentence}{after}", file=sys.stderr)
    except OSError:  # the terminal is gone
        # What is still in the buffer must not fail once more at the interpreter's end.
        with open(os.devnull, "w") as nowhere, suppress(OSError):
            os.dup2(nowhere.fileno(), 1)


def _nothing_to_do(config: Config, began: Beginning, max_steps: int) -> str:
    """Why a resume starts nothing, in sentences; "" when there are steps to do, or something that was due after the
    last one is missing."""
    folder, done = Path(config.output_dir), began.progress.step
    has_ended = done > max_steps or _has_summary(folder / "summary.json", done)
    if not done or done < max_steps or not has_ended or began.owes_evaluation:
        return ""
    if isinstance(config, RLConfig | SFTConfig) and config.ckpt.export_model and lacks_model(folder / "model", done):
        return ""
    steps, more = "step" if done == 1 else "steps", f"--max-steps above {done}"
    return (
        f"The run in {folder} has done {done} {steps}, and max_steps is {max_steps}: there is nothing to do, and "
        f"nothing was changed. To go on, give {more}; to go back, --ckpt.resume-step with an earlier one."
    )


def _has_summary(file: Path, step: int) -> bool:
    """Return whether there is a summary of a run that ended at `step`: an earlier life of it may have ended before."""
    try:
        return json.loads(file.read_bytes()).get("steps", step) == step
    except (OSError, ValueError):
        return False


def _put_back(config: Config, session: Session | None) -> str:
    """What became of the run that `clean` was to delete, when this one never began; "" when there is nothing to say."""
    if session is None or session.record.last_step is not None or not config.clean or config.bench is not None:
        return ""
    if of_a_run(session.folder) is None:
        return ""
    logs = session.logs / FAILED_START
    return f" The run that was in {session.folder} has not been deleted. Logs of this start: {logs}."


def _after(command: str, config: Config, session: Session | None) -> str:
    """Says where to look, which steps are lost, and how to go on if there is a checkpoint to go on from."""
    folder = session.folder if session else Path(config.output_dir)
    logs = f" Logs: {folder / 'logs'}." if (folder / "logs").is_dir() else ""
    if config.bench is not None or not isinstance(config, RLConfig | SFTConfig):
        return logs
    try:
        saved = Checkpoints(folder / "state").steps()
    except OSError:  # of the disk that the run died of, perhaps
        return logs
    lost = _lost(saved[-1] if saved else 0, (session.record.last_step if session else None) or 0)
    resolved = folder / "config.toml"  # a run whose folder was removed may have a checkpoint without it
    paste = pasteable(command, "@", resolved, "--resume")
    goes_on = f" Go on with: {paste}" if saved and resolved.exists() else ""
    return f"{logs}{lost}{goes_on}"


def _lost(saved: int, trained: int) -> str:
    """What of `trained` steps is not in the checkpoint of step `saved`; 0 when there is no checkpoint."""
    if trained <= saved:
        return ""
    first = saved + 1
    steps = f"step {first} is" if first == trained else f"steps {first}-{trained} are"
    return f" {capitalised(steps)} lost." if saved else f" Nothing was saved yet: {steps} lost."


def _goes_on(config: Config) -> bool:
    """Return whether the run is to go on from a checkpoint."""
    return isinstance(config, RLConfig | SFTConfig) and config.ckpt.resume_step is not None


def _add_sinks(record: Recorder, config: Config, began: Beginning) -> None:
    if not isinstance(config, RLConfig | SFTConfig) or config.bench is not None:
        return
    if config.tensorboard:
        board = Path(config.tensorboard.dir or record.folder / "tensorboard")
        record.listeners.append(TensorboardSink(board, began.last_kept))
    if config.wandb:
        record.listeners.append(WandbSink(record, config.wandb, to_table(config), began.last_kept))


def _tracing(config: Config, folder: Path) -> Tracing | None:
    """The traces that are asked for; `ductile orchestrator` has no slots that could trace."""
    asked = None if isinstance(config, OrchestratorRunConfig) else config.trace
    return Tracing(asked, folder) if asked else None


def _words(error: Exception, folder: Path) -> str:
    """Return what to say of an UNFIT error: what there was too little of has its limit, and a full disk is named, as
    what failed to write may not know its file."""
    if isinstance(error, OSError) and error.errno in FULL:
        return str(named(error, Path(str(error.filename or folder))))
    return f"{error}{shortage(error)}"
