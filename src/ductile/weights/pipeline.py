"""Buckets through stages that overlap: while one is loaded, the next one is filled.

    stages        0 fill          1 load
    threads       the caller's    one more
    bucket k      --------->      ---------> its buffer is free again

1. Every stage takes the buckets one by one and in order.
2. There are `num_slots + 1` buffers: as many buckets are under way as there are slots while the next one is filled.
   With one slot the bucket that is sent is waited for only when the one after it has been filled and sent.
3. When a stage fails for a bucket, no bucket goes any further, but for stages that finish what the one before them
   began: all that was begun comes to its end. Then the first error is raised.

Whatever happens, no thread is left and no buffer is in use when `run` returns. A stage that waits needs a deadline of
its own; `look` may end its wait.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, LifoQueue, SimpleQueue
from threading import Thread
from typing import Generic, NamedTuple, TypeVar

LOOK_S = 0.1
"""Time after which one that waits for a buffer, or for the last bucket, looks whether it is to go on."""
Item = TypeVar("Item")


class Stage(NamedTuple, Generic[Item]):
    name: str
    work: Callable[[Item, int], object]
    """Called with a bucket and the number of its buffer."""
    finishes: bool = False
    """True when a bucket that has been through the stage before needs this one even after an error: it waits for what
    that began."""


class StageSpan(NamedTuple):
    """Time, on the monotonic clock, that a stage took for a bucket."""

    stage: str
    begin: float
    end: float


class _UnderWay(NamedTuple, Generic[Item]):
    """A bucket and where it is filled."""

    item: Item
    buffer: int


class BucketPipeline(Generic[Item]):
    def __init__(self, stages: Sequence[Stage[Item]], num_slots: int, look: Callable[[], None] = lambda: None) -> None:
        """look: called again and again by the caller's thread of `run` while it waits for the others'. Where it raises,
        no bucket goes any further."""
        if num_slots < 1:
            raise ValueError(f"a pipeline has at least one slot, not {num_slots}")
        self._stages, self._look = stages, look
        self.num_buffers = num_slots + 1
        self.trace: list[StageSpan] = []
        """Times of all stages, each stage's in the order of the buckets."""
        self._error: BaseException | None = None
        self._free: LifoQueue[int] = LifoQueue()
        """The one that was used last is taken first: it is still in the cache. Those that are not needed are never
        touched, and take no memory."""
        self._queues: list[SimpleQueue[_UnderWay[Item] | None]] = [SimpleQueue() for _ in stages]

    def run(self, items: Iterable[Item]) -> None:
        """Take all items through all stages, once. Raises the first error of a stage, or of `items`."""
        for buffer in reversed(range(self.num_buffers)):
            self._free.put(buffer)
        threads = [
            Thread(target=self._serve, args=(index,), name=f"weights: {stage.name}", daemon=True)
            for index, stage in enumerate(self._stages)
            if index
        ]
        for thread in threads:
            thread.start()
        try:
            for item in items:
                buffer = self._free_buffer()
                if self._error is not None:
                    break
                self._step(0, _UnderWay(item, buffer))
        except BaseException as error:
            self._fail(error)
        finally:
            if threads:
                self._queues[1].put(None)
            for thread in threads:
                self._join(thread)
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # else its traceback, and so all that the stages worked with, would live in a circle

    def _free_buffer(self) -> int:
        while True:
            try:
                return self._free.get(timeout=LOOK_S)
            except Empty:
                self._look()

    def _join(self, thread: Thread) -> None:
        while thread.is_alive():
            thread.join(LOOK_S)
            try:
                if thread.is_alive() and self._error is None:
                    self._look()
            except BaseException as error:
                self._fail(error)

    def _serve(self, index: int) -> None:
        while (under_way := self._queues[index].get()) is not None:
            self._step(index, under_way)
        if index + 1 < len(self._queues):
            self._queues[index + 1].put(None)

    def _step(self, index: int, under_way: _UnderWay[Item]) -> None:
        stage = self._stages[index]
        if self._error is None or stage.finishes:
            begin = time.monotonic()
            try:
                stage.work(under_way.item, under_way.buffer)
            except BaseException as error:
                self._fail(error)
            else:
                self.trace.append(StageSpan(stage.name, begin, time.monotonic()))
                if index + 1 < len(self._queues):
                    self._queues[index + 1].put(under_way)
                    return
        self._free.put(under_way.buffer)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
