"""Whatever is typed or written in a file, what comes out is a config or a list of problems, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ductile.config.reading.docs import ROOTS
from ductile.config.reading.errors import ConfigError, flag
from ductile.config.reading.key_tree import walk
from ductile.config.reading.parse import parse
from ductile.config.reading.rename import renames
from ductile.config.schema.run import RLConfig
from ductile.config.schema.section import Section
from tests.config.stories import furnish
from tests.nightly import examples

LOOSE = settings(
    max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
COMMANDS = pytest.mark.parametrize(("command", "root"), [(command, root) for command, root, _ in ROOTS])

json_value = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 3.5, 1e400, "None", "", "{", "[1]", '{"type": "x"}', "grpo", "all"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "0", "x"]), inner),
    max_leaves=5,
)


@pytest.fixture(autouse=True)
def _furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)


def parse_or_refuse(root: type[Section], words: list[str]) -> None:
    """Parse, and check that problems are told in words."""
    problems = ()
    try:
        parse(root, words)
    except ConfigError as error:
        problems = error.problems
    assert all(problem.what and problem.key for problem in problems)


def paths(root: type[Section]) -> list[tuple[str | int, ...]]:
    known = [path for path, _ in walk(root)]
    return [*known, *renames(root), *((*path, "x") for path in known[::7]), *((*path, 0) for path in known[::5])]


@COMMANDS
@LOOSE
@given(data=st.data())
def test_of_words(command: str, root: type[Section], data: st.DataObject) -> None:
    flags = st.sampled_from([flag(path) for path in paths(root)])
    negated = flags.map(lambda word: "--no-" + word.removeprefix("--"))
    value = st.sampled_from(
        ["3", "-1", "None", "true", "x", "", "[1]", "{", '{"type":"grpo"}', "good.toml", "@", "@x.toml"]
    )
    equals = st.tuples(flags, value).map("=".join)
    odd = st.sampled_from(["--", "-x", "--=", "--no-", "--.", "--a..b", "@good.toml", "@", "--model@x"])
    parse_or_refuse(root, data.draw(st.lists(flags | negated | value | equals | odd | st.text(max_size=3), max_size=6)))


@COMMANDS
@LOOSE
@given(data=st.data())
def test_of_files(command: str, root: type[Section], data: st.DataObject) -> None:
    tree: dict[str, Any] = {}
    for path in data.draw(st.lists(st.sampled_from(paths(root)), max_size=5)):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
            if not isinstance(node, dict):
                break
        else:
            node[str(path[-1])] = data.draw(json_value)
    Path("fuzz.json").write_text(json.dumps(tree))
    parse_or_refuse(root, ["@", "good.toml", "@", "fuzz.json"] if root.__name__ == "RLConfig" else ["@", "fuzz.json"])


@pytest.mark.parametrize(("name", "text"), [("loop.yaml", "a: &x [*x]\n"), ("deep.json", '{"a": ' + "[" * 20_000)])
def test_of_files_without_an_end(name: str, text: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match="is nested too deep, or in itself"):
        parse(ROOTS[0][1], ["@", name])


@LOOSE
@given(text=st.text(max_size=30), suffix=st.sampled_from([".toml", ".yaml", ".json"]))
def test_of_files_that_are_noise(text: str, suffix: str) -> None:
    Path(f"noise{suffix}").write_bytes(text.encode(errors="surrogatepass"))
    parse_or_refuse(ROOTS[0][1], ["@", f"noise{suffix}"])


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES = {
    "bomb.yaml": (BOMB, "holds more than 20,000 values"),
    "merged.yaml": (BOMB.replace("[x, x", "[{y: 1}, {y: 1}"), "holds more than 20,000 values"),
    "number.toml": (f"seed = {'9' * 5000}", "holds a value that cannot be read: Exceeds the limit"),
    "number.json": (f'{{"seed": {"9" * 5000}}}', "holds a value that cannot be read: Exceeds the limit"),
    "number.yaml": (f"seed: {'9' * 5000}", "holds a value that cannot be read: Exceeds the limit"),
    "date.yaml": ("seed: 2024-99-99", "holds a value that cannot be read: month must be in 1..12"),
    "dots.toml": (f"{'.'.join('a' * 5000)} = 1", "is nested too deep"),
    "brackets.json": ("[" * 100_000, "is nested too deep"),
    "tables.yaml": ("".join(f"{' ' * i}a:\n" for i in range(200)), "is nested too deep"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_made_to_hurt_gets_a_sentence(name: str) -> None:
    text, message = FILES[name]
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(RLConfig, ["@", name])


@pytest.mark.parametrize("output_dir", ["x" * 5000, "half-\ud83d", "a\0b"], ids=["long", "half", "zero"])
def test_an_output_dir_that_no_file_system_takes(output_dir: str) -> None:
    with pytest.raises(ConfigError, match="--output-dir"):
        parse(RLConfig, ["@", "good.toml", "--output-dir", output_dir])


def test_a_config_json_that_is_made_to_hurt() -> None:
    Path("model/config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="it is nested too deep"):
        parse(RLConfig, ["@", "good.toml"])
