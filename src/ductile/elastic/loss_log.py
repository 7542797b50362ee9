"""Writes down which slots are lost while the run goes on. With which ones it ends, the run's own end says."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from ductile.cluster.cluster import Cluster
from ductile.elastic.trainer_resizer import TrainerResizer
from ductile.error_text import capitalised
from ductile.events.slots import SlotWasLost
from ductile.observe import Recorder
from ductile.transport.mailbox import Died, SlotEvent


class LossLog:
    """Works within `with`."""

    def __init__(self, cluster: Cluster, resizer: TrainerResizer, record: Recorder) -> None:
        self._cluster, self._resizer, self._record = cluster, resizer, record
        self._undecided: list[SlotWasLost] = []
        """Losses on which the resize under way has not ruled yet; it may end the run with them."""
        self._unsubscribe: Callable[[], None] = lambda: None
        resizer.on_end.add(self._on_resize_end)

    def __enter__(self) -> Self:
        self._unsubscribe = self._cluster.mailbox.subscribe(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()

    def _on_event(self, slot: int, event: SlotEvent) -> None:
        if not isinstance(event, Died) or slot in self._cluster.mailbox.gone:
            return
        roles = self._cluster.mailbox.roles(slot)
        lost = SlotWasLost(slot, roles=roles, sentence=f"{capitalised(event.reason)}.")
        if self._resizer.involves(slot):
            self._undecided.append(lost)
        else:
            self._write(lost)

    def _on_resize_end(self) -> None:
        undecided, self._undecided = self._undecided, []
        for lost in undecided:
            self._write(lost)

    def _write(self, lost: SlotWasLost) -> None:
        if not self._cluster.has_failed:
            self._record.event(lost)
