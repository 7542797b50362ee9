"""README and docs quote the files in `benchmarks/results`, and these say where they come from. Nothing is measured."""

import json
import re
from datetime import datetime

import pytest

from figures import MARKED, PAGES, refreshed
from measured import RESULTS, result
from quoted import TABLES
from run_all import APART, BENCHMARKS, asked, command

FILES = sorted(RESULTS.glob("*.json"))
BY_HAND = re.compile(
    r"\d ?(?:%|x|times) (?:as (?:fast|slow|many|much|long)|faster|slower|less|more)|\d tokens/s", re.IGNORECASE
)
"""Words that go with a figure which a benchmark has found."""
MEASURED_NOWHERE = ("```.*?```", "<!-- figures: .*?<!-- end -->", "`[^`]*`")
"""Parts of a page that may have such words: printed output, what is made of the results, and code."""


def commits(found: object) -> set[str]:
    """Those that a file names, wherever in it."""
    if isinstance(found, list):
        return {commit for part in found for commit in commits(part)}
    if isinstance(found, dict):
        own = {found["commit"]} if "commit" in found else set()
        return own | {commit for part in found.values() for commit in commits(part)}
    return set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_says_what_it_was_measured_on_and_how(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert {"cpu", "cores", "platform"} <= found["machine"].keys()
    assert "python" in found["versions"]
    assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?", found["commit"])
    assert found["command"].split()[:2] == ["python", f"benchmarks/{file.stem}.py"]
    assert datetime.fromisoformat(found["date"]).tzinfo is not None


def test_all_results_are_of_one_commit_and_of_nothing_that_is_not_committed():
    """But for what `make gpu` writes, where there is a GPU."""
    together = [file for file in FILES if file.stem not in APART]
    (commit,) = set().union(*(commits(json.loads(file.read_text(encoding="utf-8"))) for file in together))
    assert not any("+" in one for one in [commit, *map(lambda name: result(name)["commit"], APART)])


def test_one_command_measures_every_file_anew():
    assert {file.stem for file in FILES} - APART == BENCHMARKS.keys()
    for name in BENCHMARKS:
        script, *_, file = command(name, "runs")
        assert (RESULTS.parents[1] / script).is_file()
        assert RESULTS.parents[1] / file in FILES


def test_all_benchmarks_run_unless_some_are_named(capsys):
    assert asked([]) == list(BENCHMARKS)
    assert asked(["plan", "generate"]) == ["generate", "plan"]
    with pytest.raises(SystemExit):
        asked(["plans"])
    assert "no benchmark named plans" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        asked(["predicted"])
    assert "name elastic, too" in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_quotes_the_results_as_they_are(page):
    text = page.read_text(encoding="utf-8")
    assert refreshed(text) == text, "python benchmarks/figures.py --write"


def test_every_table_is_on_a_page():
    named = [found[1] for page in PAGES for found in MARKED.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_has_a_figure_that_was_written_by_hand(page):
    text = page.read_text(encoding="utf-8")
    for part in MEASURED_NOWHERE:
        text = re.sub(part, "", text, flags=re.DOTALL)
    assert [line for line in text.splitlines() if BY_HAND.search(line)] == []


def test_another_result_makes_another_table(monkeypatch, tmp_path):
    """The tables are made of the files, and of nothing else."""
    for file in FILES:
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    found = result("generate")
    found["ratio_vs_transformers"] = 98.76
    (tmp_path / "generate.json").write_text(json.dumps(found), encoding="utf-8")
    before = TABLES["readme"]()
    monkeypatch.setattr("measured.RESULTS", tmp_path)
    after = TABLES["readme"]()
    assert before != after
    assert "98.76 times as many" in after


def test_what_stands_around_a_table_stays(monkeypatch):
    monkeypatch.setitem(TABLES, "readme", lambda: "| new |")
    page = "Before.\n\n<!-- figures: readme -->\n| old |\n<!-- end -->\n\nAfter.\n\n<!-- tested: x -->\n<!-- end -->\n"
    assert refreshed(page) == page.replace("old", "new")
    assert refreshed(page.replace("| old |\n", "")) == refreshed(page)


def test_a_page_that_names_an_unknown_table_is_told():
    with pytest.raises(KeyError, match="nothing"):
        refreshed("<!-- figures: nothing -->\n<!-- end -->\n")
