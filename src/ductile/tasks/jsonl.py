"""A local JSONL file with a reward function of yours."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from ductile.config.checks.reward_signature import (
    FACTS,
    IS_A_CLASS,
    RewardSignature,
    WrongSignature,
    columns_of,
    reward_signature,
)
from ductile.config.reading.imports import ImportPathError, import_object
from ductile.config.schema.orchestrator import JsonlTask
from ductile.roles import Task
from ductile.tasks.rows import FORMS, Row, prompt_of, read_rows
from ductile.tasks.task import TaskError, metrics_of
from ductile.user_numbers import as_finite

_OF_EVERY_LINE = frozenset({"prompts", "completions", "completion_ids", *FACTS}) - {"token_ids"}
"""What a function of lists may ask for besides the line's own values."""


@dataclass(frozen=True, slots=True)
class _Reward:
    name: str
    function: Callable[..., Any]
    signature: RewardSignature
    weight: float


class JsonlDataset(Task):
    """Each line is a prompt; a reward gets the whole line, so that it may hold the solution.

    The rewards are imported where they are first used, in a grader process: they may need what the orchestrator does
    not.
    """

    name = "jsonl"

    def __init__(self, config: JsonlTask) -> None:
        self._reward_paths = [config.reward] if isinstance(config.reward, str) else config.reward
        self._weights = config.reward_weights or [1.0] * len(self._reward_paths)
        self._rewards: list[_Reward] = []
        rows = read_rows(config.path)
        for path in self._reward_paths:
            _require_columns(path, rows)
        self.rows = [row for _, row in rows]
        """The file's lines, as rewards get them."""
        system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
        self._sources = [where for where, _ in rows]
        self._prompts = [prompt_of(where, row) for where, row in rows]
        for where, prompt in zip(self._sources, self._prompts, strict=True):
            if system and any(message["role"] == "system" for message in prompt.messages):
                raise TaskError(
                    f"{where}: has a system message, and orchestrator.task.system_prompt is another; keep one of them"
                )
        self._system = system

    def __len__(self) -> int:
        return len(self.rows)

    def messages(self, example: int) -> list[dict[str, str]]:
        return [*self._system, *self._prompts[example].messages]

    def template_variables(self, example: int) -> Mapping[str, Any]:
        return self._prompts[example].variables

    def source(self, example: int) -> str:
        return self._sources[example]

    @property
    def rewards(self) -> list[_Reward]:
        if not self._rewards:
            named = zip(names_of(self._reward_paths), self._reward_paths, self._weights, strict=True)
            self._rewards = [_import_reward(*each) for each in named]
        return self._rewards

    @property
    def wants_token_ids(self) -> bool:
        return any(reward.signature.wants_token_ids for reward in self.rewards)

    def reward(self, example: int, completion: str, **facts: Any) -> Any:
        """The reward of one function as it is; for several the weighted sum, with each one among the metrics (`style`),
        and its own metrics behind its name (`style/length`)."""
        calls = [(reward, _call(reward, self.rows[example], completion, facts)) for reward in self.rewards]
        if any(isinstance(value, Awaitable) for _, value in calls):
            return _summed_later(calls)
        return _summed(calls)


def _require_columns(import_path: str, rows: Sequence[tuple[str, Row]]) -> None:
    """Raises TaskError when a function of lists asks for what a line lacks, as far as can be seen without running its
    file."""
    columns = columns_of(import_path).difference(_OF_EVERY_LINE)
    for where, row in rows:
        if missing := sorted(columns.difference(_values(row))):
            raise TaskError(
                f"orchestrator.task.reward: {import_path} asks for `{missing[0]}`, and {where} has "
                f"{', '.join(_values(row)) or 'nothing besides its prompt'}: add it to the line, or give the parameter "
                f"a default"
            )


def _call(reward: _Reward, row: Row, completion: str, facts: dict[str, Any]) -> Any:
    signature = reward.signature
    if signature.style == "row":
        return reward.function(row, completion, **{name: facts[name] for name in facts if signature.wants(name)})
    prompt = next(row[form] for form in FORMS if row.get(form) is not None)
    as_messages = not isinstance(prompt, str)
    there = _values(row) | {
        "prompts": prompt,
        "completions": [{"role": "assistant", "content": completion}] if as_messages else completion,
        "completion_ids": list(facts.get("token_ids", ())),
        **{name: value for name, value in facts.items() if name != "token_ids"},
    }
    return reward.function(**{name: [value] for name, value in there.items() if signature.wants(name)})


def _values(row: Row) -> dict[str, Any]:
    """What a function of lists is given of a line under the line's own names."""
    return {name: value for name, value in row.items() if name not in ("prompt", "messages", "completion")}


async def _summed_later(calls: Sequence[tuple[_Reward, Any]]) -> Any:
    return _summed([(reward, await value if isinstance(value, Awaitable) else value) for reward, value in calls])


def _summed(calls: Sequence[tuple[_Reward, Any]]) -> Any:
    values = [(reward, _of_one(reward, value)) for reward, value in calls]
    if len(values) == 1 and values[0][0].weight == 1:
        return _alone(*values[0])
    total, metrics = list[float](), dict[str, object]()
    for reward, value in values:
        returned, own = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if returned is None and reward.signature.style == "lists":
            continue  # TRL's word for "this is not for me"
        number = as_finite(returned)
        if number is None:
            raise TaskError(f"by {reward.name} returned {returned!r}; it must return a finite number")
        total.append(reward.weight * number)
        metrics[reward.name] = number
        metrics |= {f"{reward.name}/{name}": value for name, value in metrics_of(own).items()}
    if not total:
        raise TaskError("returned None, from each of its functions")
    return fsum(total), metrics


def _alone(reward: _Reward, value: Any) -> Any:
    """Return what the only function returned. `reward/<its name>` is kept for its reward, as in runs with several."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)):
        return value
    return value[0], {f"{reward.name}/{name}" if name == reward.name else name: own for name, own in value[1].items()}


def _of_one(reward: _Reward, value: Any) -> Any:
    """The reward of the one completion that a function of lists was asked for."""
    if reward.signature.style == "row":
        return value
    try:
        values = list(value)  # a list, an array or a tensor
    except TypeError:
        values = []
    if len(values) != 1:
        raise TaskError(f"by {reward.name} returned {value!r}; it must return a list with a number for each completion")
    return values[0]


def names_of(import_paths: Sequence[str]) -> list[str]:
    """Names of reward functions in metrics: `style`; `a.style` and `b.style` where there are two of them. Names that
    are the same even so end with the place in the list."""
    parts = [path.replace("/", ".").replace(".py:", ".").replace(":", ".").split(".") for path in import_paths]
    names = [".".join(each[-1:]) for each in parts]
    names = [".".join(each[-2:]) if names.count(name) > 1 else name for each, name in zip(parts, names, strict=True)]
    return [f"{name}_{n}" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]


def _import_reward(name: str, import_path: str, weight: float) -> _Reward:
    try:
        function = import_object(import_path)
    except ImportPathError as error:
        raise TaskError(f"orchestrator.task.reward: {error}") from error
    if isinstance(function, type):
        raise TaskError(f"orchestrator.task.reward: {import_path} {IS_A_CLASS}")
    if not callable(function):
        raise TaskError(f"orchestrator.task.reward: {import_path} is {type(function).__name__}, not a function")
    try:
        signature = reward_signature(function)
    except WrongSignature as error:
        raise TaskError(f"orchestrator.task.reward: {import_path} {error}") from None
    return _Reward(name, function, signature, weight)
