import json
from pathlib import Path

import pytest

from ductile import observe
from ductile.error_text import capitalised, error_text, error_with_place

HERE = Path(__file__).name


def their_own():
    return {}["solution"]


def in_a_library():
    return json.loads("{")


def refused():
    raise AssertionError


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (their_own, f"KeyError: 'solution' ({HERE}:{their_own.__code__.co_firstlineno + 1})"),
        (in_a_library, f"column 2 (char 1) ({HERE}:{in_a_library.__code__.co_firstlineno + 1})"),
        (refused, f"AssertionError ({HERE}:{refused.__code__.co_firstlineno + 1})"),
        (lambda: compile("a b", "mine.py", "exec"), "SyntaxError: invalid syntax (mine.py:1)"),
    ],
)
def test_the_line_of_whoever_wrote_it_is_named(function, said):
    assert error_with_place(caught(function)).endswith(said)


def test_half_a_character_can_be_written_and_sent():
    said = error_text(OSError("no such file: caf\udce9"))
    assert said == "OSError: no such file: caf\\udce9"
    assert said.encode()


def test_a_mistake_of_ours_is_only_named_where_it_may_be_one():
    error = caught(lambda: observe.write_json(Path("x"), {1: object()}))
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # without the lines of this file
    assert error_with_place(error) == error_text(error) == "TypeError: Object of type object is not JSON serializable"
    assert error_with_place(error, ours=True).startswith(f"{error_text(error)} (encoder.py:")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("slot 3 is lost", "Slot 3 is lost"),
        ("on-policy training waits", "On-policy training waits"),
        ("runs/x holds no run", "runs/x holds no run"),
        ("config.toml is missing", "config.toml is missing"),
        ("127.0.0.1:80 is taken", "127.0.0.1:80 is taken"),
        ("", ""),
    ],
)
def test_a_sentence_has_a_capital_unless_it_begins_with_a_path(said, sentence):
    assert capitalised(said) == sentence
