"""What a policy writes never steers the terminal."""

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ductile.dashboard.printable import printable
from ductile.dashboard.run_display import Lines
from ductile.dashboard.view import ViewEvent, ViewState, render
from ductile.events.rollouts import RewardError
from ductile.orchestrator.ending.final_summary import _one_line

EVIL = "\x1b]52;c;cm0=\a\x9b2J\x1b[31m\r\n\u202etxt\ud83d"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\a", "\\x1b]0;title\\x07"),
        ("\x9b2Jgone", "\\x9b2Jgone"),
        ("a\r\nb\tc\x7f", "a\\r\\nb\\tc\\x7f"),
        ("abc\u202ecba\u2069", "abc\\u202ecba\\u2069"),
        ("half \ud83d", "half \\ud83d"),
        ("hidden \U000e0041", "hidden \\U000e0041"),
        ("Größe 漢字 👩‍🔬 →", "Größe 漢字 👩‍🔬 →"),
    ],
)
def test_what_steers_is_spelled(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_may_stay() -> None:
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@given(st.text(st.characters()))
def test_nothing_is_left_that_steers(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cs"}
    assert printable(shown) == shown
    shown.encode()  # a terminal can take it


def test_everything_that_tells_of_a_run_uses_it() -> None:
    out = io.StringIO()
    lines = Lines(3, out)
    lines.on_event(RewardError("", sentence=EVIL))
    console = Console(file=out, force_terminal=True, color_system=None, width=200)
    console.print(render(ViewState("rl", 3, events=(ViewEvent(0.0, EVIL),))))
    out.write(_one_line(EVIL))
    assert out.getvalue().count("\\x1b]52;c;cm0=\\x07\\x9b2J\\x1b[31m\\r\\n\\u202etxt\\ud83d") == 3
    assert "\x1b]" not in out.getvalue()
    assert "\x9b" not in out.getvalue()
