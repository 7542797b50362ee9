"""README and docs quote the files in `benchmarks/results`, and these say where they come from. Nothing is measured."""

import json
import re
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

import run_all
from figures import MARKED, PAGES, refreshed
from measured import markdown, results, table, together
from provenance import RESULTS, provenance, results_file
from quoted import TABLES
from run_all import APART, BENCHMARKS, GRACE_S, ROOT, asked, command, run

FILES = sorted(RESULTS.glob("*/*.json"))
BY_HAND = re.compile(
    r"\d ?(?:%|x|times) (?:as (?:fast|slow|many|much|long)|faster|slower|less|more)|\d tokens/s", re.IGNORECASE
)
"""Words that go with a figure which a benchmark has found."""
MEASURED_NOWHERE = ("```.*?```", "<!-- figures: .*?<!-- end -->", "`[^`]*`")
"""Parts of a page that may have such words: printed output, what is made of the results, and code."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}, {file.stem}")
def test_a_result_says_what_it_was_measured_on_and_how(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert {"cpu", "cores", "platform"} <= found["machine"].keys()
    assert "python" in found["versions"]
    assert re.fullmatch(r"[0-9a-f]{12}", found["commit"]), "nothing that is not committed"
    script = APART.get(file.parent.name, file.parent.name)
    assert found["command"].split()[:2] == ["python", f"benchmarks/{script}.py"]
    assert datetime.fromisoformat(found["date"]).tzinfo is not None


def test_every_file_is_of_a_benchmark_and_named_after_its_machine():
    for file in FILES:
        found = json.loads(file.read_text(encoding="utf-8"))
        device, machine = found.get("device"), found["machine"]
        name, count = (device["name"], device["count"]) if device else (machine["cpu"], machine["cores"])
        assert file == results_file(file.parent.name, name, count)
        assert file.parent.name in BENCHMARKS.keys() | APART.keys()


def test_no_file_names_a_folder_of_who_measured(monkeypatch):
    for file in FILES:
        words = json.loads(file.read_text(encoding="utf-8"))["command"].split()
        assert not [word for word in words if word.startswith("/")]
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--model", "/home/me/a model", "--steps", "2"])
    assert provenance()["command"] == "python benchmarks/x.py --model ~'/a model' --steps 2"


def test_a_cpu_without_a_number_in_its_name_has_its_model_there():
    assert re.search(r"\d", provenance()["machine"]["cpu"])


def test_all_benchmarks_together_take_less_than_two_hours():
    assert sum(BENCHMARKS.values()) + GRACE_S * (len(BENCHMARKS) + 1) < 120 * 60
    assert max(BENCHMARKS.values()) + GRACE_S <= 600


def test_one_command_measures_every_file_anew():
    for name in BENCHMARKS:
        script, *_, file = command(name)
        assert (ROOT / script).is_file()
        assert ROOT / file == results_file(name)


def test_what_does_not_end_is_killed_with_all_that_it_started(tmp_path):
    pid, script = tmp_path / "pid", tmp_path / "hang.py"
    script.write_text(
        "import subprocess, sys, pathlib, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "time.sleep(100 if sys.argv[1:] else 0)\n"
        "sys.exit(3)\n"
    )
    assert run([str(script)], 60.0) == f"{script} ended with 3"
    wait_for_the_end_of(int(pid.read_text()))
    pid.unlink()
    assert run([str(script), "and hang"], 2.0) == f"{script} was still at work after 2 s, and was killed"
    if pid.exists():  # a slow machine may not have come that far
        wait_for_the_end_of(int(pid.read_text()))


def wait_for_the_end_of(pid):
    """Whoever was killed is gone, or nobody has asked after it yet."""
    status = Path(f"/proc/{pid}/status")
    with suppress(FileNotFoundError, ProcessLookupError):
        while "State:\tZ" not in status.read_text():
            time.sleep(0.01)


def test_one_that_fails_does_not_keep_the_others_from_their_turn(monkeypatch, capsys):
    ran = []

    def run_none(words, limit_s):
        ran.append(words[0])
        return "it was killed" if words[0].endswith("plan.py") else ""

    monkeypatch.setattr(run_all, "run", run_none)
    monkeypatch.setattr(run_all, "commit", lambda: "0" * 12)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "plan", "generate", "elastic"])
    assert run_all.main() == 1
    names = ("generate", "plan", "elastic", "figures")
    assert ran == [f"benchmarks/{name}.py" for name in names]
    said = capsys.readouterr().out
    assert said.count("== it was killed") == 2, "at once and at the end"
    assert re.search(r"plan +0\.0 minutes", said)


def test_all_benchmarks_run_unless_some_are_named(capsys):
    assert asked([]) == list(BENCHMARKS)
    assert asked(["plan", "generate"]) == ["generate", "plan"]
    with pytest.raises(SystemExit):
        asked(["plans"])
    assert "no benchmark named plans" in capsys.readouterr().err


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


def measured(benchmark, cpu, folder, **figures):
    """A machine's file."""
    file = folder / benchmark / f"{cpu}-2.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"machine": {"cpu": cpu, "cores": 2}, **figures}), encoding="utf-8")


def test_a_page_tells_of_all_machines_from_the_least_to_the_most(monkeypatch, tmp_path):
    monkeypatch.setattr("provenance.RESULTS", tmp_path)
    assert "grpo_step" not in TABLES["readme"]()
    measured("grpo_step", "one", tmp_path, ratio_vs_trl=1.88, ratio_vs_trl_on_policy=1.285)
    assert "1.88 times as fast in the best" in TABLES["readme"]()
    assert TABLES["readme"]().endswith("| 1 machine |")
    measured("grpo_step", "two", tmp_path, ratio_vs_trl=1.41, ratio_vs_trl_on_policy=1.0)
    assert "1.41 to 1.88 times as fast in the best" in TABLES["readme"]()
    assert "1 to 1.28 times |" in TABLES["readme"]()
    assert TABLES["readme"]().endswith("| 2 machines |")
    measured("grpo_step", "cut short", tmp_path)
    assert TABLES["readme"]().endswith("| 2 machines |"), "the third had no time to compare"


def test_the_rows_of_machines_lie_over_each_other(monkeypatch, tmp_path):
    monkeypatch.setattr("provenance.RESULTS", tmp_path)

    def rows(found):
        for name in ("a", "b"):
            yield name, found[name], "words"

    assert table("x", ("", "s", "why"), rows).startswith("Not measured yet")
    measured("x", "one", tmp_path, a=1.0, b=[3000, 2000.4])
    measured("x", "two", tmp_path, a=0.00123)
    assert len(results("x")) == 2
    assert table("x", ("", "s", "why"), rows) == (
        "| | s | why |\n|---|---|---|\n| a | 0.00123 to 1 | words |\n| b | 2,000 to 3,000 | words |\n\n"
        "On 2 machines: one (2 cores); two (2 cores)."
    )


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([2.0], "2"),
        ([1.876, 0.5], "0.5 to 1.88"),
        ([1.0001, 1.0002], "1"),
        ([[3, 4], 5], "3 to 5"),
        ([[], None], ""),
        (["", "why", "why"], "why"),
        (["why", "how"], "why; how"),
        ([999.4, 999.6], "999 to 1,000"),
    ],
)
def test_a_cell_goes_from_the_least_to_the_most(cells, said):
    assert together(cells) == said


def test_an_empty_cell_has_no_two_blanks():
    assert markdown(("", "s"), [("a", "")]) == "| | s |\n|---|---|\n| a | |"


def test_what_stands_around_a_table_stays(monkeypatch):
    monkeypatch.setitem(TABLES, "readme", lambda: "| new |")
    page = "Before.\n\n<!-- figures: readme -->\n| old |\n<!-- end -->\n\nAfter.\n\n<!-- tested: x -->\n<!-- end -->\n"
    assert refreshed(page) == page.replace("old", "new")
    assert refreshed(page.replace("| old |\n", "")) == refreshed(page)


def test_a_page_that_names_an_unknown_table_is_told():
    with pytest.raises(KeyError, match="nothing"):
        refreshed("<!-- figures: nothing -->\n<!-- end -->\n")
