"""However training ends, what was trained is saved."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ductile.loop.attend import attend
from ductile.loop.overlap import undisturbed
from ductile.observe import Recorder

UNDISTURBED_S = 3600.0
"""The longest that training may go on after a death: an optimizer step or a checkpoint that had begun is finished.
Each command of theirs has a shorter deadline of its own."""


class OncePerStep:
    """Saves no step twice, also when the first attempt has failed, and leaves no save half done."""

    def __init__(self, save: Callable[[int], Awaitable[None]], step: int) -> None:
        """step: what is saved already."""
        self._save, self._tried = save, step

    async def __call__(self, step: int) -> None:
        if self._tried < step:
            self._tried = step
            await undisturbed(self._save(step))


async def saved_in_the_end(
    train: Coroutine[Any, Any, None],
    save: Callable[[], Awaitable[None]],
    record: Recorder,
    death: Coroutine[Any, Any, str] | None = None,
) -> None:
    """Await `train`, then `save()`, which writes what is not written yet. What ends `train` is raised after that.

    death: returns when a process is lost that the run needs. It may be a generator's, and the trainer is as good as
    before: only the attempt shows. That it failed, too, is an event, and what ended the run is raised all the same.
    Cancelled, nothing more is saved: the user does not want to wait.
    """
    try:
        await (attend(train, death=death, cancel_s=UNDISTURBED_S) if death else train)
    except Exception:
        await _save_after_all(save, record)
        raise
    await save()


async def _save_after_all(save: Callable[[], Awaitable[None]], record: Recorder) -> None:
    try:
        await save()
    except Exception as error:
        record.event("not_saved", f"What was trained since the last checkpoint cannot be saved: {error}.")
