"""A history of who has taken a GPU's memory, and where in the code: `trainer.memory_profiler_path`."""

import sys
from pathlib import Path

import torch

MOST_EVENTS = 100_000
"""Allocations and frees that are kept, the latest ones."""


class MemoryHistory:
    """Records what the process allocates on its GPU, from its making to `close`. https://pytorch.org/memory_viz shows
    the files."""

    def __init__(self, folder: str, slot: int) -> None:
        self._folder, self._slot = Path(folder), slot
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)

    def write(self, step: int) -> None:
        """Write what there is after a step. What cannot be is told in the log: the step is done."""
        file = self._folder / f"slot_{self._slot}_step_{step}.pickle"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
        except OSError as error:
            print(f"{file} is not written: {error}", file=sys.stderr)

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)
