"""Sums of two numbers, written out: "14 + 9" is to be answered with "14 + 9 = 23", and nothing else is right.

Each pair of numbers is one example, whichever comes first: a held-out sum is not one that was trained on the other way
round. Plain Python: no ductile, no torch.
"""

import random
from itertools import combinations_with_replacement

SYSTEM = "Answer with the sum and nothing else."
SHOWN = ("7 + 6", "7 + 6 = 13")
"""A question and its answer, before each prompt's own."""


class Sums:
    name = "sums"

    def __init__(self, largest: int = 30, seed: int = 0) -> None:
        chance = random.Random(seed)
        pairs = [chance.sample(pair, 2) for pair in combinations_with_replacement(range(1, largest + 1), 2)]
        chance.shuffle(pairs)
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def messages(self, example: int) -> list[dict[str, str]]:
        first, second = self._pairs[example]
        question, answer = SHOWN
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"{first} + {second}"},
        ]

    def reward(self, example: int, completion: str) -> tuple[float, dict[str, float]]:
        """Return 1 for the sum in the form that was shown, else 0; `sum_said` is 1 wherever the sum comes last."""
        first, second = self._pairs[example]
        total = str(first + second)
        right = completion.strip() == f"{first} + {second} = {total}"
        return float(right), {"sum_said": float(completion.split()[-1:] == [total])}
