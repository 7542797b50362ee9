"""A `StepRecorder` for a CPU, with the ways of a CUDA graph.

What is taken down are torch's operators with their arguments, tensors by their memory and all else by its value. A
replay runs these, and nothing of the Python code around them: results go to the memory that they had the first time.
So it says of a recording what a GPU would: one that depends on lengths, on a Python list, or on weights that have moved
since computes what it computed then. What a capture does not allow, to read a value on the host or to bring one from
there, is refused here, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FORBIDDEN = {"aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero"}


class TapeRecording:
    """Operators with their arguments, and the tensors that they gave."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def replay(self) -> None:
        for operator, args, kwargs, given in self.operators:
            again = [each for each in tree_leaves(operator(*args, **kwargs)) if isinstance(each, torch.Tensor)]
            for old, new in zip(given, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Tape:
    """Records what runs on a CPU. `fails_at`: number of the recording, from 0, that cannot be made."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.recordings: list[TapeRecording] = []
        self._fails_at = fails_at

    def record(self, work: Callable[[], None]) -> TapeRecording:
        work()
        if len(self.recordings) == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
        recording = TapeRecording()
        with _TakesDown(recording):
            work()
        self.recordings.append(recording)
        return recording


class _TakesDown(TorchDispatchMode):
    def __init__(self, recording: TapeRecording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name) in FORBIDDEN:
            raise RuntimeError(f"{name} is not permitted while a step is recorded")
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self._recording.operators.append((func, tree_map(_memory, args), tree_map(_memory, kwargs or {}), given))
        return result


def _memory(value: Any) -> Any:
    """A tensor's memory, which stays when the tensor is given another one (`parameter.data = ...`)."""
    return value.detach() if isinstance(value, torch.Tensor) else value
