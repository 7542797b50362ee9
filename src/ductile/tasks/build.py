"""Builds a Task from the config's `task` table."""

from typing import Any

from ductile.config.reading.imports import ImportPathError, import_object
from ductile.config.schema.orchestrator import BuiltinTask, ImportTask, JsonlTask, ReasoningGymTask, TaskConfig
from ductile.roles import Task
from ductile.tasks.builtin import make_builtin
from ductile.tasks.jsonl import JsonlDataset
from ductile.tasks.reasoning_gym import ReasoningGym
from ductile.tasks.task import TaskError, signature_of


def build_task(config: TaskConfig) -> Task:
    """Raises TaskError with a sentence when the data, the name or the import path is wrong."""
    match config:
        case ReasoningGymTask():
            return ReasoningGym(config)
        case JsonlTask():
            return JsonlDataset(config)
        case BuiltinTask():
            return make_builtin(config)
        case ImportTask():
            return _import_task(config)


def _import_task(config: ImportTask) -> Task:
    try:
        factory = import_object(config.import_path)
    except ImportPathError as error:
        raise TaskError(f"orchestrator.task.import_path: {error}") from error
    if not callable(factory):
        raise TaskError(f"orchestrator.task.import_path: {config.import_path} is neither a class nor a function")
    try:
        task: Any = factory(**config.kwargs)
    except Exception as error:
        raise TaskError(f"{config.import_path}({config.kwargs}) raises {error!r}") from error
    for method in ("__len__", "messages", "reward"):
        if not callable(getattr(task, method, None)):
            raise TaskError(f"{config.import_path} makes a task without `{method}`; see docs/tasks.md")
    try:
        signature_of(task)
    except TaskError as error:
        raise TaskError(f"{config.import_path}: {error}") from None
    if len(task) < 1:
        raise TaskError(f"{config.import_path} makes a task of {len(task)} examples")
    return task
