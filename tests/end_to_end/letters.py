"""A task that a tiny random model can learn: the more of the completion is the letter asked for, the better."""

import time


class Letters:
    name = "letters"

    def __init__(self, size: int = 64) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def messages(self, example: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{example % 10}"}]

    def reward(self, example: int, completion: str) -> float:
        return sum(letter in "aeiou" for letter in completion) / max(8, len(completion))

    def reply(self, example: int, messages: list[dict[str, str]]) -> None:
        return None


class Numbered(Letters):
    """No two prompts are the same."""

    name = "numbered"

    def messages(self, example: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{example}"}]


class Unhurried(Numbered):
    """A step takes some seconds, and no processor."""

    name = "unhurried"

    def reward(self, example: int, completion: str) -> float:
        time.sleep(0.1)
        return super().reward(example, completion)


class Even(Numbered):
    """Hardly any two completions are equally good, whatever they are drawn from."""

    name = "even"

    def __init__(self, size: int = 1000) -> None:
        super().__init__(size)

    def reward(self, example: int, completion: str) -> float:
        return sum(ord(letter) % 2 == 0 for letter in completion) / max(1, len(completion))
