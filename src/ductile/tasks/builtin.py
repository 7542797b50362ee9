"""Three tasks small enough to read, which a tiny model learns on a CPU."""

import inspect
import random
import re
from collections.abc import Callable

from ductile.config.schema.orchestrator import BuiltinTask
from ductile.roles import Task
from ductile.tasks.task import TaskError, did_you_mean


class Addition(Task):
    """`12+30=`: 1 for the sum, 0 for anything else."""

    name = "addition"

    def __init__(self, size: int, seed: int, max_value: int = 99) -> None:
        self._size, self._seed, self._max_value = size, seed, max_value

    def __len__(self) -> int:
        return self._size

    def messages(self, example: int) -> list[dict[str, str]]:
        a, b = self._addends(example)
        return [{"role": "user", "content": f"{a}+{b}="}]

    def reward(self, example: int, completion: str) -> tuple[float, dict[str, float]]:
        is_number = re.fullmatch(r"\d+", completion.strip(), flags=re.ASCII) is not None
        right = is_number and completion.strip() == str(sum(self._addends(example)))
        return float(right), {"is_number": float(is_number)}

    def _addends(self, example: int) -> tuple[int, int]:
        draw = random.Random(f"addition/{self._seed}/{example}")
        return draw.randint(0, self._max_value), draw.randint(0, self._max_value)


class Reverse(Task):
    """`Reverse: abc`: the share of letters that are where they belong."""

    name = "reverse"

    def __init__(self, size: int, seed: int, min_length: int = 3, max_length: int = 6) -> None:
        if min_length > max_length:
            raise TaskError(f"reverse has min_length {min_length} above max_length {max_length}")
        self._size, self._seed, self._lengths = size, seed, (min_length, max_length)

    def __len__(self) -> int:
        return self._size

    def messages(self, example: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Reverse: {self._word(example)}"}]

    def reward(self, example: int, completion: str) -> float:
        wanted, completion = self._word(example)[::-1], completion.strip()
        right = sum(a == b for a, b in zip(wanted, completion, strict=False))
        return right / max(len(wanted), len(completion))

    def _word(self, example: int) -> str:
        draw = random.Random(f"reverse/{self._seed}/{example}")
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(*self._lengths)))


class GuessNumber(Task):
    """The policy guesses, the environment says higher or lower: 1 when the last guess hits."""

    name = "guess_number"

    def __init__(self, size: int, seed: int, max_value: int = 20, max_turns: int = 5) -> None:
        self._size, self._seed, self._max_value, self._max_turns = size, seed, max_value, max_turns

    def __len__(self) -> int:
        return self._size

    def messages(self, example: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Guess my number between 1 and {self._max_value}."}]

    def reply(self, example: int, messages: list[dict[str, str]]) -> list[dict[str, str]] | None:
        guesses = [message["content"] for message in messages if message["role"] == "assistant"]
        guess, secret = _number(guesses[-1]), self._secret(example)
        if guess == secret or len(guesses) >= self._max_turns:
            return None
        hint = "Say a number." if guess is None else "Higher." if guess < secret else "Lower."
        return [{"role": "user", "content": hint}]

    def reward(self, example: int, completion: str) -> float:
        return float(_number(completion) == self._secret(example))

    def _secret(self, example: int) -> int:
        return random.Random(f"guess_number/{self._seed}/{example}").randint(1, self._max_value)


BUILTIN: dict[str, Callable[..., Task]] = {task.name: task for task in (Addition, Reverse, GuessNumber)}


def make_builtin(config: BuiltinTask) -> Task:
    """Raises TaskError for an unknown name or a config that the task does not take."""
    name = config.name
    if name not in BUILTIN:
        raise TaskError(f'there is no built-in task "{name}"{did_you_mean(name, BUILTIN)}')
    known = inspect.signature(BUILTIN[name]).parameters.keys() - {"size", "seed"}
    for key, value in config.config.items():
        if key not in known:
            raise TaskError(f'{name} has no "{key}"{did_you_mean(key, known)}')
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TaskError(f"{name}'s {key} is {value!r}; it must be a whole number above 0")
    return BUILTIN[name](size=config.size, seed=config.seed, **config.config)


def _number(text: str) -> int | None:
    found = re.search(r"-?\d+", text, flags=re.ASCII)
    return int(found.group()) if found else None
