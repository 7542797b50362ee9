"""How long a benchmark may take, and how it goes on without what it cannot measure.

    given = arguments(__doc__).parse_args()
    budget = Budget(given.budget)
    for _, name in budget.turns(contenders, rounds=3):
        with budget.turn_of(name):
            times[name].append(contenders[name]())
    write(given.json, figures_of(times) | budget.told)

Rounds follow each other until the budget ends, so a slow machine takes fewer of them. Each contender has its first turn
before any has its second one. Who fails in its turn has no further one; the others go on.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

BUDGET_S = 540.0
"""Of a benchmark that is started by hand; `run_all.py` has one for each."""
STOP_S = 20.0
"""For a command to end after it was asked to: a launcher ends the processes that it has started."""
TAIL_CHARS = 3000


class CannotGoOn(Exception):
    """A reason, in a line, for which something is not measured."""


class Budget:
    """The seconds that a benchmark has, and what it had to leave out."""

    def __init__(self, seconds: float = BUDGET_S) -> None:
        self._seconds = seconds
        self._until_s = time.monotonic() + seconds
        self.left_out: dict[str, str] = {}
        """Why, by what was not measured, or less often than the others."""

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    @property
    def told(self) -> dict[str, object]:
        """For the benchmark's file."""
        return {"budget_s": self._seconds, "left_out": self.left_out}

    def turns(self, names: Sequence[str], rounds: int = 1) -> Iterator[tuple[int, str]]:
        """Round by round each name, until a turn as long as its longest one no longer fits into the budget."""
        longest_s: dict[str, float] = {}
        for number in range(rounds):
            for name in names:
                if name in self.left_out:
                    continue
                if longest_s.get(name, 0.0) >= self.left_s:
                    self._end(names, number, rounds, name)
                    return
                began_s = time.monotonic()
                yield number, name
                longest_s[name] = max(longest_s.get(name, 0.0), time.monotonic() - began_s)

    @contextmanager
    def turn_of(self, name: str) -> Iterator[None]:
        """Whatever cannot go on inside is left out, with the reason."""
        try:
            yield
        except (CannotGoOn, TimeoutError) as reason:
            self.leave_out(name, str(reason) or f"it was at work when the {self._seconds:g} s were over")

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """What the command prints. Raises CannotGoOn if it fails, TimeoutError if the budget ends before it does."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        try:
            printed, errors = process.communicate(timeout=self.left_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            stop(process)
        if process.returncode:
            print((printed + errors)[-TAIL_CHARS:], file=sys.stderr, flush=True)
            raise CannotGoOn(f"a command ended with {process.returncode}; the end of what it printed is above")
        return printed

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        print(f"{name} is left out: {reason}", flush=True)

    def _end(self, names: Sequence[str], number: int, rounds: int, name: str) -> None:
        over = f"the {self._seconds:g} s of the benchmark were over"
        late = names[names.index(name) :]
        if number == 0:
            self.left_out = dict.fromkeys(late, over) | self.left_out
            print(f"Left out, as {over}: {'; '.join(late)}.", flush=True)
        else:
            self.left_out[f"round {number + 1} of {rounds}"] = over
            print(f"It ends in round {number + 1} of {rounds}: {over}.", flush=True)


def stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks are asked alike."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which it ends with what it has")
    return parser
