"""What the run of `tests.fleet.mutations` says of each defect; the defects themselves are put back nightly at most."""

from pathlib import Path
from shutil import copytree, ignore_patterns
from unittest.mock import patch

import pytest

from tests.fleet import mutations
from tests.fleet.mutations import DEFECTS, ROOT, Verdict, put_back, verdict_of

FAILED = "FAILED tests/fleet/live/test_rows.py::test_a - AssertionError"


@pytest.mark.parametrize(
    ("returncode", "stdout", "verdict"),
    [
        (1, f"{FAILED}\n1 failed in 3 s", Verdict.CAUGHT),
        (1, "ERROR tests/fleet/live/test_rows.py::test_a - OSError\n1 error in 3 s", Verdict.CAUGHT),
        (0, "..\n2 passed in 3 s", Verdict.SURVIVED),
        (0, "..\n2 passed, 1 skipped in 3 s", Verdict.SURVIVED),
        (0, "s\n1 skipped in 3 s", Verdict.NOT_RUN),
        (5, "no tests ran in 0.1 s", Verdict.NOT_RUN),
        (2, "ERROR tests/fleet/live/test_rows.py - ImportError\n1 error in 3 s", Verdict.NOT_RUN),
        (4, "ERROR: not found: tests/fleet/live/test_rows.py::test_gone", Verdict.NOT_RUN),
        (-9, "", Verdict.NOT_RUN),
        (-15, f"{FAILED}\n", Verdict.NOT_RUN),
        (137, ".", Verdict.NOT_RUN),
        (143, ".", Verdict.NOT_RUN),
    ],
)
def test_tests_that_did_not_run_say_nothing_of_a_defect(returncode: int, stdout: str, verdict: Verdict) -> None:
    assert verdict_of(returncode, stdout, "")[0] == verdict


@pytest.mark.parametrize(
    ("verdicts", "last", "code"),
    [
        (["caught", "caught"], "2 caught, 0 survived", 0),
        (["caught", "SURVIVED"], "1 caught, 1 survived", 1),
        (["caught", "not run"], "1 caught, 0 survived, 1 not run", 1),
        (["not run", "not run"], "0 caught, 0 survived, 2 not run", 1),
    ],
)
def test_only_a_run_in_which_all_are_caught_succeeds(
    verdicts: list[str], last: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.object(mutations, "judged", side_effect=[(Verdict(each), "") for each in verdicts]):
        assert mutations.main([1, 2]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: str(defect.number))
def test_each_defect_can_still_be_put_back(defect: mutations.Defect, tmp_path: Path) -> None:
    copytree(ROOT / "src", tmp_path / "src", ignore=ignore_patterns("__pycache__", "*.so"))
    put_back(defect, tmp_path / "src")
