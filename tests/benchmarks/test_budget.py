"""A benchmark ends in time, with what it has."""

import sys
from collections.abc import Iterator

import pytest

import budget as budget_module
from budget import Budget, CannotGoOn, arguments


class Clock:
    """Time that passes when a turn is taken."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(budget_module, "time", clock)
        yield clock


@pytest.mark.parametrize(
    ("seconds", "took_s", "turns", "left_out"),
    [
        (100, {"a": 1, "b": 2}, "ababab", {}),
        (9.5, {"a": 1, "b": 2}, "ababab", {}),
        (9, {"a": 1, "b": 2}, "ababa", {"round 3 of 3"}),
        (5, {"a": 1, "b": 2}, "aba", {"round 2 of 3"}),
        (2, {"a": 1, "b": 2}, "ab", {"round 2 of 3"}),
        (1, {"a": 1, "b": 2}, "a", {"b"}),
    ],
)
def test_rounds_follow_each_other_until_a_turn_does_not_fit(
    clock: Clock, seconds: float, took_s: dict[str, float], turns: str, left_out: set[str]
) -> None:
    taken, budget = "", Budget(seconds)
    for _, name in budget.turns(list(took_s), rounds=3):
        taken += name
        clock.now_s += took_s[name]
    assert taken == turns
    assert budget.left_out.keys() == set(left_out)


def test_who_cannot_go_on_says_why_and_has_no_further_turn(capsys: pytest.CaptureFixture[str]) -> None:
    taken, budget = list[tuple[int, str]](), Budget(100)
    for number, name in budget.turns(["a", "b"], rounds=2):
        with budget.turn_of(name):
            if name == "a":
                raise CannotGoOn("it has no engine")
            taken.append((number, name))
    assert taken == [(0, "b"), (1, "b")]
    assert budget.told == {"budget_s": 100, "left_out": {"a": "it has no engine"}}
    assert capsys.readouterr().out == "a is left out: it has no engine\n"


def test_a_command_has_what_is_left_of_the_budget(capfd: pytest.CaptureFixture[str]) -> None:
    assert Budget().run([sys.executable, "-c", "print('done')"]) == "done\n"
    with pytest.raises(CannotGoOn, match="ended with 3"):
        Budget().run([sys.executable, "-c", "print('why'); exit(3)"])
    assert capfd.readouterr().err == "why\n\n"
    late = Budget(0.1)
    with late.turn_of("it"):
        late.run([sys.executable, "-c", "import time; time.sleep(100)"])
    assert late.left_out == {"it": "it was at work when the 0.1 s were over"}


def test_all_benchmarks_are_asked_alike() -> None:
    given = arguments("What it measures.").parse_args(["--budget", "3"])
    assert (given.budget, given.json) == (3.0, None)
