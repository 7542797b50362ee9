"""A local JSONL file with a reward function of yours."""

from collections.abc import Callable
from typing import Any

from ductile.config.imports import ImportPathError, import_object
from ductile.roles import Task
from ductile.tasks.rows import Row, conversation, read_rows
from ductile.tasks.task import TaskError

Reward = Callable[[Row, str], Any]
"""`reward(row, answer)` gives a number, or (number, metrics)."""


class JsonlDataset(Task):
    """Each line is a question; `reward(row, answer)` gets the whole line, so that it may hold the solution.

    The reward is imported where it is first used, in a grader process: it may need what the orchestrator does not.
    """

    def __init__(self, path: str, reward: str, system_prompt: str | None = None, name: str = "jsonl") -> None:
        self.name = name
        self._reward_path = reward
        self._reward: Reward | None = None
        rows = read_rows(path)
        self._rows = [row for _, row in rows]
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = [system + conversation(where, row, ends_with="question") for where, row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def messages(self, example: int) -> list[dict[str, str]]:
        return list(self._messages[example])

    def reward(self, example: int, answer: str) -> float | tuple[float, dict[str, float]]:
        if self._reward is None:
            self._reward = _import_function(self._reward_path)
        return self._reward(self._rows[example], answer)


def _import_function(import_path: str) -> Reward:
    try:
        function = import_object(import_path)
    except ImportPathError as error:
        raise TaskError(f"orchestrator.task.reward: {error}") from error
    if not callable(function):
        raise TaskError(f"orchestrator.task.reward: {import_path} is {type(function).__name__}, not a function")
    return function
