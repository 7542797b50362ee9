"""However training ends, what was trained is saved."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from ductile.concurrency.structured import undisturbed
from ductile.config.reading.command_line import as_sentence
from ductile.events.checkpoints import CheckpointNotSaved, ModelNotExported
from ductile.observe import Recorder
from ductile.orchestrator.ending.run_until import run_until
from ductile.orchestrator.ending.saving import ExportFailed

UNDISTURBED_S = 3600.0
"""The longest that training may go on after a death: an optimizer step or a checkpoint that had begun is finished.
Each command of theirs has a shorter deadline of its own."""


class SaveOncePerStep:
    """Saves no step twice, also when the first attempt has failed, and leaves no save half done.

    A failure is an event `not_saved`, or `not_exported` where only the model is missing, and raised.
    """

    def __init__(self, save: Callable[[int], Awaitable[None]], step: int, record: Recorder) -> None:
        """step: what is saved already; 0 when nothing is."""
        self._save, self._record = save, record
        self._tried = self._saved = step
        self._whole: int | None = step
        """The step whose weights the trainer has; None when an update of the next one has changed them."""
        self.is_whole = asyncio.Event()
        """Set while the weights are those of a step."""
        self.is_whole.set()
        self._saving = asyncio.Lock()

    async def __call__(self, step: int) -> None:
        async with self._saving:
            if self._tried < step:
                self._tried = step
                await undisturbed(self._save_or_report(step))

    async def _save_or_report(self, step: int) -> None:
        try:
            await self._save(step)
        except ExportFailed as error:
            self._saved = step
            self._record.event(ModelNotExported(sentence=as_sentence(str(error))))
            raise
        except Exception as error:
            since = "What was trained since the last checkpoint cannot be saved"
            what = since if self._saved else "Nothing of this run is saved"
            self._record.event(CheckpointNotSaved(sentence=as_sentence(f"{what}: {error}")))
            raise
        self._saved = step

    async def update_begins(self) -> None:
        """The weights are about to change, and belong to no step until `step_ends`. Waits for a save to end."""
        async with self._saving:
            self._whole = None
            self.is_whole.clear()

    def step_ends(self, step: int) -> None:
        self._whole = step
        self.is_whole.set()

    async def when(self, stop: asyncio.Event) -> None:
        """Wait until the run is asked to stop, and save the last whole step at once.

        Batch systems kill half a minute after they have asked, and a step may take ten times as long. A failure is not
        raised: the end of the step is another chance.
        """
        await stop.wait()
        await self.now()

    async def now(self) -> None:
        """Save the last whole step; a failure is not raised. In the middle of a step whose updates have begun nothing
        is saved: its weights are of no step."""
        if self._whole is not None:
            with suppress(Exception):
                await self(self._whole)


@asynccontextmanager
async def saved_when(soon: asyncio.Event, save: SaveOncePerStep) -> AsyncGenerator[None]:
    """Save the last whole step each time that `soon` is set while the block runs, in the middle of one when it ends. A
    failure is not raised."""

    async def keep_saving() -> None:
        while True:
            await soon.wait()
            await save.is_whole.wait()
            await save.now()
            soon.clear()

    saving = asyncio.create_task(keep_saving())
    try:
        yield
    finally:
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)


async def saved_in_the_end(
    train: Coroutine[Any, Any, None],
    save: Callable[[], Awaitable[None]],
    early: Coroutine[Any, Any, None],
    death: Coroutine[Any, Any, str] | None = None,
) -> None:
    """Await `train`, then `save()`, which writes what is not written yet. What ends `train` is raised after that.

    early: saves beside training, as soon as it is asked to stop; cancelled at the end. death: returns when a process is
    lost that the run needs. It may be a generator's, and the trainer is as good as before: only the attempt shows. What
    ended the run is raised even when saving fails, too. Cancelled, nothing more is saved: the user does not want to
    wait.
    """
    asked = asyncio.create_task(early)
    try:
        await (run_until(train, death=death, cancel_s=UNDISTURBED_S) if death else train)
    except Exception:
        with suppress(Exception):  # what ended the run is the news
            await save()
        raise
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await save()
