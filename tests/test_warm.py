"""A process that is forked from a template begins as an executed one does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ECHO = [sys.executable, "-m", "tests.warm_echo"]


def began(*words: str, code: int = 0, **how: Any) -> dict[str, Any]:
    environment = {**os.environ, "DUCTILE_ECHO": "yes"}
    done = subprocess.run(
        [*ECHO, *words], input="hello", capture_output=True, text=True, env=environment, timeout=120, **how
    )
    assert (done.returncode, done.stderr) == (code, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", [(), ("again",), ("exec",), ("again", "exec")])
def test_it_begins_as_one_that_is_executed(
    tmp_path: Path, words: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    warm = began(*words, "7", code=7, cwd=tmp_path, start_new_session=True)
    request.getfixturevalue("cold")
    executed = began(*words, "7", code=7, cwd=tmp_path, start_new_session=True)
    assert (warm.pop("torch"), executed.pop("torch")) == (True, False)
    if "again" in words:
        assert warm.pop("parent") != executed.pop("parent")
    assert warm == executed
    assert warm["arguments"] == ["7"]
    assert warm["shown"]


def test_it_is_our_child_and_takes_signals() -> None:
    with subprocess.Popen([*ECHO, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
