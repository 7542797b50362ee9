"""However a run is cut, and whatever is changed meanwhile: it goes on as the uncut run, or a sentence names the change.

`make resumes` has four pairs of each kind of change, and seven of real processes; the suite has a part of each.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ductile.orchestrator.ending import meaning
from tests.end_to_end.real_resumes import PAIRS
from tests.end_to_end.virtual_resumes import KINDS, OTHER, Kind, resumed

NUM_EACH = int(os.environ.get("RESUMES_EACH", "0"))
"""Pairs of each kind; 0: one of every fifth kind."""
VIRTUAL = [(kind, seed) for kind in KINDS for seed in range(NUM_EACH)] or [(kind, n) for n, kind in enumerate(KINDS)][
    ::5
]
SEEN = [kind for kind in OTHER if kind.of_meaning]


def names(pair: object) -> str:
    return pair.name if isinstance(pair, Kind) else str(pair)


@pytest.mark.parametrize(("kind", "seed"), VIRTUAL, ids=names)
def test_resumes_in_one_process(in_memory: Path, model: Path, kind: Kind, seed: int):
    print(resumed(kind, seed, model, in_memory / "work"))


@pytest.mark.parametrize("kind", SEEN if NUM_EACH else SEEN[1::12], ids=names)
def test_a_resume_in_silence_would_be_seen(in_memory: Path, model: Path, monkeypatch, kind: Kind):
    def silent(*_: object) -> Sequence[object]:
        return ()

    monkeypatch.setattr(meaning, "changes", silent)
    with pytest.raises(AssertionError, match="is not named with both values"):
        resumed(kind, 0, model, in_memory / "work")


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS if NUM_EACH else PAIRS[:1], ids=lambda pair: pair.__name__)
def test_resumes_of_real_processes(tmp_path: Path, start, pair):
    pair(tmp_path / "work", start)
