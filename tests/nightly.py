"""What a commit tries of cases that are many or random, and what the night tries.

`make test` leaves out what is marked `nightly`; hypothesis has its profile `commit`. `make nightly` runs the rest, and
hypothesis with the profile `nightly`.
"""

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

USUAL_EXAMPLES = 100
"""Those of a test that does not say how many."""


def register_profiles() -> None:
    """Make `commit` the profile of hypothesis, always with the same examples. `--hypothesis-profile nightly` has others
    each time, and sixteen times as many."""
    hypothesis.settings.register_profile("commit", deadline=None, max_examples=USUAL_EXAMPLES // 4, derandomize=True)
    hypothesis.settings.register_profile("nightly", deadline=None, max_examples=4 * USUAL_EXAMPLES)
    hypothesis.settings.load_profile("commit")


def examples(usual: int) -> int:
    """Return the `max_examples` of a test with `usual` of them, scaled as the profile scales those of any other."""
    return max(1, usual * hypothesis.settings.default.max_examples // USUAL_EXAMPLES)


def mostly_nightly(cases: Iterable[Any], *of_a_commit: Any) -> list[Any]:
    """Return the cases as parameters of a test, all of which but those of a commit are marked `nightly`."""
    cases = list(cases)
    assert of_a_commit, "a commit tries some of them"
    assert all(case in cases for case in of_a_commit)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in of_a_commit else pytest.mark.nightly,
        )
        for case in cases
    ]
