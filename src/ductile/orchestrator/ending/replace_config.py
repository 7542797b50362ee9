"""The config of a run that is gone on with: the one that the run had stays until the new one has proved itself."""

from collections.abc import Callable, Mapping
from contextlib import suppress

from ductile.events.checkpoints import RunResumed, StartedAnew
from ductile.observe import Listener, RunEvent


class ReplaceConfig(Listener):
    """Listener that writes the new config once the trainer has loaded the run's checkpoint with it, or begun anew. One
    that the checkpoint does not fit must not cost the settings that it was trained with."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._is_written = False

    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, RunResumed | StartedAnew):
            self._write_once()

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write_once()

    def _write_once(self) -> None:
        if not self._is_written:
            with suppress(OSError):  # a full disk, say: the next step is another chance
                self._write()
                self._is_written = True
