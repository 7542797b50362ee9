"""However a run ends: no step that was trained and due is unsaved, no older checkpoint is gone, nothing hangs, nothing
is left, and `--resume` goes on.

`make endings` has 500 endings in virtual time and 40 with real processes and signals; the suite has a part of each.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.end_to_end import real_endings, virtual_endings
from tests.end_to_end.real_endings import Ending

NUM_VIRTUAL = int(os.environ.get("ENDINGS_VIRTUAL", "36"))
NUM_REAL = os.environ.get("ENDINGS_REAL")
IN_SUITE = (real_endings.KINDS.index(("terminal lost", "sft")),)


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(virtual_endings.KINDS)), ids=virtual_endings.KINDS)
def test_endings_in_virtual_time(in_memory: Path, kind: int):
    happened = Counter[str]()
    for seed in range(kind, NUM_VIRTUAL, len(virtual_endings.KINDS)):
        print(f"seed {seed}")  # of the one that fails
        happened[virtual_endings.ending(seed, in_memory / str(seed))] += 1
    print(", ".join(f"{count} {what}" for what, count in sorted(happened.items())))
    assert happened[virtual_endings.KINDS[kind]], "at least one came before the run's end"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(NUM_REAL)) if NUM_REAL else IN_SUITE)
def test_endings_of_real_processes(tmp_path: Path, model: Path, start, seed: int):
    ending = Ending.of(seed)
    print(f"seed {seed}: {ending}")
    print(real_endings.take_place(ending, tmp_path / "work", model, start))
